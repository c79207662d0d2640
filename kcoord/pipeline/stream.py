# SPDX-License-Identifier: Apache-2.0
"""The stream of a table. Its offset is the next log offset of each log partition, `{"0": 1234, ...}`.

Theory of operation. The reader lives in the driver. For each micro-batch Spark calls `latestOffset`, writes the
returned offset to its checkpoint, and calls `partitions`, which cuts the range between two offsets into tasks. `read`
runs in the workers. `commit` says that a micro-batch is done.

* A `LogTail` per log partition follows the end of the log. In `latestOffset` it reads new batches within the byte
  budget (`maxBytesPerTrigger`), and its stable offset is the end of the micro-batch. With read_committed every
  transaction below a stable offset is decided or abandoned. If the stable offset has not passed the start of the
  micro-batch, the tail reads beyond the budget, since a long transaction would otherwise stop the stream.
* A range between two offsets gives the same rows whenever it is read. A sink that remembers its batches therefore has
  each row exactly once. Cleaning may remove records from a range before it is read for the first time; it never adds
  records.
* After a crash Spark starts with the offsets of its checkpoint, and plans the last micro-batch again if it was not
  done. The tails are not stored: a new tail begins at the start of the batch. No transaction of earlier batches is
  open there, since the start is a stable offset.
* With `Trigger.AvailableNow` the ends of the logs at the start of the query limit all batches.
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
    """Reads one query's stream. The driver has it as long as the query; workers get copies without the tails."""

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
        return [Ranges(packed) for packed in pack(ranges, self._options.split_bytes)]

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
        """Returns the folders to read. There may be none, since a broker creates them for its first group."""
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
        """Returns the current end offsets of all logs. Only the last segment of each log has to be read for that."""
        ends = {}
        for folder in self._folders():
            segments = LogFolder(folder).segments()
            if segments:
                tail = self._new_tail(folder, segments[-1].base_offset)
                tail.advance(END_OF_LOG)
                ends[str(folder.log_partition)] = tail.offset
        return ends

    def _ranges(self, folder: Folder, start: int, end: int) -> list[tuple[LogRange, int]]:
        # Every transaction of the range is decided, but its marker may follow the range.
        horizon = END_OF_LOG if self._resolves else end
        tail = self._tails.get(str(folder.log_partition))
        first = None if tail is None else tail.mark_at(start)
        size = 0 if tail is None or first is None else tail.read_bytes - first.read_bytes
        if first is None or size > self._options.split_bytes:
            return log_ranges(folder, self._options.split_bytes, start, end, horizon)
        return [(LogRange(folder, start, end, horizon, first.place), max(size, 1))]


def _block(budget: int) -> int:
    return max(budget, 1 << 20)
