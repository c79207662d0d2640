# SPDX-License-Identifier: Apache-2.0
"""The stream of a table: its offset is the next log offset of each log partition, `{"0": 1234, ...}`.

A range of such offsets gives the same rows whenever it is read, so a sink that remembers its batches has each row
exactly once. Cleaning may take records out of a range before it is read for the first time, never add any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from kcoord.pipeline.log_files import Folder, LogFolder, NoLogError, folders_at
from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import log_ranges, pack, prune
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.tail import LogTail

if TYPE_CHECKING:
    from typing import TypeAlias

    Offsets: TypeAlias = dict[str, int]


class KcoordStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in the driver as long as the query; `read` runs in workers, with a copy that knows the options alone."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._tails: dict[str, LogTail] = {}
        self._last: dict[str, int] | None = None

    def __getstate__(self) -> tuple[SourceOptions, pa.Schema]:
        return self._options, self._schema

    def __setstate__(self, state: tuple[SourceOptions, pa.Schema]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def initialOffset(self) -> Offsets:
        start = self._options.starting_offsets
        if start == "earliest":
            return {}
        if isinstance(start, str):
            return self._ends()
        return dict(start)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._ends()

    def latestOffset(self, start: Offsets, limit: ReadLimit) -> Offsets:
        budget = limit.max_bytes if isinstance(limit, ReadMaxBytes) else END_OF_LOG
        end = dict(start)
        for folder in self._folders():
            if budget <= 0:
                break
            name = str(folder.log_partition)
            begun = start.get(name, 0)
            stop = END_OF_LOG if self._last is None else self._last.get(name, 0)
            tail = self._tail(folder, begun)
            budget -= tail.advance(budget, stop)
            while tail.stable_offset <= begun < tail.offset and tail.advance(_block(budget), stop):
                pass
            end[name] = max(begun, min(tail.stable_offset, stop))
        return {name: end[name] for name in sorted(end, key=int) if end[name]}

    def partitions(self, start: Offsets, end: Offsets) -> Sequence[InputPartition]:
        ranges = []
        for folder in self._folders():
            name = str(folder.log_partition)
            if end.get(name, 0) > start.get(name, 0):
                ranges += self._ranges(folder, start.get(name, 0), end[name])
        return [Ranges(each) for each in pack(ranges, self._options.split_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        return read_ranges(partition, self._options, self._schema, self._options.groups)

    def commit(self, end: Offsets) -> None:
        for name, tail in self._tails.items():
            tail.forget_before(end.get(name, 0))

    @property
    def _resolves(self) -> bool:
        return self._options.is_read_committed and self._options.table.name in ("records", "commits", "ranges")

    def _folders(self) -> list[Folder]:
        """None is no error: a broker makes them when the first group comes."""
        options = self._options
        try:
            folders = folders_at(options.paths, options.topic)
        except NoLogError:
            return []
        return prune(folders, options.groups, options.log_partitions, options.offsets_topic_partitions)

    def _tail(self, folder: Folder, start: int) -> LogTail:
        tail = self._tails.get(str(folder.log_partition))
        if tail is None or not start <= tail.offset:
            tail = self._tails[str(folder.log_partition)] = self._new_tail(folder, start)
        return tail

    def _new_tail(self, folder: Folder, start: int) -> LogTail:
        options = self._options
        return LogTail(folder, start, is_read_committed=self._resolves, abandoned_ms=options.abandoned_transaction_ms)

    def _ends(self) -> Offsets:
        """The ends of all logs now: of a log's last segment on, since what lies before it is decided or will be."""
        ends = {}
        for folder in self._folders():
            segments = LogFolder(folder).segments()
            if segments:
                tail = self._new_tail(folder, segments[-1].base_offset)
                tail.advance(END_OF_LOG)
                ends[str(folder.log_partition)] = tail.offset
        return ends

    def _ranges(self, folder: Folder, start: int, end: int) -> list[tuple[LogRange, int]]:
        # Every transaction in the range is decided, by a marker that may lie behind it.
        horizon = END_OF_LOG if self._resolves else end
        tail = self._tails.get(str(folder.log_partition))
        first = None if tail is None else tail.mark_at(start)
        size = 0 if tail is None or first is None else tail.read_bytes - first.read_bytes
        if first is None or size > self._options.split_bytes:
            return log_ranges(folder, self._options.split_bytes, start, end, horizon)
        return [(LogRange(folder, start, end, horizon, first.place), max(size, 1))]


def _block(budget: int) -> int:
    return max(budget, 1 << 20)
