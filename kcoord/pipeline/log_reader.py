# SPDX-License-Identifier: Apache-2.0
"""Reads the batches of a range of log offsets, in order, each once, whatever files they lie in.

A torn tail ends the log. Damage elsewhere is passed over and reported. Segments that are rolled, cleaned or replaced
meanwhile are looked up again by offset.
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
    """Bytes that are no sound batch, where the batch with `log_offset` was due."""

    log_offset: int
    data: bytes
    reason: str


@dataclass(slots=True)
class Piece:
    """Batches in a buffer. Of their records those from `start` on are wanted; `end` is the offset behind the last
    one.
    """

    data: Bytes
    batches: Batches
    start: int
    end: int
    control_types: dict[int, int]
    damages: list[DamagedBytes] = field(default_factory=list)
    behind: BatchPlace | None = None
    """Where the next piece begins, if all batches of this one are wanted."""
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
    """Everything with offsets in [start, end). `hint` saves the look into the index of the active segment, which
    alone is never cleaned.
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
        except FileNotFoundError:  # replaced by the cleaner since it was listed
            if attempt + 1 == _ATTEMPTS:
                raise


class _SegmentReader:
    """One segment, block by block."""

    def __init__(self, log: LogFolder, segment: SegmentFile, walk: Walk, *, is_active: bool, verify: bool) -> None:
        self._log = log
        self._segment = segment
        self._is_active = is_active
        self._verify = verify
        self._walk = walk

    def pieces(self, offset: int, end: int, block_bytes: int, hint: BatchPlace | None) -> Iterator[Piece]:
        size = self._segment.size_bytes
        position = self._log.position_of(self._segment, offset, hint)
        wanted = block_bytes
        while position < size:
            data = self._log.read(self._segment, position, min(wanted, size - position))
            if not content_bytes(data):
                return  # cut off meanwhile
            is_last = position + content_bytes(data) >= size
            found = scan(data, content_bytes(data), self._walk, verify=self._verify)
            batches = Batches.read(Gather(data), found.positions)
            piece = _piece(data, batches, offset, end)
            damaged_to = self._damage(data, found, piece.end, is_last=is_last)
            if damaged_to is not None and piece.end < end:
                content = data[found.end : damaged_to].tobytes()
                piece.damages.append(DamagedBytes(piece.end, content, found.error or "the file ends inside a batch"))
            used = found.end if damaged_to is None else damaged_to
            piece.behind = BatchPlace(piece.end, self._segment.base_offset, position + used)
            piece.size_bytes = used
            yield piece
            offset = piece.end
            if (is_last and damaged_to is None) or (len(batches) and int(batches.last_offset[-1]) >= end - 1):
                return
            position += used
            wanted = block_bytes if used else wanted * 2

    def _damage(self, data: Bytes, found: Scan, offset: int, *, is_last: bool) -> int | None:
        """Where the damage ends that begins where the scan did; None where there is none, or more has to be read
        first.
        """
        limit = content_bytes(data)
        following = find_batch(data, found.end + 1, limit, offset) if found.error else None
        if following is not None:
            return following
        return limit if is_last and found.end < limit and not self._is_active else None


def _piece(data: Bytes, batches: Batches, start: int, end: int) -> Piece:
    """What is wanted of the batches of a block: offsets that were seen before come again after a segment was
    replaced.
    """
    wanted = (batches.last_offset >= start) & (batches.base_offset < end)
    if not wanted.all():
        batches = batches.rows(wanted)
    reached = int(batches.last_offset[-1]) + 1 if len(batches) else start
    return Piece(data, batches, start, reached, _control_types(data, batches))


def _control_types(data: Bytes, batches: Batches) -> dict[int, int]:
    rows = np.flatnonzero(batches.is_control).tolist()
    return {row: control_type(data, batches, row) for row in rows}
