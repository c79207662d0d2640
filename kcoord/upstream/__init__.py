# SPDX-License-Identifier: Apache-2.0
"""A broker in front of an existing cluster, the upstream: groups are coordinated here, the data stays there.

The gateway: `process` starts and stops everything. `cluster` is the upstream as kcoord's own connections see it.
`gateway` has what the client connections share. `splice` passes requests and responses on, and `rewriting` changes the
few responses that have addresses of brokers.

The log of the groups in a topic of the upstream: `group_log` has its connections. `offsets_topic` creates and checks
the topic. `requests` sends requests to the leaders of its partitions. `shard_log` connects them with the shard set.
"""
