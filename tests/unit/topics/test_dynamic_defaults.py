# SPDX-License-Identifier: Apache-2.0
"""A dynamic broker key that is a default of topics takes effect in open partitions, and ends when it is removed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.config import BROKER_KEYS, TOPIC_KEYS, Effect
from kcoord.metadata.image import BROKER_RESOURCE
from kcoord.topics.partition import Partition
from tests.support.calls import count_calls
from tests.unit.topics.helpers import TOPIC, Cluster, image_of

VALUES = {
    "compression.gzip.level": "7",
    "compression.lz4.level": "7",
    "compression.type": "gzip",
    "compression.zstd.level": "7",
    "log.cleaner.delete.retention.ms": "7",
    "log.cleaner.max.compaction.lag.ms": "7",
    "log.cleaner.min.cleanable.ratio": "0.25",
    "log.cleaner.min.compaction.lag.ms": "7",
    "log.cleanup.policy": "compact",
    "log.flush.interval.messages": "7",
    "log.flush.interval.ms": "7",
    "log.index.interval.bytes": "7",
    "log.index.size.max.bytes": "7777",
    "log.message.timestamp.after.max.ms": "7",
    "log.message.timestamp.before.max.ms": "7",
    "log.message.timestamp.type": "LogAppendTime",
    "log.retention.bytes": "7",
    "log.retention.ms": "7",
    "log.roll.jitter.ms": "7",
    "log.roll.ms": "7777",
    "log.segment.bytes": "7777777",
    "log.segment.delete.delay.ms": "7",
    "max.decompressed.message.bytes": "7",
    "message.max.bytes": "7",
    "min.insync.replicas": "7",
}


def topic_key_of(broker_key: str) -> str:
    return next(name for name, key in TOPIC_KEYS.items() if broker_key in dict(key.synonyms))


def test_every_dynamic_default_has_a_value_here() -> None:
    defaults = [BROKER_KEYS[name] for key in TOPIC_KEYS.values() for name, _ in key.synonyms]
    assert VALUES.keys() == {key.name for key in defaults if key.dynamic and key.effect is not Effect.NONE}


def settings(partition: Partition) -> tuple[object, ...]:
    """Returns everything that a partition derives from its topic's configuration."""
    log = partition.log_config
    lengths = (log.segment_bytes, log.segment_ms, log.segment_index_bytes, log.index_interval_bytes)
    rules = partition.rules
    stamps = (rules.log_append_time, rules.timestamp_before_max_ms, rules.timestamp_after_max_ms)
    codec = (rules.compression, rules.compression_level, rules.max_record_bytes)
    return (*lengths, log.file_delete_delay_ms, rules.max_message_bytes, rules.compacted, *stamps, *codec)


READ_WHEN_NEEDED = {
    "delete.retention.ms",
    "flush.messages",
    "flush.ms",
    "max.compaction.lag.ms",
    "min.cleanable.dirty.ratio",
    "min.compaction.lag.ms",
    "min.insync.replicas",
    "retention.bytes",
    "retention.ms",
}
"""Topic keys that a partition reads at each use, so nothing is derived from them."""


@pytest.mark.parametrize("name", VALUES)
def test_a_dynamic_default_reaches_open_partitions(name: str) -> None:
    topic_key = topic_key_of(name)
    # A compression level counts only for its own codec, and the jitter is taken from log.roll.ms.
    codec = name.split(".")[1] if name.startswith("compression.") and name.endswith(".level") else "producer"
    cluster = Cluster(properties={"compression.type": codec, "log.roll.ms": "100000"})
    partition = cluster.store.partition(TOPIC, 0)
    partition.open(cluster.now_ms)
    before, usual = settings(partition), partition.config.values[topic_key]

    def change(configs: dict[str, str]) -> None:
        image = image_of({TOPIC: 1})
        image.configs = {(BROKER_RESOURCE, ""): configs}
        cluster.config.apply_dynamic(image.effective_broker_configs(1))
        cluster.update(image)

    change({name: VALUES[name]})
    assert partition.config.values[topic_key] == TOPIC_KEYS[topic_key].parse(VALUES[name]) != usual
    assert (settings(partition) != before) == (topic_key not in READ_WHEN_NEEDED)
    change({})
    assert (settings(partition), partition.config.values[topic_key]) == (before, usual)


def test_a_key_that_is_no_default_of_topics_costs_the_same_with_many_topics() -> None:
    def calls(topics: int) -> int:
        cluster = Cluster(image_of({f"t{number}": 1 for number in range(topics)}))
        image = replace(cluster.image, configs={(BROKER_RESOURCE, ""): {"log.cleaner.backoff.ms": "1"}})
        image.note_origin(cluster.image, ())
        cluster.config.apply_dynamic(image.effective_broker_configs(1))
        return count_calls(lambda: cluster.store.on_metadata_update(image, cluster.now_ms))

    calls(1)  # The first call imports modules.
    assert calls(200) == calls(2)
