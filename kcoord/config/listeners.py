# SPDX-License-Identifier: Apache-2.0
"""Parses `listeners`, `advertised.listeners` and `listener.security.protocol.map` and checks that they fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from kcoord.config.key import ConfigError

_LISTENER = re.compile(
    r"(?P<name>[^:/\s]+)://(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<host>[^\[\]:/\s]*)):(?P<port>-?[0-9]{1,10})"
)
_KEY_OF_LISTENER = re.compile(r"listener\.name\.[^.]*\.(?P<key>.*)")
_KEYS_OF_MECHANISMS = (
    "connections.max.reauth.ms",
    "sasl.jaas.config",
    "sasl.login.callback.handler.class",
    "sasl.login.class",
    "sasl.server.callback.handler.class",
)
ANY_ADDRESS = ("", "0.0.0.0", "::")


class SecurityProtocol(IntEnum):
    """The security protocols with Kafka's numbers, as in broker registrations."""

    PLAINTEXT = 0
    SSL = 1
    SASL_PLAINTEXT = 2
    SASL_SSL = 3

    @property
    def has_tls(self) -> bool:
        """True if connections are encrypted."""
        return self in (SecurityProtocol.SSL, SecurityProtocol.SASL_SSL)

    @property
    def has_sasl(self) -> bool:
        """True if clients have to authenticate with SASL."""
        return self in (SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL)


@dataclass(slots=True, frozen=True)
class Listener:
    """An entry of `listeners` or `advertised.listeners`. An empty host stands for every interface."""

    name: str
    host: str
    port: int
    security_protocol: SecurityProtocol

    @property
    def binds_everywhere(self) -> bool:
        """True if the address is a wildcard, to which no client can connect."""
        return self.host in ANY_ADDRESS

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.name}://{host}:{self.port}"


def key_of_listener(name: str) -> str | None:
    """Returns KEY of `listener.name.NAME.KEY`, or of `listener.name.NAME.MECHANISM.KEY` if KEY belongs to mechanisms.

    Returns None for any other name.
    """
    match = _KEY_OF_LISTENER.fullmatch(name)
    if match is None:
        return None
    key = match["key"].removeprefix("oauthbearer.")
    return next((of_mechanism for of_mechanism in _KEYS_OF_MECHANISMS if key.endswith(of_mechanism)), key)


def parse_protocol_map(text: str) -> dict[str, SecurityProtocol]:
    """Returns the protocols in `NAME:PROTOCOL,...` by name. Names become upper case, as in Kafka."""
    protocols: dict[str, SecurityProtocol] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, protocol = entry.rpartition(":")
        name, protocol = name.strip().upper(), protocol.strip().upper()
        if not name or protocol not in SecurityProtocol.__members__:
            raise ConfigError(
                f"Invalid value {text} for configuration listener.security.protocol.map: "
                f"{entry!r} is not NAME:PROTOCOL; allowed protocols: {', '.join(SecurityProtocol.__members__)}"
            )
        if name in protocols:
            raise ConfigError(
                f"Invalid value {text} for configuration listener.security.protocol.map: {name} occurs twice"
            )
        protocols[name] = SecurityProtocol[protocol]
    return protocols


def parse_listeners(key: str, entries: Sequence[str], protocols: Mapping[str, SecurityProtocol]) -> list[Listener]:
    """Returns the listeners of configuration `key`, each with the security protocol of its name."""
    listeners = [_parse_listener(key, entry, protocols) for entry in entries]
    names = [listener.name for listener in listeners]
    if len(set(names)) != len(names):
        raise _error(key, entries, "each listener must have a different name")
    return listeners


def check_bindable(key: str, listeners: Sequence[Listener]) -> None:
    """Raises ConfigError if two listeners have the same port, unless one has an IPv4 and one an IPv6 address."""
    seen: dict[int, Listener] = {}
    for listener in listeners:
        other = seen.setdefault(listener.port, listener)
        if listener.port and other is not listener and (":" in other.host) == (":" in listener.host):
            raise _error(key, list(map(str, listeners)), "each listener must have a different port")


def _parse_listener(key: str, entry: str, protocols: Mapping[str, SecurityProtocol]) -> Listener:
    match = _LISTENER.fullmatch(entry.strip())
    if match is None:
        raise _error(key, [entry], "expected NAME://host:port, with an IPv6 host in brackets")
    port = int(match["port"])
    if not 0 <= port <= 65535:
        raise _error(key, [entry], "the port must be between 0 and 65535")
    name = match["name"].upper()
    if name not in protocols:
        raise _error(key, [entry], f"listener.security.protocol.map has no security protocol for {name}")
    return Listener(name, match["ipv6"] or match["host"] or "", port, protocols[name])


def _error(key: str, entries: Sequence[str], problem: str) -> ConfigError:
    return ConfigError(f"Invalid value {','.join(entries)} for configuration {key}: {problem}")
