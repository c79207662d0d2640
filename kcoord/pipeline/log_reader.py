# SPDX-License-Identifier: Apache-2.0
"""Reads the batches of a range of log offsets, in order and each once, while a broker may be writing the log.

Theory of operation. `read_pieces` lists the segments and reads those that overlap the range block by block. It yields
a `Piece` per block: the sound batches, and the damage after them. No lock connects reader and broker, so the reader
copes with whatever the broker does meanwhile:

* The broker appends. A segment is read up to the size that it had when it was listed.
* The write of the last batch is not complete. Bytes at the end of the active segment that are not a sound batch are
  ignored: the log ends before them, and a later read sees the whole batch.
* The broker rolls, cleans, merges or deletes a segment. A file that has vanished raises FileNotFoundError. The reader
  then lists the segments again and continues at the first offset that it has not yielded, up to _ATTEMPTS times.
* A new listing repeats offsets that were yielded before. `piece_of` drops their batches.

Damage is a run of bytes that are not a sound batch, followed by a sound batch of a later offset, or in a closed
segment by the end of the file. It is reported as `DamagedBytes`, and the reader continues after it. The active segment
is the last one listed. The broker never cleans it, so only a hint about the active segment is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import numpy as np

from kcoord.pipeline.batch_table import Batches, Scan, Walk, control_type, find_batch, scan, walk
from kcoord.pipeline.buffers import Bytes, Gather, content_bytes
from kcoord.pipeline.log_files import BatchPlace, LogFolder, SegmentFile

Checksums: TypeAlias = Literal["active", "all", "none"]

END_OF_LOG: Final = 2**63 - 1
BLOCK_BYTES: Final = 16 << 20
_ATTEMPTS: Final = 8


@dataclass(slots=True)
class DamagedBytes:
    """Bytes that are not a sound batch. The batch with `log_offset` was expected at their position."""

    log_offset: int
    data: bytes
    reason: str


@dataclass(slots=True)
class Piece:
    """The batches of one block. Records below `start` were not asked for; `end` is the next offset to read.

    `control_types` has the type of each control batch, by row.
    """

    data: Bytes
    batches: Batches
    start: int
    end: int
    control_types: dict[int, int]
    damages: list[DamagedBytes] = field(default_factory=list)
    behind: BatchPlace | None = None
    """The position of the next piece, if all batches of this block are in the range."""
    size_bytes: int = 0


def read_pieces(
    log: LogFolder,
    start: int,
    end: int,
    *,
    checksums: Checksums = "active",
    block_bytes: int = BLOCK_BYTES,
    hint: BatchPlace | None = None,
    walk: Walk = walk,
) -> Iterator[Piece]:
    """Yields the batches with offsets in [start, end).

    With `checksums` "active" only the batches of the active segment have their checksums verified. A `hint` about the
    active segment saves reading its index.
    """
    offset = start
    for attempt in range(_ATTEMPTS):
        try:
            segments = log.segments()
            for segment, following in zip(segments, [*segments[1:], None], strict=True):
                if segment.base_offset >= end or (following is not None and following.base_offset <= offset):
                    continue
                is_active = following is None
                verify = checksums == "all" or (is_active and checksums == "active")
                reader = _SegmentReader(log, segment, walk, is_active=is_active, verify=verify)
                for piece in reader.pieces(offset, end, block_bytes, hint if is_active else None):
                    yield piece
                    offset = piece.end
            return
        except FileNotFoundError:  # the cleaner has replaced the segment since it was listed
            if attempt + 1 == _ATTEMPTS:
                raise


class _SegmentReader:
    """Reads one segment, block by block."""

    def __init__(self, log: LogFolder, segment: SegmentFile, walk: Walk, *, is_active: bool, verify: bool) -> None:
        self._log = log
        self._segment = segment
        self._is_active = is_active
        self._verify = verify
        self._walk = walk

    def pieces(self, offset: int, end: int, block_bytes: int, hint: BatchPlace | None) -> Iterator[Piece]:
        size = self._segment.size_bytes
        position = self._log.position_of(self._segment, offset, hint)
        read_bytes = block_bytes
        while position < size:
            data = self._log.read(self._segment, position, min(read_bytes, size - position))
            if not content_bytes(data):
                return  # the file has been truncated since it was listed
            is_last = position + content_bytes(data) >= size
            result = scan(data, content_bytes(data), self._walk, verify=self._verify)
            batches = Batches.read(Gather(data), result.positions)
            piece = piece_of(data, batches, offset, end)
            damaged_to = self._damage(data, result, piece.end, is_last=is_last)
            if damaged_to is not None and piece.end < end:
                content = data[result.end : damaged_to].tobytes()
                piece.damages.append(DamagedBytes(piece.end, content, result.error or "the file ends inside a batch"))
            used = result.end if damaged_to is None else damaged_to
            piece.behind = BatchPlace(piece.end, self._segment.base_offset, position + used)
            piece.size_bytes = used
            yield piece
            offset = piece.end
            if (is_last and damaged_to is None) or (len(batches) and int(batches.last_offset[-1]) >= end - 1):
                return
            position += used
            # A block that has neither a whole batch nor the end of damage is read again with twice the size.
            read_bytes = block_bytes if used else read_bytes * 2

    def _damage(self, data: Bytes, result: Scan, offset: int, *, is_last: bool) -> int | None:
        """Returns the position at which the damage after the scanned batches ends.

        Returns None if there is no damage, or if a longer block has to be read to find its end.
        """
        limit = content_bytes(data)
        following = find_batch(data, result.end + 1, limit, offset) if result.error else None
        if following is not None:
            return following
        return limit if is_last and result.end < limit and not self._is_active else None


def piece_of(data: Bytes, batches: Batches, start: int, end: int) -> Piece:
    """Makes a piece of the batches that overlap [start, end).

    After a segment was replaced, batches of earlier offsets are read again; they are dropped here.
    """
    overlaps = (batches.last_offset >= start) & (batches.base_offset < end)
    if not overlaps.all():
        batches = batches.rows(overlaps)
    reached = int(batches.last_offset[-1]) + 1 if len(batches) else start
    return Piece(data, batches, start, reached, _control_types(data, batches))


def _control_types(data: Bytes, batches: Batches) -> dict[int, int]:
    rows = np.flatnonzero(batches.is_control).tolist()
    return {row: control_type(data, batches, row) for row in rows}
