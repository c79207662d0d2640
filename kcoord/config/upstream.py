# SPDX-License-Identifier: Apache-2.0
"""The settings of a broker in front of an existing cluster, the upstream: `kcoord.upstream.*`.

The mode is on if `kcoord.upstream.bootstrap.servers` is set. Each broker of the upstream then has a port here, which
`kcoord.upstream.ports` gives by its node id. The port depends on nothing else, so it stays the same after restarts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kcoord.config.broker_settings import PASS_THROUGH, UPSTREAM_KEY, BrokerSettings
from kcoord.config.key import ConfigError
from kcoord.config.listeners import Listener
from kcoord.config.workers import LARGEST_PORT, PORTS_KEY, THREADS_KEY, worker_count

UPSTREAM_PREFIX: Final = "kcoord.upstream."
UPSTREAM_PORTS: Final = "kcoord.upstream.ports"
HEARTBEATS_PER_SESSION: Final = 3
AUTHENTICATION: Final = "kcoord.upstream.authentication"
_OF_OWN_LOGINS: Final = ("connections.max.reauth.ms", "sasl.enabled.mechanisms", "sasl.jaas.config")
_SECURITY: Final = ("security.protocol", "sasl.", "ssl.")


@dataclass(frozen=True, slots=True)
class UpstreamPorts:
    """The ports by node id: `fixed` for single ids, and a range for all other ids."""

    fixed: Mapping[int, int]
    spread: range
    """Node id N has the port at place N modulo the length. Port 0 leaves the choice to the system."""

    def port_of(self, node_id: int) -> int | None:
        """Returns the port of an upstream broker, None if there is none for this id."""
        if node_id in self.fixed:
            return self.fixed[node_id]
        return self.spread[node_id % len(self.spread)] if self.spread else None


def parse_upstream_ports(entries: Sequence[str]) -> UpstreamPorts:
    """Parses the entries of kcoord.upstream.ports: `LOWEST-HIGHEST`, a single port, or `ID:PORT`."""
    fixed: dict[int, int] = {}
    spread = range(0)
    for entry in entries:
        node_id, separator, port = entry.rpartition(":")
        if separator:
            fixed[_number(entry, node_id, entries)] = _port(entry, port, entries)
            continue
        if spread:
            raise _error(entries, "there can be one range of ports")
        low, dash, high = entry.partition("-")
        first = _port(entry, low, entries)
        spread = range(first, (_port(entry, high, entries) if dash else first) + 1)
        if not spread:
            raise _error(entries, f"{entry!r} has no port, since the first one is above the last one")
    if not entries:
        raise _error(entries, "give at least one port, such as 9100-9199")
    return UpstreamPorts(fixed, spread)


def _number(entry: str, text: str, entries: Sequence[str]) -> int:
    if not text.isascii() or not text.isdecimal():
        raise _error(entries, f"{entry!r} is neither LOWEST-HIGHEST nor ID:PORT")
    return int(text)


def _port(entry: str, text: str, entries: Sequence[str]) -> int:
    port = _number(entry, text.strip(), entries)
    if port > LARGEST_PORT:
        raise _error(entries, f"{port} is above {LARGEST_PORT}")
    return port


def _error(entries: Sequence[str], problem: str) -> ConfigError:
    return ConfigError(f"Invalid value {','.join(entries)} for configuration {UPSTREAM_PORTS}: {problem}")


def upstream_security(config: BrokerSettings) -> dict[str, str]:
    """Returns the security settings of connections to the upstream, by the names of Kafka's clients."""
    names = [(name, name.removeprefix(UPSTREAM_PREFIX)) for name in config.explicit if name.startswith(UPSTREAM_PREFIX)]
    return {own: config.explicit[name] for name, own in names if own.startswith(_SECURITY)}


def check_upstream(config: BrokerSettings) -> None:
    """Raises ConfigError if settings do not fit to a broker in front of an existing cluster."""
    if not config.kcoord_upstream_bootstrap_servers:
        if config.kcoord_upstream_authentication == PASS_THROUGH:
            raise ConfigError(
                f"Invalid value {PASS_THROUGH} for configuration {AUTHENTICATION}: set {UPSTREAM_KEY}, too"
            )
        return
    for address in config.kcoord_upstream_bootstrap_servers:
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) <= LARGEST_PORT:
            raise ConfigError(
                f"Invalid value {','.join(config.kcoord_upstream_bootstrap_servers)} for configuration {UPSTREAM_KEY}: "
                f"{address!r} is not host:port"
            )
    ports = parse_upstream_ports(config.kcoord_upstream_ports)
    if worker_count(config) > 1:
        name = PORTS_KEY if config.kcoord_worker_ports else THREADS_KEY
        raise _unsupported(name, str(config.value(name)), "kcoord runs as one worker then")
    listeners = config.open_listeners
    if len(listeners) > 1:
        raise _unsupported("listeners", ",".join(config.listeners), "only one listener is possible")
    listener = listeners[0]
    if listener.port and listener.port in (*ports.fixed.values(), *ports.spread):
        problem = f"the port {listener.port} is that of listeners={listener}; choose another one"
        raise _error(config.kcoord_upstream_ports, problem)
    heartbeat_ms, session_ms = config.kcoord_upstream_heartbeat_interval_ms, config.kcoord_upstream_session_timeout_ms
    if heartbeat_ms * HEARTBEATS_PER_SESSION > session_ms:
        raise ConfigError(
            f"Invalid value {heartbeat_ms} for configuration {UPSTREAM_PREFIX}heartbeat.interval.ms: it must be at "
            f"most a third of {UPSTREAM_PREFIX}session.timeout.ms ({session_ms})"
        )
    if config.passes_logins:
        _check_pass_through(config, listener)
    for name, reason in _unusable(config):
        raise _unsupported(name, "[hidden]" if "secret" in name else str(config.value(name)), reason)


def _check_pass_through(config: BrokerSettings, listener: Listener) -> None:
    """Raises ConfigError if the logins of clients cannot be passed on."""
    protocol = config.kcoord_upstream_security_protocol
    if not protocol.upper().startswith("SASL_"):
        raise ConfigError(
            f"Invalid value {protocol} for configuration {UPSTREAM_PREFIX}security.protocol: it must be SASL_PLAINTEXT "
            f"or SASL_SSL, because {AUTHENTICATION}={PASS_THROUGH} passes the logins of clients on"
        )
    if not listener.security_protocol.has_sasl:
        raise ConfigError(
            f"Invalid value {listener} for configuration listeners: its security protocol must be SASL_PLAINTEXT or "
            f"SASL_SSL, because {AUTHENTICATION}={PASS_THROUGH} passes the logins of clients on"
        )
    for name in sorted(config.explicit):
        if not name.startswith(UPSTREAM_PREFIX) and name.endswith(_OF_OWN_LOGINS):
            shown = "[hidden]" if name.endswith("config") else config.explicit[name]
            raise ConfigError(
                f"Invalid value {shown} for configuration {name}: with {AUTHENTICATION}={PASS_THROUGH} the upstream "
                "decides about logins; leave it out"
            )


def _unusable(config: BrokerSettings) -> Iterator[tuple[str, str]]:
    if config.authorizer_class_name and not config.passes_logins:
        yield "authorizer.class.name", "requests for topics have the rights of kcoord's own principal in the upstream"
    if config.delegation_token_secret_key:
        yield "delegation.token.secret.key", "there are no delegation tokens"


def _unsupported(name: str, value: str, reason: str) -> ConfigError:
    return ConfigError(f"Invalid value {value} for configuration {name}: with {UPSTREAM_KEY}, {reason}")
