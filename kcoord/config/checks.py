# SPDX-License-Identifier: Apache-2.0
"""Checks between several broker keys. They run at the start and before a dynamic broker config is accepted."""

from __future__ import annotations

import re
from typing import Final

from kcoord.config.broker_settings import KNOWN_CONSUMER_ASSIGNORS, BrokerSettings
from kcoord.config.key import ConfigError
from kcoord.config.listeners import check_bindable
from kcoord.config.scram_users import parse_bootstrap_scram
from kcoord.config.security import check_security
from kcoord.config.upstream import check_upstream
from kcoord.config.workers import check_workers

MIN_DEDUPE_BUFFER_BYTES: Final = 1 << 20
"""With a smaller buffer, each pass of the log cleaner copies the whole log for a few keys."""
_THREAD_COUNTS: Final = (
    "background.threads",
    "log.cleaner.threads",
    "num.io.threads",
    "num.network.threads",
    "num.recovery.threads.per.data.dir",
    "num.replica.fetchers",
)


def check_broker_settings(config: BrokerSettings) -> None:
    """Raises ConfigError if values that are valid by themselves do not fit together."""
    _check_node_id(config)
    for kind in ("consumer", "share", "streams"):
        _check_group_kind(config, kind)
    _check_assignors(config)
    _check_protocols(config)
    _check_listeners(config)
    check_security(config)
    check_workers(config)
    check_upstream(config)
    _check_limits(config)


def _check_node_id(config: BrokerSettings) -> None:
    if "broker.id" in config.explicit and config.broker_id != config.node_id:
        raise ConfigError(
            f"Invalid value {config.node_id} for configuration node.id: it must be the same as broker.id "
            f"({config.broker_id}), which is its older name"
        )


def _check_group_kind(config: BrokerSettings, kind: str) -> None:
    for setting in ("session.timeout.ms", "heartbeat.interval.ms", "assignment.interval.ms"):
        lowest, default, highest = (f"group.{kind}.{infix}{setting}" for infix in ("min.", "", "max."))
        _check_at_least(config, highest, lowest)
        _check_at_least(config, default, lowest)
        _check_at_most(config, default, highest)
    heartbeat, session = f"group.{kind}.heartbeat.interval.ms", f"group.{kind}.session.timeout.ms"
    if _number(config, heartbeat) >= _number(config, session):
        raise ConfigError(
            f"Invalid value {_number(config, heartbeat)} for configuration {heartbeat}: "
            f"it must be less than {session} ({_number(config, session)})"
        )


def _check_at_least(config: BrokerSettings, name: str, limit: str) -> None:
    value, lowest = _number(config, name), _number(config, limit)
    if value < lowest:
        raise ConfigError(
            f"Invalid value {value} for configuration {name}: it must be greater than or equal to {limit} ({lowest})"
        )


def _check_at_most(config: BrokerSettings, name: str, limit: str) -> None:
    value, highest = _number(config, name), _number(config, limit)
    if value > highest:
        raise ConfigError(
            f"Invalid value {value} for configuration {name}: it must be less than or equal to {limit} ({highest})"
        )


def _number(config: BrokerSettings, name: str) -> int:
    value = config.value(name)
    assert isinstance(value, int)
    return value


_CLASS_REFERENCE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def _is_entry_point(name: str) -> bool:
    # Few brokers have assignors of their own, so the start of the others does not import this.
    from importlib.metadata import entry_points

    return bool(entry_points(group="kcoord.assignors", name=name))


def check_assignor_name(name: str) -> None:
    """Raises ConfigError unless the name is of a built-in assignor, a class, or an existing entry point."""
    if name not in KNOWN_CONSUMER_ASSIGNORS and not _CLASS_REFERENCE.fullmatch(name) and not _is_entry_point(name):
        raise ConfigError(
            f"{name} is not uniform, range, uniform-rack, an entry point of the group kcoord.assignors, or of the form "
            "package.module:Class"
        )


def _check_assignors(config: BrokerSettings) -> None:
    names = [KNOWN_CONSUMER_ASSIGNORS.get(name, name) for name in config.group_consumer_assignors]
    shown = ",".join(config.group_consumer_assignors)
    for name in config.group_consumer_assignors:
        try:
            check_assignor_name(name)
        except ConfigError as error:
            raise ConfigError(f"Invalid value {shown} for configuration group.consumer.assignors: {error}") from None
    if len(set(names)) != len(names):
        raise ConfigError(
            f"Invalid value {shown} for configuration group.consumer.assignors: an assignor must not be named twice"
        )
    share = config.value("group.share.assignors")
    if not isinstance(share, list) or len(share) != 1:
        raise ConfigError(
            f"Invalid value {share} for configuration group.share.assignors: exactly one assignor must be named"
        )


def _check_protocols(config: BrokerSettings) -> None:
    if "classic" not in config.group_coordinator_rebalance_protocols:
        raise ConfigError(
            f"Invalid value {','.join(config.group_coordinator_rebalance_protocols)} for configuration "
            "group.coordinator.rebalance.protocols: Disabling the 'classic' protocol is not supported."
        )


