# SPDX-License-Identifier: Apache-2.0
"""The log under every fault that a disk and a crash can bring."""
