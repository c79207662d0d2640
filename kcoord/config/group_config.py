# SPDX-License-Identifier: Apache-2.0
"""GroupConfig: the dynamic settings of one group (resource type GROUP), each within the broker's limits."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config.attributes import GroupAttributes
from kcoord.config.broker_config import BrokerConfig
from kcoord.config.key import ConfigError, ConfigValue
from kcoord.config.keys import BROKER_KEYS, GROUP_KEYS


class GroupConfig(GroupAttributes):
    """The settings of one group in effect. Attributes are named like the keys, with `_` for `.`.

    A key that the group does not set has the value of the corresponding broker key.
    """

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        self.values = values
        for name, value in values.items():
            setattr(self, GROUP_KEYS[name].attribute, value)

    @classmethod
    def resolve(cls, broker_config: BrokerConfig, overrides: Mapping[str, str]) -> GroupConfig:
        """Returns the settings of a group with the configs `overrides`, moved into the broker's current limits.

        An unknown key or an unusable value counts as not set.
        """
        values = {name: group_default(broker_config, name) for name in GROUP_KEYS}
        for name, text in overrides.items():
            key = GROUP_KEYS.get(name)
            if key is None:
                continue
            try:
                values[name] = _within_limits(broker_config, name, key.parse(text))
            except ConfigError:
                continue
        return cls(values)


def group_default(broker_config: BrokerConfig, name: str) -> ConfigValue:
    """Returns the value of a group key that the group does not set."""
    if name == "streams.assignor.name":
        return _streams_assignors(broker_config)[0]
    if name in BROKER_KEYS:
        broker_key = name
    else:
        broker_key = name.removeprefix("kcoord.") if name.startswith("kcoord.") else f"group.{name}"
    try:
        return broker_config.value(broker_key)
    except KeyError:
        return GROUP_KEYS[name].default


def _streams_assignors(broker_config: BrokerConfig) -> list[str]:
    names = broker_config.value("group.streams.assignors")
    assert isinstance(names, list)
    return names or [""]


def _limit(broker_config: BrokerConfig, name: str, bound: str) -> int | None:
    """Returns the `min` or `max` of a group key, which a broker key sets; None if Kafka has no such limit.

    The limits of `consumer.session.timeout.ms` are `group.consumer.min.session.timeout.ms` and `...max...`.
    """
    kind, _, setting = name.partition(".")
    broker_key = f"group.{kind}.{bound}.{setting.removeprefix('num.')}"
    limit = broker_config.value(broker_key) if broker_key in BROKER_KEYS else None
    assert limit is None or isinstance(limit, int)
    return limit


def _within_limits(broker_config: BrokerConfig, name: str, value: ConfigValue) -> ConfigValue:
    if not isinstance(value, int):
        return value
    lowest, highest = _limit(broker_config, name, "min"), _limit(broker_config, name, "max")
    value = value if lowest is None else max(value, lowest)
    return value if highest is None else min(value, highest)


def check_group_configs(broker_config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Raises ConfigError for unknown keys, bad values and values outside the broker's limits."""
    for name, text in overrides.items():
        key = GROUP_KEYS.get(name)
        if key is None or not broker_config.has_key(key):
            raise ConfigError(f"Unknown group config name: {name}")
        value = key.parse(text)
        _check_limits(broker_config, name, value)
        if name == "streams.assignor.name" and value not in _streams_assignors(broker_config):
            names = ", ".join(_streams_assignors(broker_config))
            raise ConfigError(
                f"{name} '{value}' is not a registered task assignor. Registered assignors are: [{names}]."
            )
    config = GroupConfig.resolve(broker_config, overrides).values
    for kind in ("consumer", "share", "streams"):
        heartbeat, session = f"{kind}.heartbeat.interval.ms", f"{kind}.session.timeout.ms"
        heartbeat_ms, session_ms = config[heartbeat], config[session]
        assert isinstance(heartbeat_ms, int)
        assert isinstance(session_ms, int)
        if heartbeat_ms >= session_ms:
            raise ConfigError(f"{session} must be greater than {heartbeat}")


def _check_limits(broker_config: BrokerConfig, name: str, value: ConfigValue) -> None:
    if not isinstance(value, int):
        return
    lowest, highest = _limit(broker_config, name, "min"), _limit(broker_config, name, "max")
    if (lowest is None or lowest <= value) and (highest is None or value <= highest):
        return
    if highest is None:
        raise ConfigError(f"{name} must be greater than or equal to {lowest}")
    if lowest is None:
        raise ConfigError(f"{name} must be less than or equal to {highest}")
    raise ConfigError(f"{name} must be in the range {lowest} to {highest} inclusive.")
