# SPDX-License-Identifier: Apache-2.0
"""Legal topic names, pairs of names that collide, and names that have to be the id of a node."""

from __future__ import annotations

import re
from typing import Final

from kcoord_protocol.errors import Errors, KafkaError

MAX_TOPIC_NAME_LENGTH: Final = 249
_LEGAL: Final = re.compile(r"[a-zA-Z0-9._-]+")


def topic_name_problem(name: str) -> str | None:
    """Returns why `name` cannot be the name of a topic, None if it can. The texts are Kafka's."""
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
    """Returns a form that is equal for names that collide. In metric names, '.' and '_' are the same."""
    return name.replace(".", "_")


def may_collide(name: str) -> bool:
    return "." in name or "_" in name


def check_node_id(text: str, noun: str) -> None:
    """Raises INVALID_REQUEST, with Kafka's text, unless `text` is an integer of 32 bits. `noun` begins the text."""
    if not re.fullmatch(r"[+-]?[0-9]{1,10}", text) or not -(1 << 31) <= int(text) < 1 << 31:
        raise KafkaError(Errors.INVALID_REQUEST, f"{noun} must be an integer, but it is: {text}")
