# SPDX-License-Identifier: Apache-2.0
"""TopicConfig: the settings of one topic: the topic's own configs, then the broker's keys, then the defaults."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config.attributes import TopicAttributes
from kcoord.config.broker_config import BrokerConfig
from kcoord.config.key import ConfigError, ConfigValue
from kcoord.config.keys import TOPIC_KEYS


class TopicConfig(TopicAttributes):
    """The settings of one topic in effect. Attributes are named like the keys, with `_` for `.`."""

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        self.values = values
        for name, value in values.items():
            setattr(self, TOPIC_KEYS[name].attribute, value)

    @classmethod
    def resolve(cls, broker_config: BrokerConfig, overrides: Mapping[str, str]) -> TopicConfig:
        """Returns the settings of a topic with the configs `overrides`.

        An unknown key or an unusable value counts as not set.
        """
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
        """True if the log cleaner compacts the topic."""
        return "compact" in self.cleanup_policy

    @property
    def is_deleted(self) -> bool:
        """True if retention by time and size applies."""
        return "delete" in self.cleanup_policy

    @property
    def effective_segment_bytes(self) -> int:
        """internal.segment.bytes (which has no lower limit) if it is set, else segment.bytes."""
        return self.segment_bytes if self.internal_segment_bytes is None else self.internal_segment_bytes


def topic_default(broker_config: BrokerConfig, name: str) -> ConfigValue:
    """Returns the value of a topic key that the topic does not set."""
    key = TOPIC_KEYS[name]
    for broker_key, factor in key.synonyms:
        value = broker_config.value(broker_key)
        if value is not None:
            return _convert(value, factor, name)
    return key.default


def _convert(value: ConfigValue, factor: int, name: str) -> ConfigValue:
    if name == "retention.ms":
        assert isinstance(value, int)
        return -1 if value < 0 else value * factor
    return value * factor if factor != 1 and isinstance(value, int) else value


def check_topic_configs(broker_config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Raises ConfigError for unknown keys, bad values and values that do not fit together."""
    for name, text in overrides.items():
        key = TOPIC_KEYS.get(name)
        if key is None or not broker_config.has_key(key):
            raise ConfigError(f"Unknown topic config name: {name}")
        key.parse(text)
    config = TopicConfig.resolve(broker_config, overrides)
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise ConfigError(
            f"conflict topic config setting min.compaction.lag.ms ({config.min_compaction_lag_ms}) "
            f"> max.compaction.lag.ms ({config.max_compaction_lag_ms})"
        )
    if config.remote_storage_enable:
        raise ConfigError(
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage."
        )
