# SPDX-License-Identifier: Apache-2.0
"""Follows the ends of the logs in folders, for a stream.

A `LogTail` per log partition reads new batches within the byte budget. The marks that it leaves save looking up byte
positions when the tasks of the micro-batch are planned.
"""

from __future__ import annotations

from kcoord.pipeline.errors import DataLossError
from kcoord.pipeline.log_files import Folder, LogFolder, NoLogError, topic_id_of
from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import list_folders, log_ranges
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.routing import is_excluded
from kcoord.pipeline.tail import LogTail

_LEAST_BLOCK_BYTES = 1 << 20


class FolderFollower:
    """The logs in the folders of the options. With `resolves` the ends are stable offsets."""

    def __init__(self, options: SourceOptions, *, resolves: bool) -> None:
        self._options = options
        self._resolves = resolves
        self._folders: list[Folder] = []
        self._tails: dict[str, LogTail] = {}

    def look(self) -> str | None:
        """Lists the folders. There may be none, since a broker creates them for its first group."""
        try:
            self._folders = list_folders(self._options)
        except NoLogError:
            self._folders = []
        return topic_id_of(self._folders[0]) if self._folders else None

    def ends(self) -> dict[str, int]:
        ends = {str(folder.log_partition): self._end_of(folder) for folder in self._folders}
        return {name: end for name, end in ends.items() if end is not None}

    def advance(self, start: dict[str, int], budget_bytes: int, last: dict[str, int] | None) -> dict[str, int]:
        end = dict(start)
        if self._options.fails_on_data_loss:
            self._check(start)
        for folder in self._folders:
            if budget_bytes <= 0:
                break
            name = str(folder.log_partition)
            begun = start.get(name, 0)
            stop = END_OF_LOG if last is None else last.get(name, 0)
            tail = self._tail(folder, begun)
            budget_bytes -= tail.advance(budget_bytes, stop)
            while tail.stable_offset <= begun < tail.offset and tail.advance(_block(budget_bytes), stop):
                pass
            end[name] = max(begun, min(tail.stable_offset, stop))
        return end

    def ranges(self, start: dict[str, int], end: dict[str, int]) -> list[tuple[LogRange, int]]:
        ranges = []
        for folder in self._folders:
            name = str(folder.log_partition)
            if end.get(name, 0) > start.get(name, 0):
                ranges += self._ranges_of(folder, start.get(name, 0), end[name])
        return ranges

    def bytes_behind(self, start: dict[str, int]) -> dict[str, int]:
        behind = {}
        for folder in self._folders:
            name = str(folder.log_partition)
            begun = start.get(name, 0)
            tail = self._tail(folder, begun)
            if tail.offset > begun or tail.advance(1):
                behind[name] = _bytes_from(LogFolder(folder), begun)
        return behind

    def done(self, end: dict[str, int]) -> None:
        for name, tail in self._tails.items():
            tail.forget_before(end.get(name, 0))

    def _tail(self, folder: Folder, start: int) -> LogTail:
        tail = self._tails.get(str(folder.log_partition))
        if tail is None or not start <= tail.offset:
            tail = self._tails[str(folder.log_partition)] = self._new_tail(folder, start)
        return tail

    def _new_tail(self, folder: Folder, start: int) -> LogTail:
        options = self._options
        return LogTail(folder, start, is_read_committed=self._resolves, abandoned_ms=options.abandoned_transaction_ms)

    def _end_of(self, folder: Folder) -> int | None:
        """Returns the end offset of a log, None without segments. Only the last segment has to be read for that."""
        segments = LogFolder(folder).segments()
        if not segments:
            return None
        tail = self._new_tail(folder, segments[-1].base_offset)
        tail.advance(END_OF_LOG)
        return tail.offset

    def _check(self, start: dict[str, int]) -> None:
        """Raises DataLossError if a log is missing, or ends before the offset up to which it was read."""
        folders = {str(folder.log_partition): folder for folder in self._folders}
        for name, offset in start.items():
            if name not in folders and is_excluded(int(name), self._options.groups, self._options.log_partitions):
                continue
            if name not in folders:
                raise DataLossError(f"{self._options.topic}-{name} is missing, but was read up to offset {offset - 1}")
            if not self._reaches(folders[name], offset):
                raise DataLossError(f"{folders[name].uri} ends before offset {offset - 1}, up to which it was read")

    def _reaches(self, folder: Folder, offset: int) -> bool:
        """Returns whether a log has the offset before `offset`, or begins a segment behind it."""
        segments = LogFolder(folder).segments()
        if segments and segments[-1].base_offset >= offset:
            return True
        tail = self._new_tail(folder, offset - 1)
        tail.advance(1)
        return tail.offset >= offset

    def _ranges_of(self, folder: Folder, start: int, end: int) -> list[tuple[LogRange, int]]:
        # Every transaction of the range is decided, but its marker may follow the range.
        horizon = END_OF_LOG if self._resolves else end
        tail = self._tails.get(str(folder.log_partition))
        first = None if tail is None else tail.mark_at(start)
        size = 0 if tail is None or first is None else tail.read_bytes - first.read_bytes
        if first is None or size > self._options.split_bytes:
            return log_ranges(folder, self._options.split_bytes, start, end, horizon)
        return [(LogRange(folder, start, end, horizon, first.place), max(size, 1))]


def _bytes_from(log: LogFolder, offset: int) -> int:
    """Returns about how many bytes of the log there are from an offset on."""
    size = 0
    for segment in reversed(log.segments()):
        if segment.base_offset <= offset:
            return size + segment.size_bytes - log.position_of(segment, offset)
        size += segment.size_bytes
    return size


def _block(budget_bytes: int) -> int:
    return max(budget_bytes, _LEAST_BLOCK_BYTES)
