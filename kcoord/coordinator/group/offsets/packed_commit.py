# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetCommit, from the bytes of the request to the bytes of the log and the rows in memory.

A consumer commits the same partitions again and again. A `CommitPlan` keeps what stays the same. Each commit adds only
12 bytes per partition: offset and leader epoch. These bytes are the same in the request, in the record and in a row of
`TopicOffsets`, so they are copied without becoming numbers.

**Invariant.** `prepare` returns True only if `operations.commit_offset` would accept every partition. Then
`encode_records` returns exactly the bytes of the records that it would return, and `replay` changes the state as the
replay of these records does. In any doubt `prepare` returns False, and the request takes the general path.

**Order.** `prepare`, `encode_records` and `replay` run in one operation, so no other change comes between them. Rows
are found again if `layout` has changed. Permission is re-checked whenever the group or the metadata image has changed.

A plan is used rarely, so its memory is usually not in the processor's cache, and a cache miss costs as much as ten
steps of Python. Plans therefore share equal parts, keep nothing of a commit after its replay, and have special cases
for one partition and for rows that follow each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.group import Group, heartbeat_timer
from kcoord.coordinator.group.offsets.committed_offsets import (
    CELL_BYTES,
    CELL_END,
    TIME,
    TIME_BYTES,
    CommittedOffsets,
    TopicOffsets,
)
from kcoord.coordinator.group.offsets.known_partitions import find_topic, unknown_partitions
from kcoord.coordinator.group.offsets.operations import may_commit
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import Schedule, TimerKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitRequest
from kcoord_protocol.primitives import encode_varint
from kcoord_protocol.uuid import ZERO_UUID

FIRST_VERSION: Final = 6
"""The first version with leader epochs and without a retention time."""
FIRST_VERSION_WITH_TOPIC_IDS: Final = 10

_KEY_TYPE: Final = b"\0\1"
_VALUE_VERSION: Final = b"\0\4"
_VALUE_BYTES: Final = 42
_BEFORE_TIMESTAMP: Final = b"\1"
"""Empty metadata, which follows offset and leader epoch."""
_TOPIC_ID_TAG: Final = b"\x01\x00\x10"
_NO_HEADERS: Final = b"\0"

_PARTITION: Final = Struct(">i")
_RECORD_PARTS: Final = 5
"""The parts of a record: start; key; partition and start of the value; offset and leader epoch; rest."""
_KEY_PART: Final = 1
_VALUE_START_PART: Final = 2
_CELL_PART: Final = 3
_REST_PART: Final = 4


@lru_cache(maxsize=1024)
def _record_starts(record_bytes: int, first_delta: int, count: int) -> tuple[bytes, ...]:
    """Returns length, attributes, timestamp delta and offset delta of `count` records."""
    deltas = [encode_varint(delta) for delta in range(first_delta, first_delta + count)]
    return tuple(encode_varint(record_bytes + 2 + len(delta)) + b"\0\0" + delta for delta in deltas)


@lru_cache(maxsize=4096)
def _value_start(partition: int) -> bytes:
    return _PARTITION.pack(partition) + encode_varint(_VALUE_BYTES) + _VALUE_VERSION


@lru_cache(maxsize=1024)
def _record_parts(partitions: tuple[int, ...]) -> list[bytes]:
    """Returns the parts of the records of these partitions, of which only the starts of the values are set."""
    return [part for partition in partitions for part in (b"", b"", _value_start(partition), b"", b"")]


@lru_cache(maxsize=1024)
def _row_parts(partitions: tuple[int, ...]) -> list[bytes]:
    """Returns the parts of the rows of these partitions, in which every second part is left for a cell."""
    parts = [CELL_END]
    for partition in partitions:
        parts[-1] += _PARTITION.pack(partition)
        parts += b"", CELL_END
    parts[0] = parts[0].removeprefix(CELL_END)
    return parts


@lru_cache(maxsize=8192)
def shared(value: bytes) -> bytes:
    """Returns the same object for equal bytes."""
    return value


_put_cell: Final = Struct(">12s").pack_into
_put_time: Final = TIME.pack_into


@dataclass(slots=True)
class TopicShape:
    """One topic of a CommitShape, by name or, in versions with topic ids, by id."""

    name: str
    topic_id: bytes
    partitions: list[int]


@dataclass(slots=True)
class CommitShape:
    """The fields of an OffsetCommit without metadata, except offsets and leader epochs. No partition occurs twice."""

    group_id: str
    generation_or_epoch: int
    member_id: str
    instance_id: str | None
    topics: list[TopicShape]

    def request(self) -> OffsetCommitRequest:
        """Returns a request with the fields that identify group and member; it has no topics."""
        return OffsetCommitRequest(
            group_id=self.group_id,
            generation_id_or_member_epoch=self.generation_or_epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
        )


