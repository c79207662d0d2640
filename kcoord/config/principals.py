# SPDX-License-Identifier: Apache-2.0
"""Parses settings that name principals: `super.users` and `kcoord.listener.principals`."""

from __future__ import annotations

from collections.abc import Sequence

from kcoord.config.key import ConfigError
from kcoord.config.listeners import Listener, SecurityProtocol

SUPER_USERS = "super.users"
LISTENER_PRINCIPALS = "kcoord.listener.principals"


def parse_super_users(text: str) -> frozenset[str]:
    """Returns the principals of super.users (Type:name entries, separated by semicolons)."""
    principals = frozenset(filter(None, (entry.strip() for entry in text.split(";"))))
    for principal in sorted(principals):
        check_principal(SUPER_USERS, text, principal)
    return principals


def check_principal(key: str, text: str, principal: str) -> None:
    """Raises ConfigError unless the principal is Type:name."""
    type_, separator, name = principal.partition(":")
    if not separator or not type_.strip() or not name.strip():
        raise ConfigError(
            f"Invalid value {text} for configuration {key}: expected a string in format principalType:principalName "
            f"but got {principal}; for example User:admin"
        )


def parse_listener_principals(entries: Sequence[str], listeners: Sequence[Listener]) -> dict[str, str]:
    """Returns the principals in `NAME=Type:name` entries by the names of their listeners, which are upper case.

    Raises ConfigError unless each entry names another listener with PLAINTEXT. A listener of any other protocol has the
    principals that its clients prove.
    """
    text = ",".join(entries)
    protocols = {listener.name: listener.security_protocol for listener in listeners}
    principals: dict[str, str] = {}
    for entry in entries:
        name, separator, principal = (part.strip() for part in entry.partition("="))
        name = name.upper()
        if not separator:
            raise _error(text, f"{entry!r} is not NAME=Type:name")
        check_principal(LISTENER_PRINCIPALS, text, principal)
        if name not in protocols:
            raise _error(text, f"{name} is not among listeners ({', '.join(protocols)})")
        if protocols[name] is not SecurityProtocol.PLAINTEXT:
            raise _error(
                text,
                f"the security protocol of {name} is {protocols[name].name}, but only listeners with PLAINTEXT have "
                "a fixed principal; leave it out",
            )
        if name in principals:
            raise _error(text, f"{name} occurs twice")
        principals[name] = principal
    return principals


def _error(text: str, problem: str) -> ConfigError:
    return ConfigError(f"Invalid value {text} for configuration {LISTENER_PRINCIPALS}: {problem}")
