# SPDX-License-Identifier: Apache-2.0
"""The logs of coordinators in an existing Kafka cluster, the upstream.

`offsets_topic` creates and checks the topic. `requests` sends requests to the leaders of its partitions. `shard_log`
connects both with the shard set.
"""
