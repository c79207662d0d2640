# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a state machine as chunks of bytes, made in slices while the machine works on, and the way back.

Its records go into ordinary record batches, so that they are read as a log is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from kcoord.runtime.batch import size_bound_bytes
from kcoord.runtime.serde import RecordSerde, SerializedRecord
from kcoord.runtime.snapshot_part import PackedState, SnapshotPart
from kcoord_protocol.record_batch import encode_batch_from_parts

RECORDS: Final = 0
"""The kind of a chunk that is a record batch. All other kinds are the state machine's."""

_SLICE_PARTS: Final = 25
_BATCH_BYTES: Final = 64 * 1024


class Chunk(NamedTuple):
    """One run of bytes of a snapshot."""

    kind: int
    data: bytes


def make_chunks(parts: Iterator[SnapshotPart], serde: RecordSerde) -> Iterator[list[Chunk]]:
    """The chunks, after each slice of work those that it gave, possibly none: others may have their turn in between."""
    pending: list[SerializedRecord] = []
    chunks: list[Chunk] = []
    for number, part in enumerate(parts, 1):
        if isinstance(part, PackedState):
            chunks.append(Chunk(part.kind, part.data))
        else:
            pending.append(serde.serialize(part))
        if number % _SLICE_PARTS == 0:
            if size_bound_bytes(pending) > _BATCH_BYTES:
                chunks.append(_batch(pending))
                pending = []
            yield chunks
            chunks = []
    if pending:
        chunks.append(_batch(pending))
    yield chunks


def _batch(pending: list[SerializedRecord]) -> Chunk:
    return Chunk(RECORDS, encode_batch_from_parts(pending, timestamp_ms=0))
