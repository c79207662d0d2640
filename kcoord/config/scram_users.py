# SPDX-License-Identifier: Apache-2.0
"""Parses users with SCRAM passwords: `kcoord.bootstrap.scram`, and `--add-scram` of `kcoord storage format`.

A user is `MECHANISM=[name=NAME,password=PASSWORD]`, as in Kafka's storage tool. `iterations` and `salt` are optional,
and `saltedpassword` replaces `password`. No error repeats a part of the text that can be a secret.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from dataclasses import dataclass, field
from typing import Final

from kcoord.config.key import ConfigError
from kcoord_protocol.scram_mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism

BOOTSTRAP_SCRAM: Final = "kcoord.bootstrap.scram"
_MECHANISMS: Final = {mechanism.mechanism_name: mechanism for mechanism in ScramMechanism}
_USER: Final = re.compile(r"([^=\[\],]*)=\[(.*)\]", re.DOTALL)
_END_OF_USER: Final = re.compile(r"(?<=\])\s*,")
_FIELDS: Final = ("name", "password", "saltedpassword", "salt", "iterations")


@dataclass(slots=True, frozen=True)
class ScramUser:
    """A user and a mechanism, with a password, or with a salted password and its salt."""

    mechanism: ScramMechanism
    name: str
    password: str | None = field(repr=False)
    salted_password: bytes | None = field(repr=False)
    salt: bytes | None = field(repr=False)
    """None for a random salt."""
    iterations: int


def parse_bootstrap_scram(text: str) -> list[ScramUser]:
    """Returns the users of kcoord.bootstrap.scram, which are separated by commas. Raises ConfigError."""
    try:
        return parse_scram_users(_END_OF_USER.split(text) if text.strip() else [])
    except ValueError as error:
        raise ConfigError(f"Invalid value [hidden] for configuration {BOOTSTRAP_SCRAM}: {error}") from None


def parse_scram_users(texts: list[str]) -> list[ScramUser]:
    """Returns the users. Raises ValueError if a text is not a user, or if a user has two passwords for a mechanism."""
    users: dict[tuple[ScramMechanism, str], ScramUser] = {}
    for text in texts:
        user = _parse_user(text.strip())
        if (user.mechanism, user.name) in users:
            raise ValueError(f"user {user.name!r} occurs twice for {user.mechanism.mechanism_name}")
        users[user.mechanism, user.name] = user
    return list(users.values())


def _parse_user(text: str) -> ScramUser:
    match = _USER.fullmatch(text)
    if match is None:
        raise ValueError("a user is not MECHANISM=[name=NAME,password=PASSWORD]")
    mechanism = _MECHANISMS.get(match[1].strip())
    if mechanism is None:
        raise ValueError(f"the mechanism {match[1].strip()!r} is not one of {', '.join(_MECHANISMS)}")
    fields = _parse_fields(match[2])
    name = fields.get("name")
    if not name:
        raise ValueError("a user has no name: give name=NAME")
    password, salted_password = fields.get("password"), fields.get("saltedpassword")
    if (password is None) == (salted_password is None):
        raise ValueError(f"user {name!r} needs one of password and saltedpassword")
    if not (password or salted_password):
        raise ValueError(f"the password of user {name!r} is empty")
    if salted_password is not None and "salt" not in fields:
        raise ValueError(f"user {name!r} needs the salt of its saltedpassword")
    if fields.get("salt") == "":
        # Without a salt, equal passwords have equal keys.
        raise ValueError(f"the salt of user {name!r} is empty")
    return ScramUser(
        mechanism,
        name,
        password,
        _decode(name, "saltedpassword", salted_password),
        _decode(name, "salt", fields.get("salt")),
        _parse_iterations(name, fields.get("iterations")),
    )


def _parse_fields(text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, separator, value = part.partition("=")
        key = key.strip()
        if not separator or key not in _FIELDS:
            # The part may belong to a password that contains a comma.
            fields_text = "=, ".join(_FIELDS)
            raise ValueError(f"a user has an unknown field; the fields are {fields_text}= (a password has no comma)")
        if key in fields:
            raise ValueError(f"a user has {key} twice")
        fields[key] = value[1:-1] if len(value) >= 2 and value[0] == value[-1] == '"' else value
    return fields


def _decode(name: str, key: str, text: str | None) -> bytes | None:
    try:
        return None if text is None else b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the {key} of user {name!r} is not base64") from None


def _parse_iterations(name: str, text: str | None) -> int:
    if text is None:
        return MIN_ITERATIONS
    iterations = int(text) if re.fullmatch(r"[0-9]{1,9}", text) else -1
    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise ValueError(f"the iterations of user {name!r} are not from {MIN_ITERATIONS} to {MAX_ITERATIONS}")
    return iterations
