# SPDX-License-Identifier: Apache-2.0
"""Follows the logs of a topic batch by batch, for streams of Spark and for the lake.

The offset of a stream is the next log offset of each log partition, and the topic's id:

    {"0": 1234, "1": 77, "topic_id": "b8tRS7h4TJ2Vt43Dp85v2A"}

Theory of operation. `latest` returns the offset up to which the next batch reads, and `ranges` cuts the logs between
two offsets into ranges.

* A `LogFollower` knows the ends of the logs, in folders or in a cluster. It finds the end of a batch within the byte
  budget. The end of a log partition is a stable offset: with read_committed every transaction below it is decided or
  abandoned. If no stable offset is within the budget, the batch exceeds the budget, since a long transaction would
  otherwise stop the stream.
* A range between two offsets gives the same rows whenever it is read. A sink that remembers its batches therefore has
  each row exactly once. Cleaning may remove records from a range before it is read for the first time; it never adds
  records.
* A follower stores nothing. No transaction of earlier batches is open at the start of a batch, since the start is a
  stable offset.
* Offsets mean the same in folders and in a cluster, so a stream may continue with the other. The topic id shows that
  it is the same log. A topic that was deleted and created again fails the stream in any case. Offsets of an older
  release have no topic id, and get it with the next records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from kcoord.pipeline.errors import OtherTopicError
from kcoord.pipeline.folder_follower import FolderFollower
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogRange

TOPIC_ID: Final = "topic_id"

StreamOffset = dict[str, int | str]


class LogFollower(Protocol):
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

    def bytes_behind(self, start: dict[str, int]) -> dict[str, int]:
        """Returns how many bytes of each log follow the offsets, of those that have any."""
        ...

    def done(self, end: dict[str, int]) -> None:
        """Forgets what only earlier offsets need."""
        ...


class LogStream:
    """The stream over the logs of the options. With `resolves` its ends are stable offsets."""

    def __init__(self, options: SourceOptions, *, resolves: bool) -> None:
        self._options = options
        self._follower = _follower_of(options, resolves=resolves)
        self._last: dict[str, int] | None = None

    def initial(self) -> StreamOffset:
        """Returns the offset at which a new stream begins."""
        start = self._options.starting_offsets
        if start == "earliest":
            return {}
        if isinstance(start, str):
            return _offset(self._follower.look(), self._follower.ends())
        return dict(start)

    def stop_at_present_ends(self) -> None:
        """Makes the present ends of the logs the limit of all batches."""
        self._follower.look()
        self._last = self._follower.ends()

    def latest(self, start: StreamOffset, budget_bytes: int) -> StreamOffset:
        """Returns the end of the next batch, or `start` if there is nothing new."""
        topic_id = self._look(start)
        begun = _ends_in(start)
        end = self._follower.advance(begun, budget_bytes, self._last)
        return _offset(topic_id, end) if end != begun else start

    def ranges(self, start: StreamOffset, end: StreamOffset) -> list[tuple[LogRange, int]]:
        """Returns ranges that cover the offsets from `start` to `end`, with their sizes in bytes."""
        self._look(end)
        return self._follower.ranges(_ends_in(start), _ends_in(end))

    def bytes_behind(self, offset: StreamOffset) -> dict[str, int]:
        """Returns how many bytes of each log follow the offset, as of the last look, of those that have any."""
        return self._follower.bytes_behind(_ends_in(offset))

    def done(self, end: StreamOffset) -> None:
        """Forgets what only earlier offsets need."""
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


def _follower_of(options: SourceOptions, *, resolves: bool) -> LogFollower:
    if not options.properties:
        return FolderFollower(options, resolves=resolves)
    from kcoord.pipeline.wire.follower import BrokerFollower

    return BrokerFollower(options, resolves=resolves)


def _ends_in(offset: StreamOffset) -> dict[str, int]:
    return {name: int(end) for name, end in offset.items() if name != TOPIC_ID}


def _offset(topic_id: str | None, ends: Mapping[str, int]) -> StreamOffset:
    """Makes an offset. Spark compares its text, so the order of the names is fixed."""
    offset: StreamOffset = {name: ends[name] for name in sorted(ends, key=int) if ends[name]}
    if topic_id is not None and offset:
        offset[TOPIC_ID] = topic_id
    return offset
