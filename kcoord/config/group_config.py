# SPDX-License-Identifier: Apache-2.0
"""GroupConfig: the dynamic settings of one group (resource type GROUP), each within the broker's limits.

A key that a group does not set has the value of the broker key of the same meaning.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config.broker_config import BrokerConfig
from kcoord.config.key import (
    ConfigError,
    ConfigKey,
    ConfigType,
    ConfigValue,
    DistinctEntries,
    Importance,
    Matches,
    OneOf,
    Validator,
    at_least,
    key_table,
)

_DURATION = r"by_duration:P(?=.)([0-9]+D)?(T(?=.)([0-9]+H)?([0-9]+M)?([0-9]+(\.[0-9]+)?S)?)?"
_OTHER_DOC = "Stored without effect: groups of this kind are not served here."


def _key(
    name: str,
    default: ConfigValue,
    validator: Validator | None,
    doc: str = _OTHER_DOC,
    *,
    type_: ConfigType | None = None,
    importance: Importance = Importance.MEDIUM,
    internal: bool = False,
    first_release: str = "4.3",
) -> ConfigKey:
    types = {bool: ConfigType.BOOLEAN, int: ConfigType.INT, str: ConfigType.STRING}
    return ConfigKey(
        name,
        type_ or types[type(default)],
        default,
        validator,
        importance,
        doc,
        internal=internal,
        honoured=doc != _OTHER_DOC,
        first_release=first_release,
    )


GROUP_KEYS: Mapping[str, ConfigKey] = key_table(
    (
        _key(
            "consumer.assignment.interval.ms",
            1000,
            at_least(0),
            "Least time between two target assignments computed for the group.",
        ),
        _key(
            "consumer.assignor.offload.enable",
            True,
            None,
            "Compute target assignments that take long in the background.",
            internal=True,
            first_release="4.4",
        ),
        _key("consumer.heartbeat.interval.ms", 5000, at_least(1), "How often members are told to send a heartbeat."),
        _key("consumer.session.timeout.ms", 45000, at_least(1), "A member that is silent for this long is removed."),
        _key(
            "kcoord.offsets.retention.minutes",
            10080,
            at_least(1),
            "How long offsets of this group are kept (KIP-211), in place of the broker's offsets.retention.minutes.",
        ),
        _key("errors.deadletterqueue.copy.record.enable", False, None, first_release="4.4"),
        _key(
            "errors.deadletterqueue.topic.name",
            "",
            Matches(r"(?!__).*", "a topic name, which must not start with '__'"),
            first_release="4.4",
        ),
        _key("share.assignment.interval.ms", 1000, at_least(0)),
        _key("share.assignor.offload.enable", True, None, internal=True, first_release="4.4"),
        _key(
            "share.auto.offset.reset",
            "latest",
            Matches(rf"latest|earliest|{_DURATION}", "[latest, earliest, by_duration:PnDTnHnMn.nS]"),
        ),
        _key("share.delivery.count.limit", 5, at_least(2)),
        _key("share.heartbeat.interval.ms", 5000, at_least(1)),
        _key("share.isolation.level", "read_uncommitted", OneOf(("read_committed", "read_uncommitted"))),
        _key("share.partition.max.record.locks", 2000, at_least(100)),
        _key("share.record.lock.duration.ms", 30000, at_least(1000)),
        _key("share.renew.acknowledge.enable", True, None),
        _key("share.session.timeout.ms", 45000, at_least(1)),
        _key(
            "streams.acceptable.recovery.lag",
            10000,
            at_least(0),
            type_=ConfigType.LONG,
            internal=True,
            first_release="4.4",
        ),
        _key("streams.assignment.interval.ms", 1000, at_least(0)),
        _key("streams.assignor.name", None, None, type_=ConfigType.STRING, first_release="4.4"),
        _key("streams.assignor.offload.enable", True, None, internal=True, first_release="4.4"),
        _key("streams.heartbeat.interval.ms", 5000, at_least(1)),
        _key("streams.initial.rebalance.delay.ms", 3000, at_least(0)),
        _key("streams.num.standby.replicas", 0, at_least(0)),
        _key("streams.num.warmup.replicas", 2, at_least(0), internal=True, first_release="4.4"),
        _key(
            "streams.rack.aware.assignment.tags",
            [],
            DistinctEntries(),
            type_=ConfigType.LIST,
            importance=Importance.LOW,
            first_release="4.4",
        ),
        _key("streams.session.timeout.ms", 45000, at_least(1)),
        _key("streams.task.offset.interval.ms", 60000, at_least(1), internal=True, first_release="4.4"),
    )
)

_LIMITS: Mapping[str, tuple[str | None, str | None]] = {
    "consumer.assignment.interval.ms": (
        "group.consumer.min.assignment.interval.ms",
        "group.consumer.max.assignment.interval.ms",
    ),
    "consumer.heartbeat.interval.ms": (
        "group.consumer.min.heartbeat.interval.ms",
        "group.consumer.max.heartbeat.interval.ms",
    ),
    "consumer.session.timeout.ms": ("group.consumer.min.session.timeout.ms", "group.consumer.max.session.timeout.ms"),
    "share.assignment.interval.ms": (
        "group.share.min.assignment.interval.ms",
        "group.share.max.assignment.interval.ms",
    ),
    "share.delivery.count.limit": ("group.share.min.delivery.count.limit", "group.share.max.delivery.count.limit"),
    "share.heartbeat.interval.ms": ("group.share.min.heartbeat.interval.ms", "group.share.max.heartbeat.interval.ms"),
    "share.partition.max.record.locks": (
        "group.share.min.partition.max.record.locks",
        "group.share.max.partition.max.record.locks",
    ),
    "share.record.lock.duration.ms": (
        "group.share.min.record.lock.duration.ms",
        "group.share.max.record.lock.duration.ms",
    ),
    "share.session.timeout.ms": ("group.share.min.session.timeout.ms", "group.share.max.session.timeout.ms"),
    "streams.assignment.interval.ms": (
        "group.streams.min.assignment.interval.ms",
        "group.streams.max.assignment.interval.ms",
    ),
    "streams.heartbeat.interval.ms": (
        "group.streams.min.heartbeat.interval.ms",
        "group.streams.max.heartbeat.interval.ms",
    ),
    "streams.num.standby.replicas": (None, "group.streams.max.standby.replicas"),
    "streams.num.warmup.replicas": (None, "group.streams.max.warmup.replicas"),
    "streams.session.timeout.ms": ("group.streams.min.session.timeout.ms", "group.streams.max.session.timeout.ms"),
    "streams.task.offset.interval.ms": ("group.streams.min.task.offset.interval.ms", None),
}
"""Broker keys with the smallest and the greatest value of a group key."""


class GroupConfig:
    """One group's settings in effect. Attributes are named like the keys, with `_` for `.`."""

    consumer_assignment_interval_ms: int
    consumer_assignor_offload_enable: bool
    consumer_heartbeat_interval_ms: int
    consumer_session_timeout_ms: int
    errors_deadletterqueue_copy_record_enable: bool
    errors_deadletterqueue_topic_name: str
    kcoord_offsets_retention_minutes: int
    share_assignment_interval_ms: int
    share_assignor_offload_enable: bool
    share_auto_offset_reset: str
    share_delivery_count_limit: int
    share_heartbeat_interval_ms: int
    share_isolation_level: str
    share_partition_max_record_locks: int
    share_record_lock_duration_ms: int
    share_renew_acknowledge_enable: bool
    share_session_timeout_ms: int
    streams_acceptable_recovery_lag: int
    streams_assignment_interval_ms: int
    streams_assignor_name: str
    streams_assignor_offload_enable: bool
    streams_heartbeat_interval_ms: int
    streams_initial_rebalance_delay_ms: int
    streams_num_standby_replicas: int
    streams_num_warmup_replicas: int
    streams_rack_aware_assignment_tags: list[str]
    streams_session_timeout_ms: int
    streams_task_offset_interval_ms: int

    def __init__(self, values: Mapping[str, ConfigValue]) -> None:
        self.values = values
        for name, value in values.items():
            setattr(self, GROUP_KEYS[name].attribute, value)

    @classmethod
    def resolve(cls, broker_config: BrokerConfig, overrides: Mapping[str, str]) -> GroupConfig:
        """The settings of a group whose own configs are `overrides`, moved into the broker's limits of today."""
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
    """The value of a group key that the group does not set."""
    if name == "streams.assignor.name":
        return _streams_assignors(broker_config)[0]
    broker_key = name.removeprefix("kcoord.") if name.startswith("kcoord.") else f"group.{name}"
    try:
        return broker_config.value(broker_key)
    except KeyError:
        return GROUP_KEYS[name].default


