# SPDX-License-Identifier: Apache-2.0
"""The topic data plane: partitions on top of storage.Log, idempotence, fetch, offset queries, retention.

All of it is synchronous and runs in the event loop; the current time is an argument.
"""
