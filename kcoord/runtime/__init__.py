# SPDX-License-Identifier: Apache-2.0
"""The synchronous runtime around replicated state machines: shards, batches, timers, replies that wait for the disk."""
