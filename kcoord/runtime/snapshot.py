# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a state machine as chunks of bytes.

A state machine yields the parts of its snapshot: records that rebuild the state, and packed bytes for state that needs
too many records. The records are stored in ordinary record batches, so that loading replays them like a log. The parts
are made in slices, and the state machine runs operations between two slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import RecordSerde, SerializedRecord, size_bound_bytes
from kcoord_protocol.record_batch import encode_batch_from_parts

RECORDS: Final = 0
"""The kind of a chunk that is a record batch. The state machine defines all other kinds."""

_SLICE_PARTS: Final = 25
_BATCH_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class PackedState:
    """Bytes in a format of the state machine. `kind` identifies the format and is at least 1."""

    kind: int
    data: bytes


SnapshotPart: TypeAlias = CoordinatorRecord | PackedState


@runtime_checkable
class HasSnapshot(Protocol):
    """A state machine that can be loaded from a snapshot and the log after it."""

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """Returns an iterator that makes the parts one by one, or None while a snapshot cannot hold all of the state.

        The state may change between two parts. Replaying all parts, and then every record appended since the first
        part was made, gives the state, because every record has the complete value of its key.
        """

    def restore(self, part: PackedState) -> bool:
        """Restores a part from `snapshot`. Returns False for an unknown kind. Raises ValueError for malformed bytes."""


class Chunk(NamedTuple):
    """One part of a snapshot in bytes."""

    kind: int
    data: bytes


@dataclass(slots=True)
class Snapshot:
    """A state: the `chunks`, and then the log from `offset`, which must reach at least `end_offset`.

    `offset` is the end of the log when the snapshot was begun, `end_offset` when its last chunk was made.
    """

    offset: int
    end_offset: int
    created_ms: int
    chunks: list[Chunk]

    @property
    def size_bytes(self) -> int:
        return sum(len(chunk.data) for chunk in self.chunks)


def make_chunks(parts: Iterator[SnapshotPart], serde: RecordSerde) -> Iterator[list[Chunk]]:
    """Yields the chunks of each slice of work, possibly none. Other work may run between two slices."""
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
