# SPDX-License-Identifier: Apache-2.0
"""The topic data plane: partitions on top of storage.Log, idempotence, fetch, offset queries, retention.
Synchronous; time is an argument.
"""
