# SPDX-License-Identifier: Apache-2.0
"""Ring 3: logs of record batches in Kafka's own file format, through a small FileSystem interface.

No clock, thread, event loop or random source is used here; whoever calls passes time and identifiers in.
"""
