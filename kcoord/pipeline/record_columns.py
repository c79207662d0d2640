# SPDX-License-Identifier: Apache-2.0
"""Makes the columns of the table `records` from a chunk of decoded batches, one function per column."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from kcoord.coordinator.group.records import TombstoneReason
from kcoord.pipeline.buffers import Flags, Ints
from kcoord.pipeline.chunk import RecordChunk
from kcoord.pipeline.columns import (
    bool_column,
    empty_texts,
    int_column,
    spread,
    text_column,
    timestamp_column,
    uuid_column,
    views,
)
from kcoord.pipeline.group_values import to_json
from kcoord.pipeline.keys import GROUP_TYPES, NO_TYPE
from kcoord.pipeline.schemas import RECORDS
from kcoord.pipeline.transactions import OUTCOMES, SUPERSEDED
from kcoord.runtime.serde import PRINCIPAL_HEADER, REASON_HEADER
from kcoord_protocol.control_records import ControlRecordType

_TYPES: Final = {column.name: column.type for column in RECORDS.columns}
_CONTROL_NAMES: Final = {int(control_type): control_type.name.lower() for control_type in ControlRecordType}
_CONTROL_TYPE_AT: Final = 2
_CONTROL_KEY_BYTES: Final = 4


def column(chunk: RecordChunk, name: str) -> pa.Array:
    """Makes a column of the table `records`."""
    return _COLUMNS[name](chunk)


def codes_to_texts(codes: Ints, texts: tuple[str | None, ...]) -> pa.Array:
    if not codes.any() and texts[0] is None:
        return pa.nulls(len(codes), pa.string())
    return pa.array(texts, pa.string()).take(int_column(codes, pa.int64()))


def _batch_ints(chunk: RecordChunk, name: str) -> pa.Array:
    values: Ints = getattr(chunk.batches, name)[chunk.records.batch]
    return int_column(values, _TYPES[name], None if name == "leader_epoch" else values >= 0)


def _sequence(chunk: RecordChunk) -> pa.Array:
    base = chunk.batches.base_sequence[chunk.records.batch]
    return int_column((base + chunk.records.number) & 0x7FFF_FFFF, pa.int32(), base >= 0)


def _transaction(chunk: RecordChunk) -> pa.Array:
    outcome = chunk.resolution.outcome[chunk.records.batch]
    return codes_to_texts(np.where(chunk.lost, SUPERSEDED, outcome), OUTCOMES)


def _effective_offset(chunk: RecordChunk) -> pa.Array:
    return int_column(chunk.effective, pa.int64(), chunk.counts)


def _marker_timestamp(chunk: RecordChunk) -> pa.Array:
    if not chunk.resolution.outcome.any():
        return pa.nulls(len(chunk), _TYPES["marker_timestamp"])
    return timestamp_column(chunk.marker_timestamp_ms)


def _control_type(chunk: RecordChunk) -> pa.Array:
    records = chunk.records
    rows = np.flatnonzero(chunk.is_control & (records.key_size >= _CONTROL_KEY_BYTES))
    types = chunk.gather.int16(records.key_at[rows] + _CONTROL_TYPE_AT).tolist()
    names = [_CONTROL_NAMES.get(control_type, str(control_type)) for control_type in types]
    return spread(names, rows, len(chunk), pa.string())


def _record_type(chunk: RecordChunk) -> pa.Array:
    return int_column(chunk.keys.types, pa.int32(), (chunk.keys.types != NO_TYPE) & ~chunk.is_control)


def _value_version(chunk: RecordChunk) -> pa.Array:
    records = chunk.records
    rows, values = chunk.offset_values
    if len(rows) == len(chunk):
        return int_column(values.version, pa.int32(), records.value_size >= 2)
    present = (records.value_size >= 2) & ~chunk.is_control
    return int_column(chunk.gather.int16(np.where(present, records.value_at, 0)), pa.int32(), present)


def _tombstone_header(chunk: RecordChunk, header: str) -> pa.Array:
    texts = {}
    for row, headers in chunk.headers().items():
        for name, value in headers:
            if name == header and value is not None and chunk.is_tombstone[row]:
                texts[row] = value.decode("utf-8", "replace")
    return spread([*texts.values()], np.array([*texts], np.int64), len(chunk), pa.string())


def _headers(chunk: RecordChunk) -> pa.Array:
    by_row = chunk.headers()
    values = [[{"key": name, "value": value} for name, value in headers] for headers in by_row.values()]
    return spread(values, np.array([*by_row], np.int64), len(chunk), _TYPES["headers"])


def _bytes(chunk: RecordChunk, at: str, size: str) -> pa.Array:
    return chunk.kernels.pieces(chunk.data, getattr(chunk.records, at), getattr(chunk.records, size))


def _error(chunk: RecordChunk) -> pa.Array:
    errors = {row: error for row, (_, error) in chunk.group_values.items() if error is not None}
    rows, values = chunk.offset_values
    errors |= {int(rows[row]): error for row, error in values.errors.items()}
    bad_keys = chunk.keys.has_error & ~chunk.is_control
    for row in np.flatnonzero(bad_keys).tolist():
        errors[row] = chunk.keys[row].error or ""
    return spread([*errors.values()], np.array([*errors], np.int64), len(chunk), pa.string())


def _partition(chunk: RecordChunk) -> pa.Array:
    return int_column(chunk.keys.partitions(), pa.int32(), chunk.is_offset)


def _of_offsets(chunk: RecordChunk, values: Ints, readable: Flags, fill: int) -> tuple[Ints, Flags]:
    """Spreads values of the rows with offset commits over all rows of the chunk.

    The flags are true for rows that have a readable commit; other rows get `fill`.
    """
    rows, _ = chunk.offset_values
    if len(rows) == len(chunk):
        return values, readable
    everywhere, present = np.full(len(chunk), fill), np.zeros(len(chunk), np.bool_)
    everywhere[rows], present[rows] = values, readable
    return everywhere, present


def _offset_number(chunk: RecordChunk, name: str, attribute: str) -> pa.Array:
    _, values = chunk.offset_values
    numbers, present = _of_offsets(chunk, values.numbers[attribute], values.readable, -1)
    if name == "committed_leader_epoch":
        present = present & (numbers >= 0)
    return int_column(numbers, _TYPES[name], present)


def _offset_time(chunk: RecordChunk, attribute: str) -> pa.Array:
    _, values = chunk.offset_values
    return timestamp_column(*_of_offsets(chunk, values.numbers[attribute], values.readable, -1))


def _metadata(chunk: RecordChunk) -> pa.Array:
    _, values = chunk.offset_values
    size, present = _of_offsets(chunk, values.metadata_size, values.readable, 0)
    if not size[present].any():
        return empty_texts(present)
    at, _ = _of_offsets(chunk, values.metadata_at, values.readable, 0)
    return text_column(views(chunk.data, np.where(present, at, 0), np.where(present, size, -1)))


def _topic_id(chunk: RecordChunk) -> pa.Array:
    rows, values = chunk.offset_values
    has_id = values.has_topic_id & values.readable
    ids = uuid_column(values.topic_id, has_id)
    if len(rows) == len(chunk):
        return ids
    index, present = _of_offsets(chunk, np.arange(len(rows)), has_id, 0)
    return ids.take(int_column(index, pa.int64(), present))


def _group_end(chunk: RecordChunk) -> pa.Array:
    """True if a group's tombstone ends the group.

    It does not if the recorded reason is a migration. Without a reason, it does not if a record of another type follows
    in the same batch: then the group moves to another protocol. A record of the same type is that of a later group.
    """
    types = chunk.keys.types
    rows = np.flatnonzero(np.isin(types, GROUP_TYPES) & ~chunk.is_control)
    tombstone = chunk.is_tombstone
    gone = rows[tombstone[rows]]
    reasons = _tombstone_header(chunk.rows(gone), REASON_HEADER).to_pylist()
    ends: list[bool] = []
    following: dict[tuple[int, str | None], int] = {}
    """The type of the next record of each group in its batch."""
    for row in reversed(rows.tolist()):
        place = int(chunk.records.batch[row]), chunk.keys[row].group
        record_type = int(types[row])
        if not tombstone[row]:
            following[place] = record_type
            continue
        reason = reasons.pop()
        moves = following.get(place, record_type) != record_type
        ends.append(not moves if reason is None else reason != TombstoneReason.MIGRATION.value)
    return spread(ends[::-1], gone, len(chunk), pa.bool_())


def _value_json(chunk: RecordChunk) -> pa.Array:
    texts = {}
    for row, (entry, _) in chunk.group_values.items():
        if entry is not None:
            texts[row] = to_json(_with_regex(chunk, row, entry))
    return spread([*texts.values()], np.array([*texts], np.int64), len(chunk), pa.string())


def _with_regex(chunk: RecordChunk, row: int, entry: object) -> object:
    regex = chunk.keys[row].regex
    return entry if regex is None or not isinstance(entry, dict) else {"regex": regex, **entry}


_COLUMNS: Final[dict[str, Callable[[RecordChunk], pa.Array]]] = {
    "log_partition": lambda chunk: int_column(np.full(len(chunk), chunk.log_partition), pa.int32()),
    "log_offset": lambda chunk: int_column(chunk.records.offset, pa.int64()),
    "timestamp": lambda chunk: timestamp_column(chunk.records.timestamp_ms),
    "leader_epoch": partial(_batch_ints, name="leader_epoch"),
    "producer_id": partial(_batch_ints, name="producer_id"),
    "producer_epoch": partial(_batch_ints, name="producer_epoch"),
    "sequence": _sequence,
    "transaction": _transaction,
    "effective_offset": _effective_offset,
    "marker_timestamp": _marker_timestamp,
    "control_type": _control_type,
    "record_type": _record_type,
    "record_name": lambda chunk: chunk.keys.texts("record_name"),
    "value_version": _value_version,
    "is_tombstone": lambda chunk: bool_column(chunk.is_tombstone),
    "tombstone_reason": lambda chunk: _tombstone_header(chunk, REASON_HEADER),
    "tombstone_principal": lambda chunk: _tombstone_header(chunk, PRINCIPAL_HEADER),
    "headers": _headers,
    "key": partial(_bytes, at="key_at", size="key_size"),
    "value": partial(_bytes, at="value_at", size="value_size"),
    "error": _error,
    "group": lambda chunk: chunk.keys.texts("group"),
    "topic": lambda chunk: chunk.keys.texts("topic"),
    "partition": _partition,
    "topic_id": _topic_id,
    "committed_offset": partial(_offset_number, name="committed_offset", attribute="offset"),
    "committed_leader_epoch": partial(_offset_number, name="committed_leader_epoch", attribute="leader_epoch"),
    "metadata": _metadata,
    "commit_timestamp": partial(_offset_time, attribute="commit_timestamp"),
    "expire_timestamp": partial(_offset_time, attribute="expire_timestamp"),
    "member_id": lambda chunk: chunk.keys.texts("member_id"),
    "group_end": _group_end,
    "value_json": _value_json,
}
