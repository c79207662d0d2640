# SPDX-License-Identifier: Apache-2.0
"""Rows of Spark as a table for people, or as JSON; and what the jobs say while they work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import date, datetime
from typing import TYPE_CHECKING

from kcoord.cli.table import format_table, format_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def print_made(name: str) -> None:
    print(f"{name} ...", file=sys.stderr)


def print_frame(name: str, frame: DataFrame, limit: int, *, as_json: bool) -> list[dict[str, object]]:
    """The first rows; a table is printed, what goes into JSON is returned."""
    found = [row.asDict(recursive=True) for row in frame.limit(limit + 1).collect()]
    if not as_json:
        print(f"{name}\n")
        print(format_table(frame.columns, [[_text(row[key]) for key in frame.columns] for row in found[:limit]]))
        print(f"\n(more than {limit}: see --limit)\n" if len(found) > limit else "")
    return [{key: _plain(value) for key, value in row.items()} for row in found[:limit]]


def _plain(value: object) -> object:
    """As JSON has it: times are milliseconds since 1970, as in all of the command line's JSON."""
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    return value


def _text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        return format_time(round(value.timestamp() * 1000))
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {value[key]}" for key in sorted(value))
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
