# SPDX-License-Identifier: Apache-2.0
"""The stream of a table. Its offset is the next log offset of each log partition, and the topic's id.

    {"0": 1234, "1": 77, "topic_id": "b8tRS7h4TJ2Vt43Dp85v2A"}

Theory of operation. The reader lives in the driver. For each micro-batch Spark calls `latestOffset`, writes the
returned offset to its checkpoint, and calls `partitions`, which cuts the range between two offsets into tasks. `read`
runs in the workers. `commit` says that a micro-batch is done.

* A `Follower` knows the ends of the logs, in folders or in a cluster. In `latestOffset` it finds the end of the
  micro-batch within the byte budget (`maxBytesPerTrigger`). The end of a log partition is a stable offset: with
  read_committed every transaction below it is decided or abandoned. If no stable offset is within the budget, the
  micro-batch exceeds the budget, since a long transaction would otherwise stop the stream.
* A range between two offsets gives the same rows whenever it is read. A sink that remembers its batches therefore has
  each row exactly once. Cleaning may remove records from a range before it is read for the first time; it never adds
  records.
* After a crash Spark starts with the offsets of its checkpoint, and plans the last micro-batch again if it was not
  done. A follower stores nothing. No transaction of earlier batches is open at the start of a batch, since the start is
  a stable offset.
* With `Trigger.AvailableNow` the ends of the logs at the start of the query limit all batches.
* Offsets mean the same in folders and in a cluster, so a stream may continue with the other. The topic id shows that
  it is the same log. A topic that was deleted and created again fails the stream in any case. Offsets of an older
  release have no topic id, and get it with the next records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from kcoord.pipeline.errors import OtherTopicError
from kcoord.pipeline.folder_follower import FolderFollower
from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import pack
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges

TOPIC_ID: Final = "topic_id"

StreamOffset = dict[str, int | str]


class Follower(Protocol):
    """Follows the ends of the logs of a topic. Offsets are by the number of the log partition, as text."""

    def look(self) -> str | None:
        """Lists the logs as they are now. Returns the topic's id, None if it is unknown or there are no logs."""
        ...

    def ends(self) -> dict[str, int]:
        """Returns the end offsets of all logs."""
        ...

    def advance(self, start: dict[str, int], budget_bytes: int, last: dict[str, int] | None) -> dict[str, int]:
        """Returns the offsets up to which to read, not beyond `last`.

        Raises DataLossError if the option asks for it and the logs no longer have the offsets from `start` on.
        """
        ...

    def ranges(self, start: dict[str, int], end: dict[str, int]) -> list[tuple[LogRange, int]]:
        """Returns ranges that cover the offsets from `start` to `end`, with their sizes in bytes."""
        ...

    def done(self, end: dict[str, int]) -> None:
        """Forgets what only earlier offsets need."""
        ...


class KcoordStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one query's stream. The driver has it as long as the query; workers get copies without the tails."""

    def __init__(self, options: SourceOptions, schema: pa.Schema) -> None:
        self._options = options
        self._schema = schema
        self._follower = _follower_of(options)
        self._last: dict[str, int] | None = None

    def __getstate__(self) -> tuple[SourceOptions, pa.Schema]:
        return self._options, self._schema

    def __setstate__(self, state: tuple[SourceOptions, pa.Schema]) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def initialOffset(self) -> StreamOffset:
        start = self._options.starting_offsets
        if start == "earliest":
            return {}
        if isinstance(start, str):
            return _offset(self._follower.look(), self._follower.ends())
        return dict(start)

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxBytes(limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._follower.look()
        self._last = self._follower.ends()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:
        budget_bytes = limit.max_bytes if isinstance(limit, ReadMaxBytes) else END_OF_LOG
        topic_id = self._look(start)
        begun = _ends_in(start)
        end = self._follower.advance(begun, budget_bytes, self._last)
        return _offset(topic_id, end) if end != begun else start

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        self._look(end)
        ranges = self._follower.ranges(_ends_in(start), _ends_in(end))
        return [Ranges(packed) for packed in pack(ranges, self._options.split_bytes)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Ranges)
        return read_ranges(partition, self._options, self._schema, self._options.groups)

    def commit(self, end: StreamOffset) -> None:
        self._follower.done(_ends_in(end))

    def _look(self, offset: StreamOffset) -> str | None:
        """Lists the logs. Returns the topic's id if it is known, and raises OtherTopicError if it has changed."""
        read_id, topic_id = offset.get(TOPIC_ID), self._follower.look()
        if read_id is not None and topic_id is not None and read_id != topic_id:
            raise OtherTopicError(
                f"{self._options.topic} has the topic id {topic_id}, but the stream has read the topic with the id "
                f"{read_id}: it was deleted and created again, or it is another cluster's. Begin a new stream or lake"
            )
        return topic_id if read_id is None else str(read_id)


def _follower_of(options: SourceOptions) -> Follower:
    resolves = options.is_read_committed and options.table.name in ("records", "commits", "ranges")
    if not options.properties:
        return FolderFollower(options, resolves=resolves)
    from kcoord.pipeline.wire.follower import BrokerFollower

    return BrokerFollower(options, resolves=resolves)


def _ends_in(offset: StreamOffset) -> dict[str, int]:
    return {name: int(end) for name, end in offset.items() if name != TOPIC_ID}


def _offset(topic_id: str | None, ends: Mapping[str, int]) -> StreamOffset:
    """Makes the offset of a stream. Spark compares its text, so the order of the names is fixed."""
    offset: StreamOffset = {name: ends[name] for name in sorted(ends, key=int) if ends[name]}
    if topic_id is not None and offset:
        offset[TOPIC_ID] = topic_id
    return offset