class TopicPlan:
    """One topic of a CommitPlan: its partitions, and the rows that they had at the last lookup."""

    __slots__ = (
        "cells_at",
        "key_start",
        "layout",
        "name",
        "partitions",
        "place",
        "record_bytes",
        "record_parts",
        "record_rest",
        "row",
        "row_parts",
        "times_at",
        "topic_id",
    )

    def __init__(self, shape: TopicShape) -> None:
        self.name = shape.name
        self.topic_id = shape.topic_id
        self.partitions = tuple(shape.partitions)
        self.record_bytes = 0
        """The size of a record without its length, attributes, timestamp delta and offset delta."""
        self.key_start = self.record_rest = b""
        self.record_parts, self.row_parts = _record_parts(self.partitions), _row_parts(self.partitions)
        self.place: TopicOffsets | None = None
        self.layout = -1
        self.row = -1
        """The first row, if all rows follow each other in the order of the partitions. Otherwise -1."""
        self.cells_at: Sequence[int] = ()
        self.times_at: Sequence[int] = ()

    def find_rows(self, place: TopicOffsets) -> bool:
        """Looks up the rows; returns False if a partition has no row."""
        rows = place.rows_of(self.partitions)
        if rows is None:
            return False
        self.place, self.layout = place, place.layout
        if rows == list(range(rows[0], rows[0] + len(rows))):
            self.row = rows[0]
        else:
            self.row = -1
            self.cells_at = array("I", (row * CELL_BYTES + _PARTITION.size for row in rows))
            self.times_at = array("I", (row * TIME_BYTES for row in rows))
        return True

    def encode_records(self, starts: Sequence[bytes], cells: Sequence[bytes], before_rest: bytes) -> bytes:
        count = len(starts)
        parts = self.record_parts.copy()
        parts[::_RECORD_PARTS] = starts
        parts[_KEY_PART::_RECORD_PARTS] = [self.key_start] * count
        parts[_CELL_PART::_RECORD_PARTS] = cells
        parts[_REST_PART::_RECORD_PARTS] = [before_rest + self.record_rest] * count
        return b"".join(parts)

    def replay(self, values: Sequence[bytes], timestamp_ms: int) -> None:
        """Writes offsets and leader epochs into the rows."""
        place, row = self.place, self.row
        assert place is not None and place.layout == self.layout, "G-10: rows moved since the commit was prepared"
        cells, times = place.cells, place.times
        if row >= 0:
            after = row + len(values)
            parts = self.row_parts.copy()
            parts[1::2] = values
            cells[row * CELL_BYTES : after * CELL_BYTES] = b"".join(parts)
            times[row * TIME_BYTES : after * TIME_BYTES] = TIME.pack(timestamp_ms) * len(values)
            return
        for cell_at, time_at, value in zip(self.cells_at, self.times_at, values, strict=True):
            _put_cell(cells, cell_at, value)
            _put_time(times, time_at, timestamp_ms)


