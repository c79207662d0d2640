# SPDX-License-Identifier: Apache-2.0
"""The logs of groups read from the brokers of a cluster, for those who cannot reach the brokers' disks."""
