# SPDX-License-Identifier: Apache-2.0
"""The snapshot of a state machine as chunks of bytes, made in slices while the machine works on, and the way back.

A state machine hands out records that bring the state about again, and packed bytes for what there is too much of. The
records go into ordinary record batches, so that they are read as a log is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import RecordSerde, SerializedRecord, size_bound_bytes
from kcoord_protocol.record_batch import encode_batch_from_parts

RECORDS: Final = 0
"""The kind of a chunk that is a record batch. All other kinds are the state machine's."""

_SLICE_PARTS: Final = 25
_BATCH_BYTES: Final = 64 * 1024


@dataclass(slots=True)
class PackedState:
    """Bytes that only the state machine understands. `kind` is 1 or more, and another one for each format."""

    kind: int
    data: bytes


SnapshotPart: TypeAlias = CoordinatorRecord | PackedState


@runtime_checkable
class HasSnapshot(Protocol):
    """A state machine whose loading need not begin with the first record of its log."""

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """The parts, made one by one from the state as it is then; None while there is state that they cannot hold.

        The state may change between two parts. All parts together, and then every record from the first part on, give
        the state: each record says all there is to say about its key.
        """

    def restore(self, part: PackedState) -> bool:
        """Takes back what `snapshot` gave out; False where the kind is unknown. ValueError where it is malformed."""


class Chunk(NamedTuple):
    """One run of bytes of a snapshot."""

    kind: int
    data: bytes


@dataclass(slots=True)
class Snapshot:
    """A state: `chunks`, then the log from `offset` on, which must reach at least `end_offset`."""

    offset: int
    end_offset: int
    created_ms: int
    chunks: list[Chunk]

    @property
    def size_bytes(self) -> int:
        return sum(len(chunk.data) for chunk in self.chunks)


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
