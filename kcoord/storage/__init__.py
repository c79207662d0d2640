# SPDX-License-Identifier: Apache-2.0
"""Logs of record batches in Kafka's own file format, on top of a small FileSystem interface (ring 3).

This package uses no clock, thread, event loop or source of random numbers. Callers pass times and identifiers.

Start with `log`, which has the theory of operation: what orders appends, flushes and reads, and what survives a crash.
`recovery` describes the opening of a log after a crash, `cleaner` and `replacement` the compaction, `journal` the one
sync for many logs, and `log_dir` the data folder.
"""