def _streams_assignors(broker_config: BrokerConfig) -> list[str]:
    names = broker_config.value("group.streams.assignors")
    assert isinstance(names, list)
    return names or [""]


def _within_limits(broker_config: BrokerConfig, name: str, value: ConfigValue) -> ConfigValue:
    lowest, highest = _limits(broker_config, name)
    if not isinstance(value, int):
        return value
    value = value if lowest is None else max(value, lowest)
    return value if highest is None else min(value, highest)


def _limits(broker_config: BrokerConfig, name: str) -> tuple[int | None, int | None]:
    limits: list[int | None] = []
    for broker_key in _LIMITS.get(name, (None, None)):
        limit = None if broker_key is None else broker_config.value(broker_key)
        assert limit is None or isinstance(limit, int)
        limits.append(limit)
    return limits[0], limits[1]


def check_group_configs(broker_config: BrokerConfig, overrides: Mapping[str, str]) -> None:
    """Raise ConfigError for unknown keys, bad values and values outside the broker's limits."""
    for name, text in overrides.items():
        key = GROUP_KEYS.get(name)
        if key is None or not broker_config.has_key(key):
            raise ConfigError(f"Unknown group config name: {name}")
        value = key.parse(text)
        _check_limits(broker_config, name, value)
        registered = _streams_assignors(broker_config)
        if name == "streams.assignor.name" and value not in registered:
            names = ", ".join(registered)
            raise ConfigError(
                f"{name} '{value}' is not a registered task assignor. Registered assignors are: [{names}]."
            )
    for kind in ("consumer", "share", "streams"):
        heartbeat, session = f"{kind}.heartbeat.interval.ms", f"{kind}.session.timeout.ms"
        config = GroupConfig.resolve(broker_config, overrides).values
        heartbeat_ms, session_ms = config[heartbeat], config[session]
        assert isinstance(heartbeat_ms, int)
        assert isinstance(session_ms, int)
        if heartbeat_ms >= session_ms:
            raise ConfigError(f"{session} must be greater than {heartbeat} ({heartbeat_ms}), got {session_ms}")


def _check_limits(broker_config: BrokerConfig, name: str, value: ConfigValue) -> None:
    if not isinstance(value, int):
        return
    lowest, highest = _limits(broker_config, name)
    lowest_key, highest_key = _LIMITS.get(name, (None, None))
    if lowest is not None and value < lowest:
        raise ConfigError(f"{name} must be greater than or equal to {lowest_key} ({lowest}), got {value}")
    if highest is not None and value > highest:
        raise ConfigError(f"{name} must be less than or equal to {highest_key} ({highest}), got {value}")
