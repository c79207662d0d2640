# SPDX-License-Identifier: Apache-2.0
"""The options of the data source: read, checked, with their defaults. docs/pipeline.md has the same list for users."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, cast

from kcoord.pipeline.kernels import DecoderName
from kcoord.pipeline.log_reader import Checksums
from kcoord.pipeline.schemas import RANGES, TABLES, Table
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC

KNOWN: Final = (
    "path",
    "table",
    "topic",
    "groups",
    "logPartitions",
    "offsetsTopicPartitions",
    "isolationLevel",
    "checksums",
    "splitBytes",
    "startingOffsets",
    "maxBytesPerTrigger",
    "abandonedTransactionMs",
    "decoder",
)


class OptionError(ValueError):
    """An option is unknown, missing or has a value that is not allowed."""


@dataclass(frozen=True)
class SourceOptions:
    """What a reader was asked for. Sizes in bytes, times in ms; None where the option was not given."""

    paths: tuple[str, ...]
    table: Table
    topic: str = GROUP_METADATA_TOPIC
    groups: frozenset[str] | None = None
    log_partitions: frozenset[int] | None = None
    offsets_topic_partitions: int | None = None
    is_read_committed: bool = True
    checksums: Checksums = "active"
    split_bytes: int = 64 << 20
    starting_offsets: str | Mapping[str, int] = "earliest"
    max_bytes_per_trigger: int | None = None
    abandoned_transaction_ms: int = 15 * 60 * 1000
    decoder: DecoderName = "auto"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """`given` has option names in any case, as Spark does."""
        values = {name.lower(): value for name, value in given.items()}
        unknown = sorted(values.keys() - {name.lower() for name in KNOWN})
        if unknown:
            raise OptionError(f"unknown option {', '.join(unknown)}; there are {', '.join(KNOWN)}")
        get = values.get
        groups = get("groups")
        return cls(
            paths=_paths(get("path", "")),
            table=_table(get("table", "records")),
            topic=get("topic", cls.topic),
            groups=None if groups is None else frozenset(_texts(groups)),
            log_partitions=_partition_set(get("logpartitions")),
            offsets_topic_partitions=_number("offsetsTopicPartitions", get("offsetstopicpartitions"), 1),
            is_read_committed=_choice(
                "isolationLevel", get("isolationlevel", "read_committed"), ("read_committed", "read_uncommitted")
            )
            == "read_committed",
            checksums=cast(Checksums, _choice("checksums", get("checksums", "active"), ("active", "all", "none"))),
            split_bytes=_number("splitBytes", get("splitbytes"), 1 << 12) or cls.split_bytes,
            starting_offsets=_starting_offsets(get("startingoffsets", "earliest")),
            max_bytes_per_trigger=_number("maxBytesPerTrigger", get("maxbytespertrigger"), 1),
            abandoned_transaction_ms=_number("abandonedTransactionMs", get("abandonedtransactionms"), 1)
            or cls.abandoned_transaction_ms,
            decoder=cast(DecoderName, _choice("decoder", get("decoder", "auto"), ("auto", "numpy", "numba"))),
        )


def _texts(value: str) -> list[str]:
    """A comma-separated list, or a JSON array where names have commas."""
    if not value.lstrip().startswith("["):
        return [each.strip() for each in value.split(",") if each.strip()]
    try:
        found = json.loads(value)
    except ValueError as error:
        raise OptionError(f"not a JSON array: {value!r}") from error
    if not all(isinstance(each, str) for each in found):
        raise OptionError(f"not a JSON array of strings: {value!r}")
    return cast(list[str], found)


def _paths(value: str) -> tuple[str, ...]:
    paths = tuple(_texts(value))
    if not paths:
        raise OptionError("path: give the data folder of a broker, or several of them")
    return paths


def _table(value: str) -> Table:
    if value == RANGES.name:
        return RANGES
    if value not in TABLES:
        raise OptionError(f"table: there is no {value!r}, only {', '.join(TABLES)}")
    return TABLES[value]


def _partition_set(value: str | None) -> frozenset[int] | None:
    """ "0,3,8-11"."""
    if value is None:
        return None
    found: set[int] = set()
    for each in _texts(value):
        first, _, last = each.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise OptionError(f"logPartitions: {each!r} is neither a number nor a range such as 0-3")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _number(name: str, value: str | None, least: int) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise OptionError(f"{name}: {value!r} is no number") from None
    if number < least:
        raise OptionError(f"{name}: {number} is less than {least}")
    return number


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise OptionError(f"{name}: {value!r} is none of {', '.join(allowed)}")
    return value.lower()


def _starting_offsets(value: str) -> str | Mapping[str, int]:
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        found = json.loads(value)
        return {str(int(partition)): int(offset) for partition, offset in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise OptionError(
            f"startingOffsets: {value!r} is neither earliest nor latest nor an object of log partitions and offsets"
        ) from None
