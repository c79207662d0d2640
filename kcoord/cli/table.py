# SPDX-License-Identifier: Apache-2.0
"""Formats tables with aligned columns, and formats and parses times."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

_AGE = re.compile(r"(\d+)(s|m|h|d)")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def format_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns the lines of a table, without a final newline."""
    cells = [[*titles], *([cell_text(value) for value in row] for row in rows)]
    body = cells[1:]
    widths = [max(len(line[column]) for line in cells) for column in range(len(titles))]
    is_number = [align_right([line[column] for line in body]) for column in range(len(titles))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, is_number, strict=True)
        ).rstrip()
        for line in cells
    )


def cell_text(value: object) -> str:
    """Returns the text of a cell. None is a dash.

    Characters that are not printable are escaped: clients choose names and metadata, and a terminal acts on some.
    """
    text = "-" if value is None else str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def align_right(cells: Sequence[str]) -> bool:
    """Whether all cells of a column are numbers or dashes, with at least one number."""
    texts = [text for text in cells if text != "-"]
    return bool(texts) and all(text.removeprefix("-").isdigit() for text in texts)


def format_time(timestamp_ms: int) -> str:
    """Formats a time as ISO 8601 in UTC, with milliseconds."""
    if timestamp_ms < 0:
        return "-"
    try:
        moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def current_time_ms() -> int:
    return time.time_ns() // 1_000_000


def parse_time(text: str, now_ms: int) -> int:
    """Parses milliseconds since the epoch, an ISO 8601 time (by default in UTC), or an age such as 15m or 2h."""
    if text.isascii() and text.isdigit():
        return int(text)
    age = _AGE.fullmatch(text)
    if age:
        return now_ms - round(timedelta(**{_UNITS[age[2]]: int(age[1])}).total_seconds() * 1000)
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)
