# SPDX-License-Identifier: Apache-2.0
"""Parses and checks the options of the data source, and has their defaults. docs/pipeline.md lists them for users."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, cast

from kcoord.pipeline.kernels import DecoderName
from kcoord.pipeline.log_files import long_name_in
from kcoord.pipeline.log_reader import Checksums
from kcoord.pipeline.schemas import TABLES, Table
from kcoord.pipeline.wire.place import Properties
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
    "failOnDataLoss",
)
BROKER_PREFIX: Final = "kafka."
"""The prefix of the settings of Kafka's clients, as in Spark's own Kafka source."""
_SERVERS: Final = f"{BROKER_PREFIX}bootstrap.servers"
_RANGE: Final = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
"""A log partition or a range of them. No topic has more than 100,000 partitions, and each number takes memory."""


class OptionError(ValueError):
    """An option is unknown, missing or has a value that is not allowed."""


@dataclass(frozen=True)
class SourceOptions:
    """The options of one read. Sizes are in bytes, times in ms. An option without a default is None if not given."""

    paths: tuple[str, ...]
    """The folders of the logs; empty if the logs are read from brokers."""
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
    properties: Properties = field(default=(), repr=False)
    """The settings of the client that reads from brokers; empty if the logs are read from folders."""
    fails_on_data_loss: bool = True

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> SourceOptions:
        """Parses `given`, whose option names are case-insensitive as in Spark. Raises OptionError for a bad option."""
        values = {name.lower(): value for name, value in given.items()}
        properties = _properties(values)
        unknown = sorted(values.keys() - {name.lower() for name in KNOWN})
        if unknown:
            allowed = f"{', '.join(KNOWN)}, and {BROKER_PREFIX}* for settings of Kafka's clients"
            raise OptionError(f"unknown option {', '.join(unknown)}; the options are {allowed}")
        get = values.get
        groups = get("groups")
        fails = _choice("failOnDataLoss", get("failondataloss", str(bool(properties))), ("true", "false"))
        return cls(
            paths=_paths(get("path", ""), properties),
            properties=properties,
            fails_on_data_loss=fails == "true",
            table=_table(get("table", "records")),
            topic=get("topic", cls.topic),
            groups=None if groups is None else frozenset(_texts("groups", groups)),
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


def _texts(name: str, value: str) -> list[str]:
    """Parses a comma-separated list, or a JSON array, which can hold names with commas."""
    if not value.lstrip().startswith("["):
        return [text.strip() for text in value.split(",") if text.strip()]
    try:
        texts = json.loads(value)
    except ValueError as error:
        raise OptionError(f"{name}: {value!r} is not a JSON array: {error}") from error
    if not all(isinstance(text, str) for text in texts):
        raise OptionError(f"{name}: {value!r} is not a JSON array of strings")
    return cast(list[str], texts)


def _properties(values: dict[str, str]) -> Properties:
    """Removes the settings of Kafka's clients from `values`, and returns them without the prefix."""
    names = sorted(name for name in values if name.startswith(BROKER_PREFIX))
    if names and _SERVERS not in names:
        raise OptionError(f"{_SERVERS}: give the addresses of brokers, since {names[0]} is given")
    properties = tuple((name.removeprefix(BROKER_PREFIX), values.pop(name)) for name in names)
    return properties


def _paths(value: str, properties: Properties) -> tuple[str, ...]:
    paths = tuple(_texts("path", value))
    if not paths and not properties:
        raise OptionError(f"path: give the data folder of a broker, or several of them; or give {_SERVERS}")
    if paths and properties:
        raise OptionError(f"path: {value!r} cannot be read together with {_SERVERS}")
    for path in paths:
        problem = long_name_in(path)
        if problem is not None:
            raise OptionError(f"path: {problem}")
    return paths


def _table(value: str) -> Table:
    if value not in TABLES:
        raise OptionError(f"table: {value!r} does not exist; the tables are {', '.join(TABLES)}")
    return TABLES[value]


def _partition_set(value: str | None) -> frozenset[int] | None:
    """Parses numbers and ranges, such as "0,3,8-11"."""
    if value is None:
        return None
    log_partitions: set[int] = set()
    for text in _texts("logPartitions", value):
        match = _RANGE.fullmatch(text)
        numbers = range(0) if match is None else range(int(match[1]), int(match[2] or match[1]) + 1)
        if not numbers:
            raise OptionError(f"logPartitions: {text!r} is neither a number nor a range such as 0-3, up to 99999")
        log_partitions.update(numbers)
    if not log_partitions:
        raise OptionError(f"logPartitions: {value!r} has no log partition")
    return frozenset(log_partitions)


def _number(name: str, value: str | None, least: int) -> int | None:
    if value is None:
        return None
    try:
        number = int(value)
    except ValueError:
        raise OptionError(f"{name}: {value!r} is not a number") from None
    if number < least:
        raise OptionError(f"{name}: {number} is less than {least}")
    return number


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value.lower() not in allowed:
        raise OptionError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
    return value.lower()


def _starting_offsets(value: str) -> str | Mapping[str, int]:
    if value.lower() in ("earliest", "latest"):
        return value.lower()
    try:
        offsets = {int(partition): offset for partition, offset in json.loads(value).items()}
        if all(number >= 0 and _is_offset(offset) for number, offset in offsets.items()):
            return {str(number): offset for number, offset in offsets.items()}
    except (ValueError, AttributeError):
        pass
    raise OptionError(
        f"startingOffsets: {value!r} is neither earliest, latest nor a JSON object of log partitions and offsets, "
        'such as {"0": 1234}'
    )


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
