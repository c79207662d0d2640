# SPDX-License-Identifier: Apache-2.0
"""Finds the segments and the end of a log that is being opened.

After an orderly stop it reads only the folder and the last few batches. Otherwise it reads and checks all batches above
the recovery point (`recovery`).
"""

from __future__ import annotations

from collections.abc import Sequence

from kcoord.storage.file_cache import FileCache
from kcoord.storage.recovery import (
    Cut,
    Recovery,
    RecoveryReport,
    adopt_clean_end,
    marks_in,
    recover_segment,
    sweep,
)
from kcoord.storage.rolled import mark_path
from kcoord.storage.scan import Damage, DamageKind, corrupt
from kcoord.storage.segment import LogConfig, Segment


class LogLoader:
    """Loads one log. `load` sets `segments` (oldest first, possibly none), `end_offset` and `report`."""

    __slots__ = (
        "_config",
        "_directory",
        "_files",
        "_marks",
        "_now_ms",
        "_recovery",
        "end_offset",
        "report",
        "segments",
    )

    def __init__(self, files: FileCache, directory: str, config: LogConfig, now_ms: int, recovery: Recovery) -> None:
        self._files = files
        self._directory = directory
        self._config = config
        self._now_ms = now_ms
        self._recovery = recovery
        self._marks: set[int] = set()
        self.segments: list[Segment] = []
        self.end_offset = 0
        self.report = RecoveryReport()

    def load(self) -> None:
        """Finishes interrupted file operations, finds the segments, and recovers the end of the log if necessary."""
        names = self._files.file_system.list_dir(self._directory)
        bases = sweep(self._files.file_system, self._directory, names, self.report)
        self._marks = marks_in(names)
        self._find_end(bases)
        # All segments are durable by now, as far as they are not the last one.
        for mark in sorted(self._marks):
            self._remove_mark(mark)

    def _find_end(self, bases: list[int]) -> None:
        self.segments = [self._segment(base) for base in bases]
        recovery = self._recovery
        if not self.segments:
            if recovery.recovery_point > recovery.start_offset:
                self._miss_durable_bytes(self._segment(recovery.start_offset), 0, recovery.start_offset, "is missing")
            return
        if not (recovery.clean and adopt_clean_end(self.segments[-1], self.report, recovery.check)):
            self._recover(recovery.recovery_point)
        active = self.segments[-1]
        self.end_offset = active.next_offset
        if self.end_offset < recovery.recovery_point:
            self._miss_durable_bytes(active, active.size_bytes, self.end_offset, "ends here")

    def _segment(self, base_offset: int) -> Segment:
        return Segment(self._files, self._directory, base_offset, self._config, self._now_ms)

    def _miss_durable_bytes(self, segment: Segment, position: int, offset: int, what: str) -> None:
        durable = self._recovery.recovery_point
        reason = f"the file {what}, although all batches below offset {durable} were durable"
        raise corrupt(segment.log_path, Damage(DamageKind.INCOMPLETE, position, offset, reason))

    def _recover(self, recovery_point: int) -> None:
        """Scans the segment that contains the recovery point and all later segments."""
        first = max(segment_number(self.segments, recovery_point), 0)
        offset = self.segments[first].base_offset
        for number, segment in enumerate(self.segments[first:], first):
            if segment.base_offset < offset:
                reason = f"the file before it has offsets up to {offset - 1}"
                raise corrupt(segment.log_path, Damage(DamageKind.MISPLACED, 0, offset, reason))
            following = self.segments[number + 1] if number + 1 < len(self.segments) else None
            may_be_torn = following is None or following.base_offset in self._marks
            recover_segment(segment, self._recovery, may_be_torn, self.report)
            offset = segment.next_offset
            if following is None:
                return
            if may_be_torn and offset < following.base_offset:
                self._drop_after(number)
                return
            segment.seal()
            if may_be_torn:
                self._make_durable(segment)
            segment.write_indexes()
            segment.become_inactive()

    def _make_durable(self, segment: Segment) -> None:
        """Syncs a segment that survived the end of the process, but perhaps only in the page cache."""
        self._recovery.check(10 * segment.size_bytes)
        segment.is_unsynced = True
        segment.sync()

    def _drop_after(self, number: int) -> None:
        """Removes the segments after one that lost its end. No batch in them was durable."""
        torn = self.segments[number]
        if torn.next_offset < self._recovery.recovery_point:
            self._miss_durable_bytes(torn, torn.size_bytes, torn.next_offset, "ends here")
        reason = f"the file before it has lost the batches from offset {torn.next_offset} on"
        # The newest is removed first. If this is interrupted, the next opening continues it.
        for segment in reversed(self.segments[number + 1 :]):
            self.report.cuts.append(Cut(segment.log_path, 0, segment.size_bytes, segment.base_offset, reason))
            segment.delete()
            if segment.base_offset in self._marks:
                self._remove_mark(segment.base_offset)
                self._marks.discard(segment.base_offset)
        del self.segments[number + 1 :]
        # The log will get other batches at these offsets, so the files must not come back.
        self._files.file_system.sync_dir(self._directory)

    def _remove_mark(self, base_offset: int) -> None:
        self._files.file_system.remove(mark_path(self._directory, base_offset))


def segment_number(segments: Sequence[Segment], offset: int) -> int:
    """Returns the number of the last segment whose base offset is at most `offset`, or -1."""
    low, high = 0, len(segments)
    while low < high:
        middle = (low + high) // 2
        if segments[middle].base_offset <= offset:
            low = middle + 1
        else:
            high = middle
    return low - 1
