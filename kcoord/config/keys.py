# SPDX-License-Identifier: Apache-2.0
"""The tables of keys, read from `keys.txt` beside this module: keys of brokers, topics, groups and client metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from kcoord.config.key import (
    ConfigKey,
    ConfigType,
    Effect,
    Importance,
    UpdateMode,
    Validator,
    in_range,
    list_of,
    matching,
    one_of,
    one_of_ignoring_case,
    parse_value,
)
from kcoord.config.kip1327 import REVISION_ENTRY
from kcoord.config.listeners import key_of_listener

_DURATION = r"by_duration:P(?=.)([0-9]+D)?(T(?=.)([0-9]+H)?([0-9]+M)?([0-9]+(\.[0-9]+)?S)?)?"

_NAMED_VALIDATORS: Final[Mapping[str, Validator]] = {
    "<dead-letter-topic>": matching(r"(?!__).*", "a topic name, which must not start with '__'"),
    "<distinct>": Validator(
        "entries that are not empty and must not contain duplicate values",
        lambda value: not isinstance(value, list) or ("" not in value and len(set(value)) == len(value)),
    ),
    "<kip1327-revisions>": matching(
        REVISION_ENTRY, "entries of software-name:form or *:form, form off, creation-time or new-partitions"
    ),
    "<non-empty>": matching(r"(?s).+", "a non-empty string"),
    "<at-least-one>": Validator("any values, at least one", bool),
    "<offset-reset>": matching(rf"latest|earliest|{_DURATION}", "[latest, earliest, by_duration:PnDTnHnMn.nS]"),
    "<throttled-replicas>": matching(r"\*||[0-9]+:[0-9]+", "[partitionId]:[brokerId],... or *"),
    "<url>": matching(r"(https?://\S+)?", "an http or https URL, or empty"),
}

_TYPES: Final = {kind.name.lower(): kind for kind in ConfigType}
_WORDS: Final[Mapping[str, tuple[str, object]]] = {
    "high": ("importance", Importance.HIGH),
    "medium": ("importance", Importance.MEDIUM),
    "low": ("importance", Importance.LOW),
    "per-broker": ("update_mode", UpdateMode.PER_BROKER),
    "cluster-wide": ("update_mode", UpdateMode.CLUSTER_WIDE),
    "internal": ("internal", True),
    "since-4.4": ("first_release", "4.4"),
    "all-workers": ("same_for_all_workers", True),
    "refused": ("effect", Effect.REFUSED),
    "no-effect": ("effect", Effect.NONE),
}


def read_tables(text: str) -> dict[str, dict[str, ConfigKey]]:
    """Returns the keys by section and name; raises ValueError with the first line that is wrong."""
    tables: dict[str, dict[str, ConfigKey]] = {}
    for block in re.split(r"\n(?! )", text):
        line, *texts = block.split("\n")
        if line.startswith("["):
            section, _, no_effect_text = line[1:].partition("]")
            table = tables[section] = {}
        elif line and not line.startswith("#"):
            try:
                key = _key(line, " ".join([part.strip() for part in texts]), no_effect_text.strip())
            except (LookupError, TypeError, ValueError) as error:
                raise ValueError(f"The line {line!r} is not a valid configuration key: {error!r}") from error
            table[key.name] = key
    return tables


def _key(line: str, text: str, no_effect_text: str) -> ConfigKey:
    name, type_name, default, allowed, words, *synonyms = [cell.strip() for cell in line.split("|")]
    kind = _TYPES[type_name]
    marks = _marks(words)
    if not text and marks.get("effect") is Effect.NONE:
        text = no_effect_text
    return ConfigKey(
        name,
        kind,
        None if default == "null" else parse_value(kind, default),
        _validator(kind, allowed) if allowed else None,
        doc=text,
        synonyms=tuple(_synonyms(synonyms[0])) if synonyms else (),
        **marks,
    )


@cache
def _marks(words: str) -> dict[str, Any]:
    """Returns the fields of ConfigKey for these words. Most keys have the same words, so the result is cached."""
    return dict([_WORDS[word] for word in words.split()])


@cache
def _validator(kind: ConfigType, allowed: str) -> Validator:
    if allowed.startswith("<"):
        return _NAMED_VALIDATORS[allowed]
    words = allowed.split()
    lowest, dots, highest = words[0].partition("..")
    if dots:
        return in_range(_number(lowest), _number(highest), _number(words[2]) if words[1:2] == ["or"] else None)
    if kind is ConfigType.LIST:
        return list_of(words)
    return one_of_ignoring_case(words[1:]) if words[0] == "any-case" else one_of(words)


def _number(text: str) -> float | None:
    if not text:
        return None
    return float(text) if "." in text else int(text)


def _synonyms(text: str) -> Iterator[tuple[str, int]]:
    for entry in text.split(","):
        name, _, factor = entry.partition("*")
        yield name.strip(), int(factor) if factor else 1


# Importing pathlib would take longer than reading the tables.
with open(__file__.removesuffix(".py") + ".txt", encoding="utf-8") as _file:
    _TABLES: Final = read_tables(_file.read())

BROKER_KEYS: Final[Mapping[str, ConfigKey]] = _TABLES["broker"]
"""All broker keys: Kafka's and kcoord's own."""
TOPIC_KEYS: Final[Mapping[str, ConfigKey]] = _TABLES["topic"]
GROUP_KEYS: Final[Mapping[str, ConfigKey]] = _TABLES["group"]
CLIENT_METRICS_KEYS: Final[Mapping[str, ConfigKey]] = _TABLES["client metrics"]

_PLUGIN_PREFIXES = (
    "listener.name.",
    "config.providers.",
    "rsm.config.",
    "rlmm.config.",
    "sasl.jaas.config.",
    "metrics.jmx.",
)
_EFFECTIVE_OF_LISTENER: Final = ("connections.max.reauth.ms", "sasl.", "ssl.")
"""The beginning of the keys that one listener may have for itself."""
_CLUSTER_WIDE_LISTENER_KEYS = ("max.connections", "max.connection.creation.rate", "num.network.threads")
"""Keys that may be set for one listener of all brokers. Any other key is set for a listener of one broker."""


def is_without_effect(name: str) -> bool:
    """Returns whether Kafka knows the broker key, but it has no effect here."""
    own_key = key_of_listener(name)
    key = BROKER_KEYS.get(own_key if own_key is not None and own_key.startswith(_EFFECTIVE_OF_LISTENER) else name)
    if key is None:
        return name.startswith(_PLUGIN_PREFIXES)
    return key.effect is Effect.NONE


def broker_key(name: str) -> ConfigKey | None:
    """Returns the broker key of this name; for the key of a listener, the broker key KEY.

    Keys of a listener are `listener.name.NAME.KEY` and, for a SASL mechanism, `listener.name.NAME.MECHANISM.KEY`. They
    are kept, checked and described as in Kafka 4.3.1. Those of TLS and SASL have an effect.
    """
    return BROKER_KEYS.get(key_of_listener(name) or name)


def is_for_one_broker(name: str) -> bool:
    """Returns whether this is a key of a listener that cannot be set for all brokers."""
    key = key_of_listener(name)
    return key is not None and key not in _CLUSTER_WIDE_LISTENER_KEYS