def _check_listeners(config: BrokerSettings) -> None:
    listeners = config.open_listeners
    if not listeners:
        raise ConfigError(
            f"Invalid value {','.join(config.listeners)} for configuration listeners: there is no listener for clients"
        )
    check_bindable("listeners", listeners)
    names = {listener.name for listener in listeners}
    for listener in config.client_advertised_listeners:
        shown = ",".join(config.advertised_listeners or [])
        if listener.name not in names:
            raise ConfigError(
                f"Invalid value {shown} for configuration advertised.listeners: {listener.name} is not among listeners"
            )
        if listener.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"Invalid value {shown} for configuration advertised.listeners: "
                f"clients cannot connect to {listener.host}, give a name or address that they can reach"
            )
    inter_broker = config.value("inter.broker.listener.name")
    if isinstance(inter_broker, str) and inter_broker.upper() not in names:
        raise ConfigError(
            f"Invalid value {inter_broker} for configuration inter.broker.listener.name: "
            f"it must be one of {', '.join(sorted(names))}"
        )


def _check_limits(config: BrokerSettings) -> None:
    if not config.data_folders:
        name = "log.dir" if config.log_dirs is None else "log.dirs"
        raise ConfigError(
            f"Invalid value for configuration {name}: "
            "at least one log directory must be defined via log.dirs or log.dir"
        )
    queued, socket = _number(config, "queued.max.request.bytes"), config.socket_request_max_bytes
    if queued > 0 and queued < socket:
        raise ConfigError(
            f"Invalid value {queued} for configuration queued.max.request.bytes: "
            f"it must be -1 or at least socket.request.max.bytes ({socket})"
        )
    for name in ("log.retention.ms", "log.retention.minutes", "log.retention.hours"):
        if config.value(name) == 0:
            raise ConfigError(f"Invalid value 0 for configuration {name}: it must be -1 (no limit) or at least 1")
    for name, least in (("log.roll.ms", 1), ("log.roll.jitter.ms", 0)):
        value = config.value(name)
        if isinstance(value, int) and value < least:
            raise ConfigError(f"Invalid value {value} for configuration {name}: it must be at least {least}")
    if config.log_cleaner_dedupe_buffer_size <= MIN_DEDUPE_BUFFER_BYTES:
        raise ConfigError(
            f"Invalid value {config.log_cleaner_dedupe_buffer_size} for configuration log.cleaner.dedupe.buffer.size: "
            f"it must be more than {MIN_DEDUPE_BUFFER_BYTES}"
        )
    if config.max_connections_per_ip == 0 and not config.max_connections_per_ip_overrides:
        raise ConfigError(
            "Invalid value 0 for configuration max.connections.per.ip: "
            "0 is only allowed together with max.connections.per.ip.overrides"
        )
    parse_ip_overrides(config.max_connections_per_ip_overrides)
    parse_bootstrap_scram(config.kcoord_bootstrap_scram or "")


def check_dynamic_settings(config: BrokerSettings) -> None:
    """Raises ConfigError for dynamic limits of 0: nobody could connect to undo them. The properties file may have them.

    As in Kafka 4.3.1.
    """
    for name in ("max.connections", "max.connection.creation.rate"):
        if name in config.dynamic and _number(config, name) == 0:
            raise ConfigError(f"Invalid value 0 for configuration {name}: it must be at least 1 as a dynamic config")


def check_thread_counts(old: BrokerSettings, new: BrokerSettings) -> None:
    """Raises ConfigError if a change makes a thread pool less than half or more than double as large.

    As in Kafka 4.3.1, with its phrases. The keys have no effect here. They are checked for scripts that change them.
    """
    for name in _THREAD_COUNTS:
        before, value = _number(old, name), _number(new, name)
        if name == "log.cleaner.threads":
            text = "Log cleaner threads cannot be "
            too_few, too_many = "reduced to less than half", "increased to more than double"
        else:
            text = f"Dynamic thread count update validation failed for {name}={value}, value should "
            too_few, too_many = "be at least half", "not be greater than double"
        if not before // 2 <= value <= before * 2:
            text += f"{too_few if value < before else too_many} the current value {before}"
            raise ConfigError(f"Invalid value {value} for configuration {name}: {text}")


def parse_ip_overrides(text: str) -> dict[str, int]:
    """Returns the counts of max.connections.per.ip.overrides (host:count pairs, separated by commas) by host."""
    limits: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        host, _, count = entry.rpartition(":")
        if not host or not count.strip().isdecimal():
            raise ip_overrides_error(text, "expected host:count pairs separated by commas")
        limits[host.strip().strip("[]")] = int(count)
    return limits


def ip_overrides_error(text: str, problem: str) -> ConfigError:
    """Returns the error of a value of max.connections.per.ip.overrides."""
    return ConfigError(f"Invalid value {text} for configuration max.connections.per.ip.overrides: {problem}")
