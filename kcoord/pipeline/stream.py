# SPDX-License-Identifier: Apache-2.0
"""The stream of a table in Spark. `log_stream` has the meaning of its offsets.

Theory of operation. The reader lives in the driver. For each micro-batch Spark calls `latestOffset`, writes the
returned offset to its checkpoint, and calls `partitions`, which cuts the range between two offsets into tasks. `read`
runs in the workers. `commit` says that a micro-batch is done.

After a crash Spark starts with the offsets of its checkpoint, and plans the last micro-batch again if it was not done.
With `Trigger.AvailableNow` the ends of the logs at the start of the query limit all batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.log_stream import LogStream, StreamOffset
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import pack
from kcoord.pipeline.reading import Ranges, read_ranges


class KcoordStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query's stream. The driver has it as long as the query; workers get copies without the stream."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        resolves = options.is_read_committed and options.table.name in ("records", "commits")
        self._stream = LogStream(options, resolves=resolves)

    def __getstate__(self) -> tuple[SourceOptions, pa.Schema]:
        return self._options, self._schema

    def __setstate__(self, state: tuple[SourceOptions, pa.Schema]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def initialOffset(self) -> StreamOffset:
        return self._stream.initial()

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.stop_at_present_ends()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        return self._stream.latest(start, limit.max_bytes if isinstance(limit, ReadMaxBytes) else END_OF_LOG)

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        return [Ranges(packed) for packed in pack(self._stream.ranges(start, end), self._options.split_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        return read_ranges(partition, self._options, self._schema, self._options.groups)

    def commit(self, end: StreamOffset) -> None:
        self._stream.done(end)
