# SPDX-License-Identifier: Apache-2.0
"""Translates properties files of Kafka's tools and Java clients to settings of this client.

Each key is used or translated, or a note says why it has no effect, as Java's clients log unknown keys. No key is
dropped silently, and a connection is never less secure than the file says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Final, NamedTuple

from kcoord.client.security import Security
from kcoord.client.security_properties import PLAINTEXT, SECURITY_PROTOCOL, is_used, security_of

_SECRET_SUFFIXES: Final = (".password", ".secret")
_SECURITY_PREFIXES: Final = ("ssl.", "sasl.")
_CLASS_PREFIX: Final = "org.apache.kafka.common.serialization."

_BYTES: Final = "records are bytes here: the application decodes them"
_REASONS: Final = {
    "heartbeat.interval.ms": "the group decides: its config consumer.heartbeat.interval.ms",
    "interceptor.classes": "classes of Java cannot be loaded",
    "key.deserializer": _BYTES,
    "key.serializer": "records are bytes or text here: the application encodes them",
    "max.in.flight.requests.per.connection": "one batch per partition is under way at a time",
    "metric.reporters": "classes of Java cannot be loaded",
    "partition.assignment.strategy": (
        "the coordinator assigns; group.remote.assignor names its assignor, group.local.assignors those of this client"
    ),
    "partitioner.class": "records with a key go to the partition that Java's default partitioner chooses",
    "retries": "requests are repeated until default.api.timeout.ms or delivery.timeout.ms",
    "session.timeout.ms": "the group decides: its config consumer.session.timeout.ms",
    "value.deserializer": _BYTES,
    "value.serializer": "records are bytes or text here: the application encodes them",
}
_WHAT_THE_CLIENT_DOES: Final = {
    "key.deserializer": ("ByteArrayDeserializer",),
    "key.serializer": ("ByteArraySerializer", "StringSerializer"),
    "value.deserializer": ("ByteArrayDeserializer",),
    "value.serializer": ("ByteArraySerializer", "StringSerializer"),
}
"""The classes that do what this client always does. They need no note."""


class Translation(NamedTuple):
    """The settings and the security of a properties file, and a note for each other property."""

    settings: dict[str, str]
    security: Security | None
    notes: list[str]


def translate(properties: Mapping[str, str], setting_names: Set[str]) -> Translation:
    """Splits properties into settings, security and notes.

    `setting_names` are the settings of the client in Kafka's spelling. Raises ConfigException for security settings
    that this client does not support.
    """
    # Kafka's clients, too, ignore space at the end of a line, except in a value of the type PASSWORD.
    properties = {key: text if key.endswith(_SECRET_SUFFIXES) else text.strip() for key, text in properties.items()}
    settings = {key: text for key, text in properties.items() if key in setting_names}
    if "enable.idempotence" in setting_names and settings.get("acks", "all") in ("0", "1"):
        # As in Java's client, acks=0 or 1 disables idempotence, unless enable.idempotence asks for it.
        settings.setdefault("enable.idempotence", "false")
    if "group.protocol" in settings:
        settings["group.protocol"] = settings["group.protocol"].lower()
        if settings["group.protocol"] == "classic":
            del settings["group.protocol"]
    security = security_of(properties)
    return Translation(settings, security, list(_notes(properties, setting_names, is_plain=security is None)))


def _notes(properties: Mapping[str, str], setting_names: Set[str], *, is_plain: bool) -> Iterator[str]:
    for key, text in sorted(properties.items()):
        if key == "group.protocol" and text.lower() == "classic":
            yield "group.protocol=classic has no effect here: this client supports the consumer protocol only (KIP-848)"
        elif key in setting_names or key == SECURITY_PROTOCOL or _is_done_anyway(key, text):
            continue
        elif key.startswith(_SECURITY_PREFIXES) and is_plain:
            yield f"{key} has no effect here: connections are plain, {SECURITY_PROTOCOL} is {PLAINTEXT}"
        elif is_used(key, properties):
            continue
        elif key in _REASONS:
            yield f"{key} has no effect here: {_REASONS[key]}"
        else:
            yield f"{key} has no effect here"


def _is_done_anyway(key: str, text: str) -> bool:
    return text.removeprefix(_CLASS_PREFIX) in _WHAT_THE_CLIENT_DOES.get(key, ())
