# SPDX-License-Identifier: Apache-2.0
"""Makes Arrow record batches of the tables from the decoded parts of a range.

`records` and `commits` are made column by column. The other tables have few rows and are made row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Final, cast

import numpy as np
import pyarrow as pa

from kcoord.pipeline.chunk import RecordChunk
from kcoord.pipeline.group_values import Row, moment
from kcoord.pipeline.log_reader import DamagedBytes
from kcoord.pipeline.range_reader import Part
from kcoord.pipeline.record_columns import column
from kcoord.pipeline.schemas import TABLES

ROWS_PER_BATCH: Final = 1 << 16
_CLASSIC: Final = 2
_GROUP: Final = 3
_MEMBER: Final = 5
_TARGET: Final = 6
_TARGET_ASSIGNMENT: Final = 7
_CURRENT_ASSIGNMENT: Final = 8
_REGEX: Final = 16


def table_batches(table: str, names: list[str], part: Part, groups: Collection[str] | None) -> Iterator[pa.RecordBatch]:
    """Yields the named columns of a table, for the given groups. None means all groups, and damaged batches too."""
    chunk = part.chunk
    if groups is not None:
        chunk = chunk.rows(chunk.keys.flags(lambda key: key.group in groups))
    if table == "records":
        yield from _slices(chunk, names)
        if part.damages and groups is None:
            rows = [_damage_row(chunk.log_partition, damage) for damage in part.damages]
            yield _from_rows(table, names, rows)
    elif table == "commits":
        yield from _slices(applied_commits(chunk), names)
    else:
        rows = _MAKERS[table](chunk)
        if rows:
            yield _from_rows(table, names, rows)


def applied_commits(chunk: RecordChunk) -> RecordChunk:
    """Returns the offset commits that the coordinator applies, and their tombstones."""
    rows, values = chunk.offset_values
    readable = chunk.is_tombstone
    readable[rows] = values.readable
    return chunk.rows(chunk.is_offset & chunk.counts & readable & ~chunk.keys.has_error)


def record_batch(chunk: RecordChunk, names: list[str]) -> pa.RecordBatch:
    """Makes one record batch of columns of `records`."""
    return pa.RecordBatch.from_arrays([column(chunk, name) for name in names], names)


def _slices(chunk: RecordChunk, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yields the records in batches of ROWS_PER_BATCH, since Spark copies larger ones repeatedly."""
    if len(chunk):
        whole = record_batch(chunk, names)
        for start in range(0, len(chunk), ROWS_PER_BATCH):
            yield whole.slice(start, ROWS_PER_BATCH)


def _from_rows(table: str, names: list[str], rows: list[Row]) -> pa.RecordBatch:
    schema = TABLES[table].schema()
    return pa.RecordBatch.from_pylist(rows, schema).select(names)


def _damage_row(log_partition: int, damage: DamagedBytes) -> Row:
    return {
        "log_partition": log_partition,
        "log_offset": damage.log_offset,
        "is_tombstone": False,
        "value": damage.data,
        "error": damage.reason,
    }


class _Rows:
    """Iterates over the records of some types in a chunk."""

    def __init__(self, chunk: RecordChunk, types: tuple[int, ...]) -> None:
        chosen = np.isin(chunk.keys.types, types) & ~chunk.is_control
        self.chunk = chunk.rows(chosen)
        self._reasons: list[str | None] = column(self.chunk, "tombstone_reason").to_pylist()
        self._principals: list[str | None] = column(self.chunk, "tombstone_principal").to_pylist()
        # Whether a tombstone ends the group depends on the records of other types.
        self._ends: list[bool | None] = column(chunk, "group_end").filter(pa.array(chosen)).to_pylist()

    def __iter__(self) -> Iterator[tuple[int, Row, object | None]]:
        """Yields (record type, columns that all tables have, entry of the value).

        Skips records whose key or value cannot be read.
        """
        tombstones = self.chunk.is_tombstone.tolist()
        records, keys = self.chunk.records, self.chunk.keys
        for row, is_tombstone in enumerate(tombstones):
            key = keys[row]
            entry = self.chunk.group_values.get(row, (None, None))[0]
            if key.error is not None or (entry is None and not is_tombstone):
                continue
            columns: Row = {
                "log_partition": self.chunk.log_partition,
                "log_offset": int(records.offset[row]),
                "timestamp": moment(int(records.timestamp_ms[row])),
                "group": key.group,
                "member_id": key.member_id,
                "regex": key.regex,
                "is_tombstone": is_tombstone,
                "tombstone_reason": self._reasons[row],
                "tombstone_principal": self._principals[row],
                "group_end": self._ends[row],
            }
            yield key.record_type, columns, entry


def _members(chunk: RecordChunk) -> list[Row]:
    rows: list[Row] = []
    for record_type, columns, entry in _Rows(chunk, (_CLASSIC, _MEMBER)):
        if record_type == _MEMBER:
            rows.append({**columns, **cast(Row, entry or {}), "kind": "consumer"})
        elif entry is not None:
            group = cast(Row, entry)
            rows += [
                {**columns, **member, "kind": "classic", "generation": group["generation"]}
                for member in cast(list[Row], group["members"])
            ]
    return rows


def _assignments(chunk: RecordChunk) -> list[Row]:
    rows: list[Row] = []
    for record_type, columns, entry in _Rows(chunk, (_CLASSIC, _TARGET_ASSIGNMENT, _CURRENT_ASSIGNMENT)):
        if record_type == _TARGET_ASSIGNMENT:
            rows.append({**columns, "kind": "target", "assigned": entry})
        elif record_type == _CURRENT_ASSIGNMENT:
            current = cast(Row, entry or {})
            epochs = {"epoch": current.get("member_epoch"), "previous_epoch": current.get("previous_member_epoch")}
            rows.append({**columns, **current, **epochs, "kind": "current"})
        elif entry is not None:
            group = cast(Row, entry)
            rows += [
                {
                    **columns,
                    "member_id": member["member_id"],
                    "kind": "classic",
                    "epoch": group["generation"],
                    "assigned": member["assigned"],
                }
                for member in cast(list[Row], group["members"])
            ]
    return rows


def _group_epochs(chunk: RecordChunk) -> list[Row]:
    rows: list[Row] = []
    for record_type, columns, entry in _Rows(chunk, (_CLASSIC, _GROUP, _TARGET)):
        value = cast(Row, entry or {})
        if record_type == _GROUP:
            rows.append({**columns, **value, "kind": "consumer"})
        elif record_type == _TARGET:
            rows.append({**columns, **value, "epoch": value.get("assignment_epoch"), "kind": "target"})
        else:
            members = None if entry is None else len(cast(list[Row], value["members"]))
            rows.append({**columns, "kind": "classic", "epoch": value.get("generation"), "members": members})
    return rows


def _classic_groups(chunk: RecordChunk) -> list[Row]:
    return [{**columns, **cast(Row, entry or {})} for _, columns, entry in _Rows(chunk, (_CLASSIC,))]


def _regular_expressions(chunk: RecordChunk) -> list[Row]:
    return [{**columns, **cast(Row, entry or {})} for _, columns, entry in _Rows(chunk, (_REGEX,))]


_MAKERS: Final[dict[str, Callable[[RecordChunk], list[Row]]]] = {
    "members": _members,
    "assignments": _assignments,
    "group_epochs": _group_epochs,
    "classic_groups": _classic_groups,
    "regular_expressions": _regular_expressions,
}
