# SPDX-License-Identifier: Apache-2.0
"""Which topic names are legal, and which two names may not exist side by side."""

from __future__ import annotations

import re
from typing import Final

from kcoord_protocol.errors import Errors, KafkaError

MAX_TOPIC_NAME_LENGTH: Final = 249
_LEGAL: Final = re.compile(r"[a-zA-Z0-9._-]+")


def topic_name_problem(name: str) -> str | None:
    """Why `name` cannot be a topic's name, None where it can."""
    if not name:
        return "the empty string is not allowed"
    if name in (".", ".."):
        return f"'{name}' is not allowed"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"the length of '{name}' is longer than the max allowed length {MAX_TOPIC_NAME_LENGTH}"
    if not _LEGAL.fullmatch(name):
        return f"'{name}' contains one or more characters other than ASCII alphanumerics, '.', '_' and '-'"
    return None


def check_topic_name(name: str) -> None:
    problem = topic_name_problem(name)
    if problem is not None:
        raise KafkaError(Errors.INVALID_TOPIC_EXCEPTION, f"Topic name is invalid: {problem}")


def collision_form(name: str) -> str:
    """Names with the same form collide: metric names cannot tell '.' from '_'."""
    return name.replace(".", "_")


def may_collide(name: str) -> bool:
    return "." in name or "_" in name