class CommitPlan:
    """An OffsetCommit without its offsets and leader epochs.

    To the runtime it is the `PackedRecords` of the last prepared commit.
    """

    __slots__ = (
        "_cells",
        "_group",
        "_group_version",
        "_image",
        "_is_single",
        "_offsets",
        "_shape",
        "_timer_key",
        "_topics",
        "count",
        "group_id",
        "timer",
        "timestamp_ms",
        "version",
    )

    def __init__(self, shape: CommitShape, version: int) -> None:
        self.version = version
        self.group_id = shape.group_id
        self._shape = shape
        self.count = sum(len(topic.partitions) for topic in shape.topics)
        self._is_single = self.count == len(shape.topics) == 1
        self._topics = tuple([TopicPlan(topic) for topic in shape.topics])
        self.timer: Schedule | None = None
        self._timer_key: TimerKey | None = None
        self._image: MetadataImage | None = None
        self._group: Group | None = None
        self._group_version: object = None
        self._cells: Sequence[bytes] = ()
        self.timestamp_ms = 0
        self._offsets: CommittedOffsets | None = None
        """Set if some partitions of the prepared commit have no row yet."""

    def _learn_topics(self, image: MetadataImage) -> bool:
        """Prepares the records for this image; returns False if the image lacks a topic or partition."""
        for topic in self._topics:
            by_id = self.version >= FIRST_VERSION_WITH_TOPIC_IDS
            image_topic = find_topic(image, topic.name, topic.topic_id, by_id=by_id)
            if image_topic is None or image_topic.id == ZERO_UUID or unknown_partitions(image_topic, topic.partitions):
                return False
            topic.name, topic.topic_id = image_topic.name, image_topic.id
        self._lay_out()
        self._image = image
        return True

    def _lay_out(self) -> None:
        for topic in self._topics:
            key = _KEY_TYPE + OffsetCommitKey(group=self.group_id, topic=topic.name).encode(0)
            topic.key_start = shared(encode_varint(len(key)) + key[: -_PARTITION.size])
            topic.record_bytes = len(topic.key_start) + _PARTITION.size + 2 + _VALUE_BYTES
            topic.record_rest = shared(_TOPIC_ID_TAG + topic.topic_id + _NO_HEADERS)

    def prepare(
        self,
        groups: Mapping[str, Group],
        offsets: CommittedOffsets,
        image: MetadataImage,
        cells: Sequence[bytes],
        now_ms: int,
    ) -> bool:
        """Prepares a commit; returns False if it has to take the general path.

        The caller ensures that no transaction is open in the shard. `cells` has 12 bytes per partition: offset and
        leader epoch. This only reads state. The prepared commit is valid until the state changes.
        """
        group = groups.get(self.group_id)
        if group is None:
            return False
        if (
            group is not self._group or group.version is not self._group_version or image is not self._image
        ) and not self._is_accepted(group, image):
            return False
        self._offsets = None
        places = offsets.packed(self.group_id)
        for topic in self._topics:
            place = places.get(topic.name)
            if place is None:
                self._offsets = offsets
            elif place.notes is not None or place.topic_id != topic.topic_id:
                return False
            elif (place is not topic.place or place.layout != topic.layout) and not topic.find_rows(place):
                self._offsets = offsets
        self.timer = None
        if type(group) is ClassicGroup and group.members:
            member_id = self._shape.member_id
            member = group.members.get(member_id)
            if member is not None:
                self._timer_key = self._timer_key or heartbeat_timer(self.group_id, member_id)
                self.timer = Schedule(self._timer_key, now_ms + member.session_timeout_ms)
        self._cells = cells
        self.timestamp_ms = now_ms
        return True

    def _is_accepted(self, group: Group, image: MetadataImage) -> bool:
        """True if the member may commit all partitions. The answer is valid for this version of group and image."""
        self._group = None
        if image is not self._image and not self._learn_topics(image):
            return False
        try:
            if may_commit(group, self.version, self._shape.request()) is not None:
                return False
        except KafkaError:
            return False
        self._group, self._group_version = group, group.version
        return True

    def encode_records(self, first_delta: int) -> bytes:
        """Returns the records of the prepared commit (`PackedRecords`)."""
        before_rest, cells = _BEFORE_TIMESTAMP + TIME.pack(self.timestamp_ms), self._cells
        if self._is_single:
            topic = self._topics[0]
            (start,) = _record_starts(topic.record_bytes, first_delta, 1)
            value_start = topic.record_parts[_VALUE_START_PART]
            return b"".join((start, topic.key_start, value_start, cells[0], before_rest, topic.record_rest))
        bodies, at = [], 0
        for topic in self._topics:
            count = len(topic.partitions)
            starts = _record_starts(topic.record_bytes, first_delta + at, count)
            bodies.append(topic.encode_records(starts, cells[at : at + count], before_rest))
            at += count
        return bodies[0] if len(bodies) == 1 else b"".join(bodies)

    def replay(self) -> None:
        """Writes the prepared commit into the rows that `prepare` has found, or into new ones."""
        cells, self._cells = self._cells, ()
        if self._offsets is not None:
            self._put(self._offsets, cells)
            return
        if self._is_single:
            topic = self._topics[0]
            place, row = topic.place, topic.row
            assert place is not None and place.layout == topic.layout, (
                "G-9: the row moved since the commit was prepared"
            )
            _put_cell(place.cells, row * CELL_BYTES + _PARTITION.size, cells[0])
            _put_time(place.times, row * TIME_BYTES, self.timestamp_ms)
            return
        at = 0
        for topic in self._topics:
            after = at + len(topic.partitions)
            topic.replay(cells[at:after], self.timestamp_ms)
            at = after

    def _put(self, offsets: CommittedOffsets, cells: Sequence[bytes]) -> None:
        values = iter(cells)
        for topic in self._topics:
            place = offsets.topic_for(self.group_id, topic.name)
            if not place.cells:
                place.topic_id = topic.topic_id
            for partition, value in zip(topic.partitions, values, strict=False):
                place.put_cell(partition, value, self.timestamp_ms)
