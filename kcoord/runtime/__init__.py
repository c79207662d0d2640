# SPDX-License-Identifier: Apache-2.0
"""The runtime around replicated state machines: shards, batches, timers, and replies that wait for the log.

Start with `shard_set`, which has the theory of operation. `shard_context` is one shard, `shard_loads` the loading, and
`shard_log` the contract of the logs. `result` is the contract of the state machines.
"""
