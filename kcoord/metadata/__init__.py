# SPDX-License-Identifier: Apache-2.0
"""Topics, partitions, configs and brokers of the cluster: an image replayed from a log of Kafka metadata records."""
