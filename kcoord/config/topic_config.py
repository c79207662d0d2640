# SPDX-License-Identifier: Apache-2.0
"""TopicConfig: the settings of one topic, each from the topic itself, else from the broker's keys, else its default."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config.broker_config import BrokerConfig
from kcoord.config.key import ConfigError, ConfigKey, ConfigValue, key_table
from kcoord.config.topic_keys import TOPIC_CONFIG_KEYS

TOPIC_KEYS: Mapping[str, ConfigKey] = key_table(TOPIC_CONFIG_KEYS)

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS

TOPIC_CONFIG_SYNONYMS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "cleanup.policy": (("log.cleanup.policy", 1),),
    "compression.gzip.level": (("compression.gzip.level", 1),),
    "compression.lz4.level": (("compression.lz4.level", 1),),
    "compression.type": (("compression.type", 1),),
    "compression.zstd.level": (("compression.zstd.level", 1),),
    "delete.retention.ms": (("log.cleaner.delete.retention.ms", 1),),
    "file.delete.delay.ms": (("log.segment.delete.delay.ms", 1),),
    "flush.messages": (("log.flush.interval.messages", 1),),
    "flush.ms": (("log.flush.interval.ms", 1), ("log.flush.scheduler.interval.ms", 1)),
    "index.interval.bytes": (("log.index.interval.bytes", 1),),
    "local.retention.bytes": (("log.local.retention.bytes", 1),),
    "local.retention.ms": (("log.local.retention.ms", 1),),
    "max.compaction.lag.ms": (("log.cleaner.max.compaction.lag.ms", 1),),
    "max.decompressed.message.bytes": (("max.decompressed.message.bytes", 1),),
    "max.message.bytes": (("message.max.bytes", 1),),
    "message.timestamp.after.max.ms": (("log.message.timestamp.after.max.ms", 1),),
    "message.timestamp.before.max.ms": (("log.message.timestamp.before.max.ms", 1),),
    "message.timestamp.type": (("log.message.timestamp.type", 1),),
    "min.cleanable.dirty.ratio": (("log.cleaner.min.cleanable.ratio", 1),),
    "min.compaction.lag.ms": (("log.cleaner.min.compaction.lag.ms", 1),),
    "min.insync.replicas": (("min.insync.replicas", 1),),
    "preallocate": (("log.preallocate", 1),),
    "remote.copy.lag.bytes": (("log.remote.copy.lag.bytes", 1),),
    "remote.copy.lag.ms": (("log.remote.copy.lag.ms", 1),),
    "retention.bytes": (("log.retention.bytes", 1),),
    "retention.ms": (("log.retention.ms", 1), ("log.retention.minutes", MINUTE_MS), ("log.retention.hours", HOUR_MS)),
    "segment.bytes": (("log.segment.bytes", 1),),
    "segment.index.bytes": (("log.index.size.max.bytes", 1),),
    "segment.jitter.ms": (("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", HOUR_MS)),
    "segment.ms": (("log.roll.ms", 1), ("log.roll.hours", HOUR_MS)),
    "unclean.leader.election.enable": (("unclean.leader.election.enable", 1),),
}
"""Broker keys that give a topic key its default, best first, each with the factor between the units of the two."""


class TopicConfig:
    """One topic's settings in effect. Attributes are named like the keys, with `_` for `.`."""

    cleanup_policy: list[str]
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    delete_retention_ms: int
    errors_deadletterqueue_group_enable: bool
    file_delete_delay_ms: int
    flush_messages: int
    flush_ms: int
    follower_replication_throttled_replicas: list[str]
    index_interval_bytes: int
    internal_segment_bytes: int | None
    leader_replication_throttled_replicas: list[str]
    local_retention_bytes: int
    local_retention_ms: int
    max_compaction_lag_ms: int
    max_decompressed_message_bytes: int
    max_message_bytes: int
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    message_timestamp_type: str
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    min_insync_replicas: int
    preallocate: bool
    remote_copy_lag_bytes: int
    remote_copy_lag_ms: int
    remote_log_copy_disable: bool
    remote_log_delete_on_disable: bool
    remote_storage_enable: bool
    retention_bytes: int
    retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    segment_jitter_ms: int
    segment_ms: int
    unclean_leader_election_enable: bool

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        self.values = values
        for name, value in values.items():
            setattr(self, TOPIC_KEYS[name].attribute, value)

    @classmethod
    def resolve(cls, broker_config: BrokerConfig, overrides: Mapping[str, str]) -> TopicConfig:
        """The settings of a topic whose own configs are `overrides`. What is not usable there counts as not set."""
        values = {name: topic_default(broker_config, name) for name in TOPIC_KEYS}
        for name, text in overrides.items():
            key = TOPIC_KEYS.get(name)
            if key is None:
                continue
            try:
                values[name] = key.parse(text)
            except ConfigError:
                continue
        return cls(values)

    @property
    def is_compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def is_deleted(self) -> bool:
        """Whether retention by time and size applies."""
        return "delete" in self.cleanup_policy

    @property
    def effective_segment_bytes(self) -> int:
        """segment.bytes, or the internal key that has no lower limit."""
        return self.segment_bytes if self.internal_segment_bytes is None else self.internal_segment_bytes


def topic_default(broker_config: BrokerConfig, name: str) -> ConfigValue:
    """What a topic key is where the topic does not set it."""
    for broker_key, factor in TOPIC_CONFIG_SYNONYMS.get(name, ()):
        value = broker_config.value(broker_key)
        if value is not None:
            return _convert(value, factor, name)
    return TOPIC_KEYS[name].default


def _convert(value: ConfigValue, factor: int, name: str) -> ConfigValue:
    if name == "retention.ms":
        assert isinstance(value, int)
        return -1 if value < 0 else value * factor
    return value * factor if factor != 1 and isinstance(value, int) else value


def check_topic_configs(broker_config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Raise ConfigError for unknown keys, bad values and values that do not fit together."""
    for name, text in overrides.items():
        key = TOPIC_KEYS.get(name)
        if key is None or not broker_config.has_key(key):
            raise ConfigError(f"Unknown topic config name: {name}")
        key.parse(text)
    config = TopicConfig.resolve(broker_config, overrides)
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise ConfigError(
            f"Invalid value {config.min_compaction_lag_ms} for configuration min.compaction.lag.ms: "
            f"it must not be greater than max.compaction.lag.ms ({config.max_compaction_lag_ms})"
        )
    if config.remote_storage_enable:
        raise ConfigError("Invalid value true for configuration remote.storage.enable: there is no tiered storage here")
