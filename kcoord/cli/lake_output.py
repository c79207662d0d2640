# SPDX-License-Identifier: Apache-2.0
"""Prints rows of Spark as a table or as JSON, and the progress of the jobs."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from functools import reduce
from typing import TYPE_CHECKING, Final

from kcoord.cli.table import format_table, format_time

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from kcoord.pipeline.lake.compaction import TableCompaction

CLUSTER: Final = "cluster"


def own_error(text: str) -> tuple[str, str] | None:
    """Returns the class and the text of an error of this package from the traceback of a worker of Spark."""
    errors = re.findall(r"^kcoord\.[\w.]*?(\w+): (.+)$", text, re.MULTILINE)
    return errors[-1] if errors else None


def print_made(name: str) -> None:
    # Two threads make tables. `print` would write the end of the line on its own.
    sys.stderr.write(f"{name} ...\n")


def compaction_line(done: TableCompaction) -> str:
    """Returns the line of a table that a compaction has done, or would do."""
    cluster = "" if done.cluster is None else f"{done.cluster}: "
    return (
        f"{cluster}{done.table}: {done.merged:,} of {done.files:,} files ({done.merged_bytes / 1e6:,.1f} MB) merged, "
        f"{done.removed_rows:,} rows removed"
    )


def print_frame(
    name: str, parts: Sequence[DataFrame], limit: int, key: Sequence[str] = (), *, as_json: bool
) -> tuple[list[dict[str, object]], bool]:
    """Prints the first rows by key as a table unless `as_json`. Returns them for JSON, and whether there are more.

    `parts` has a frame for each cluster. The column `cluster` is printed if there are several. Without a key the frames
    are in order.
    """
    frame = reduce(type(parts[0]).unionByName, parts)
    if key:
        frame = frame.orderBy(CLUSTER, *key)
    rows = [row.asDict(recursive=True) for row in frame.limit(limit + 1).collect()]
    if not as_json:
        columns = [column for column in frame.columns if column != CLUSTER or len(parts) > 1]
        print(f"{name}\n")
        print(format_table(columns, [[_text(row[column]) for column in columns] for row in rows[:limit]]))
        print(f"\n(more than {limit}: see --limit)\n" if len(rows) > limit else "")
    plain = [{column: _plain(value) for column, value in row.items()} for row in rows[:limit]]
    return plain, len(rows) > limit


def _plain(value: object) -> object:
    """Returns a value for JSON. Times are milliseconds since 1970, as in all JSON of the command line."""
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
