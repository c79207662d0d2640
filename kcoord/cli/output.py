# SPDX-License-Identifier: Apache-2.0
"""Prints rows as a table or as JSON. A row is a mapping, and a column has the key of its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kcoord.cli.table import format_time
from kcoord.cli.terminal import print_table

UNKNOWN_TIME = "N/A"

Row = Mapping[str, object]


def plain_text(value: object) -> str:
    """Returns the text of a value. A missing value is a dash, as in Kafka's tables, so every row has all columns."""
    return "-" if value is None or value == "" else str(value)


def time_text(value: object) -> str:
    """Formats a creation time as KIP-1327 does."""
    return format_time(value) if isinstance(value, int) else UNKNOWN_TIME


def by_topic(partitions: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    """Returns topic -> partitions, both sorted."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        topics.setdefault(topic, []).append(partition)
    return topics


def assignment_text(value: object) -> str:
    """Formats an assignment as `topic:0,1;other:2`, with sorted topics."""
    if not isinstance(value, Mapping) or not value:
        return "-"
    return ";".join(f"{topic}:{','.join(map(str, value[topic]))}" for topic in sorted(value))


def node_text(value: object) -> str:
    """Formats a node as `host:port (id)`."""
    return f"{value['host']}:{value['port']} ({value['id']})" if isinstance(value, Mapping) else "-"


class OutputColumn(NamedTuple):
    """A column of a table, and the key of its values in JSON."""

    title: str
    key: str
    text: Callable[[object], str] = plain_text


def print_rows(columns: Sequence[OutputColumn], rows: Sequence[Row], *, as_json: bool) -> None:
    """Prints rows to stdout. JSON has only the keys of the columns, so that both forms have the same content."""
    if as_json:
        print_json([{column.key: row[column.key] for column in columns} for row in rows])
    else:
        print_table(
            [column.title for column in columns], [[column.text(row[column.key]) for column in columns] for row in rows]
        )


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
