# SPDX-License-Identifier: Apache-2.0
"""Follows the end of a log for a stream, and finds the offset up to which no row can change any more.

That stable offset is the end of the last sound batch. With read_committed it is the first offset of the first open
transaction, if there is one. Each call reads only the batches appended since the last call.

A transaction that wrote nothing for long is abandoned. Its age is the time from its last batch to the newest time in
the log. A time in the future, of a coordinator whose clock was ahead, counts as the present.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from typing import Final, NamedTuple

from kcoord.pipeline.log_files import BatchPlace, Folder, LogFolder
from kcoord.pipeline.log_reader import END_OF_LOG, read_pieces
from kcoord.pipeline.transactions import OpenTransactions

_BLOCK_BYTES: Final = 4 << 20


def _now_ms() -> int:
    return round(time.time() * 1000)


class Mark(NamedTuple):
    """A position in the log, and how many bytes the tail had read up to it."""

    offset: int
    place: BatchPlace
    read_bytes: int


class LogTail:
    """The tail of one log partition.

    It ignores batches below its first offset, so no transaction should be open there.
    """

    def __init__(
        self,
        folder: Folder,
        offset: int,
        *,
        is_read_committed: bool,
        abandoned_ms: int,
        clock: Callable[[], int] = _now_ms,
    ) -> None:
        self.folder = folder
        self.offset = offset
        self._log = LogFolder(folder)
        self._is_read_committed = is_read_committed
        self._abandoned_ms = abandoned_ms
        self._clock = clock
        self._open = OpenTransactions()
        self._newest_ms = 0
        self._hint: BatchPlace | None = None
        self._marks: list[Mark] = []
        self.read_bytes = 0

    @property
    def stable_offset(self) -> int:
        """The offset below which every transaction is decided or abandoned."""
        if not self._is_read_committed:
            return self.offset
        return self._open.first_open(self.offset, min(self._newest_ms, self._clock()) - self._abandoned_ms)

    def advance(self, budget_bytes: int, limit: int = END_OF_LOG) -> int:
        """Reads up to about `budget_bytes` of new batches below `limit`. Returns the number of bytes read."""
        began = self.read_bytes
        block = min(_BLOCK_BYTES, max(budget_bytes, 1))
        for piece in read_pieces(self._log, self.offset, limit, block_bytes=block, hint=self._hint):
            if piece.end > self.offset:
                if self._hint is not None and self._hint.offset == self.offset:
                    self._marks.append(Mark(self.offset, self._hint, self.read_bytes))
                self._open.note_all(piece.batches, piece.control_types)
                self._newest_ms = max(self._newest_ms, int(piece.batches.max_timestamp.max()))
                self.offset = piece.end
            self._hint = piece.behind
            self.read_bytes += piece.size_bytes
            if self.read_bytes - began >= budget_bytes:
                break
        return self.read_bytes - began

    def mark_at(self, offset: int) -> Mark | None:
        """Returns the last mark at or before an offset."""
        number = bisect_right(self._marks, offset, key=lambda mark: mark.offset) - 1
        return self._marks[number] if number >= 0 else None

    def forget_before(self, offset: int) -> None:
        """Drops the marks that only earlier offsets need."""
        number = bisect_right(self._marks, offset, key=lambda mark: mark.offset) - 1
        del self._marks[: max(number, 0)]
