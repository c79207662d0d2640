# SPDX-License-Identifier: Apache-2.0
"""The defaults of Kafka's topic configs, and the width of its relative offsets."""

from __future__ import annotations

from kcoord.storage.cleaner import CleaningRules
from kcoord.storage.index import MAX_RELATIVE_OFFSET
from kcoord.storage.segment import LogConfig


def test_topic_configs() -> None:
    """`file.delete.delay.ms` is the exception: without a value, a log removes its files at once."""
    log = LogConfig()
    assert (log.segment_bytes, log.segment_ms) == (1_073_741_824, 604_800_000)
    assert (log.segment_index_bytes, log.index_interval_bytes, log.file_delete_delay_ms) == (10_485_760, 4096, 0)
    rules = CleaningRules()
    assert (rules.min_cleanable_dirty_ratio, rules.delete_retention_ms) == (0.5, 86_400_000)
    assert (rules.min_compaction_lag_ms, rules.max_compaction_lag_ms) == (0, 9_223_372_036_854_775_807)


def test_relative_offsets_are_int32() -> None:
    assert MAX_RELATIVE_OFFSET == 0x7FFF_FFFF
