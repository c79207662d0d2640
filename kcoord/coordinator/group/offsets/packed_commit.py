# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetCommit: offsets go from a request's bytes to the log's bytes and to the rows in memory without
becoming numbers.

A consumer commits the same partitions again and again. What stays the same is remembered as a CommitPlan; what is new
are 12 bytes per partition, its offset and leader epoch, which lie side by side in the request, in the record and in a
row of `TopicOffsets`. Invariant: `prepare` says yes only where `offset_operations.commit_offset` would accept every
partition; then `encode_batch` is byte for byte the batch of the records that it would give, and `replay` changes the
state as the replay of these records does. Wherever that is not certain `prepare` says no, and the request goes the
general way. Whether the member may commit is decided anew where its group, or the metadata image, has changed.

A plan is looked at once and then not for long, so what it refers to is not in the processor's cache: a miss costs as
much as ten steps of Python. So plans share what is equal, and one of a single partition has shorter ways.
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
"""From here on a request has leader epochs, and no retention time."""
FIRST_VERSION_WITH_TOPIC_IDS: Final = 10

_KEY_TYPE: Final = b"\0\1"
_VALUE_VERSION: Final = b"\0\4"
_VALUE_BYTES: Final = 42
_BEFORE_TIMESTAMP: Final = b"\1"
"""Empty metadata, behind offset and leader epoch."""
_TOPIC_ID_TAG: Final = b"\x01\x00\x10"
_NO_HEADERS: Final = b"\0"

_PARTITION: Final = Struct(">i")
_RECORD_PARTS: Final = 5
"""Start, key, partition and start of the value, offset and leader epoch, rest."""
_CELL_PART: Final = 3
_REST_PART: Final = 4


@lru_cache(maxsize=1024)
def _record_starts(record_bytes: int, first_delta: int, count: int) -> tuple[bytes, ...]:
    """Length, attributes, timestamp delta and offset delta of so many records. Shared by all plans, as is the next."""
    deltas = [encode_varint(delta) for delta in range(first_delta, first_delta + count)]
    return tuple(encode_varint(record_bytes + 2 + len(delta)) + b"\0\0" + delta for delta in deltas)


@lru_cache(maxsize=4096)
def _value_start(partition: int) -> bytes:
    return _PARTITION.pack(partition) + encode_varint(_VALUE_BYTES) + _VALUE_VERSION


@lru_cache(maxsize=8192)
def shared(value: bytes) -> bytes:
    """One object for all that are equal."""
    return value


_put_cell: Final = Struct(">12s").pack_into
_put_time: Final = TIME.pack_into


@dataclass(slots=True)
class TopicShape:
    """One topic of a CommitShape: a name, or in versions with topic ids an id."""

    name: str
    topic_id: bytes
    partitions: list[int]


@dataclass(slots=True)
class CommitShape:
    """What an OffsetCommit without metadata says beside offsets and leader epochs. No partition is named twice."""

    group_id: str
    generation_or_epoch: int
    member_id: str
    instance_id: str | None
    topics: list[TopicShape]

    def request(self) -> OffsetCommitRequest:
        """As far as it says who commits."""
        return OffsetCommitRequest(
            group_id=self.group_id,
            generation_id_or_member_epoch=self.generation_or_epoch,
            member_id=self.member_id,
            group_instance_id=self.instance_id,
        )


class TopicPlan:
    """One topic of a CommitPlan: its partitions, and the rows that they had when they were last looked for."""

    __slots__ = (
        "cells_at",
        "is_only",
        "layout",
        "name",
        "partitions",
        "place",
        "record_bytes",
        "record_rest",
        "row",
        "times_at",
        "topic_id",
    )

    def __init__(self, shape: TopicShape, *, is_only: bool) -> None:
        self.name = shape.name
        self.topic_id = shape.topic_id
        self.partitions = tuple(shape.partitions)
        self.record_bytes = 0
        """Of a record but for its length and deltas."""
        self.record_rest = b""
        self.place: TopicOffsets | None = None
        self.layout = -1
        self.cells_at: Sequence[int] = ()
        self.times_at: Sequence[int] = ()
        self.is_only = is_only
        """A commit of a single partition; `row` is what is needed of it."""
        self.row = -1

    def find_rows(self, place: TopicOffsets) -> bool:
        """Whether every partition has a row there."""
        rows = place.rows_of(self.partitions)
        if rows is None:
            return False
        self.place, self.layout = place, place.layout
        if self.is_only:
            self.row = rows[0]
        else:
            self.cells_at = array("I", (row * CELL_BYTES + _PARTITION.size for row in rows))
            self.times_at = array("I", (row * TIME_BYTES for row in rows))
        return True


class CommitPlan:
    """An OffsetCommit but for its offsets and leader epochs; as the `PackedRecords` of the runtime it stands for the
    commit that was prepared last.
    """

    __slots__ = (
        "_cells",
        "_group",
        "_group_version",
        "_image",
        "_is_single",
        "_offsets",
        "_parts",
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
        self._topics = tuple([TopicPlan(topic, is_only=self._is_single) for topic in shape.topics])
        self.timer: Schedule | None = None
        self._timer_key: TimerKey | None = None
        self._image: MetadataImage | None = None
        self._group: Group | None = None
        self._group_version: object = None
        self._parts: list[bytes] = []
        """Of all records; of a single one the key and the start of the value."""
        self._cells: Sequence[bytes] = ()
        self.timestamp_ms = 0
        self._offsets: CommittedOffsets | None = None
        """Where some partitions have no row yet."""

    def _learn_topics(self, image: MetadataImage) -> bool:
        """Whether the image has all topics and partitions; then the records are laid out."""
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
        parts: list[bytes] = []
        for topic in self._topics:
            key = _KEY_TYPE + OffsetCommitKey(group=self.group_id, topic=topic.name).encode(0)
            key_start = encode_varint(len(key)) + key[: -_PARTITION.size]
            topic.record_bytes = len(key_start) + _PARTITION.size + 2 + _VALUE_BYTES
            topic.record_rest = shared(_TOPIC_ID_TAG + topic.topic_id + _NO_HEADERS)
            for partition in topic.partitions:
                parts += b"", shared(key_start), _value_start(partition), b"", b""
        self._parts = parts[1:_CELL_PART] if self._is_single else parts

    def prepare(
        self,
        groups: Mapping[str, Group],
        offsets: CommittedOffsets,
        image: MetadataImage,
        cells: Sequence[bytes],
        now_ms: int,
    ) -> bool:
        """Decides on a commit while no transaction is under way in the shard; False where it has to go the general way.

        `cells` has offset and leader epoch of each partition, 12 bytes. State is only read; what is prepared holds
        until the next change of any state.
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
        """Whether the member may commit all of it; that holds for this version of the group, and this image."""
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
        """See `PackedRecords`."""
        before_rest = _BEFORE_TIMESTAMP + TIME.pack(self.timestamp_ms)
        parts = self._parts
        if self._is_single:
            topic = self._topics[0]
            (start,) = _record_starts(topic.record_bytes, first_delta, 1)
            return b"".join((start, *parts, self._cells[0], before_rest, topic.record_rest))
        starts: list[bytes] = []
        rests: list[bytes] = []
        for topic in self._topics:
            count = len(topic.partitions)
            starts += _record_starts(topic.record_bytes, first_delta, count)
            rests += [before_rest + topic.record_rest] * count
            first_delta += count
        parts[::_RECORD_PARTS] = starts
        parts[_CELL_PART::_RECORD_PARTS] = self._cells
        parts[_REST_PART::_RECORD_PARTS] = rests
        return b"".join(parts)

    def replay(self) -> None:
        """Into the rows that `prepare` has just found, or has not."""
        if self._offsets is not None:
            self._put(self._offsets)
            return
        timestamp_ms = self.timestamp_ms
        if self._is_single:
            topic = self._topics[0]
            place, row = topic.place, topic.row
            assert place is not None and place.layout == topic.layout, "rows do not move between prepare and replay"
            _put_cell(place.cells, row * CELL_BYTES + _PARTITION.size, self._cells[0])
            _put_time(place.times, row * TIME_BYTES, timestamp_ms)
            return
        values = iter(self._cells)
        for topic in self._topics:
            place = topic.place
            assert place is not None and place.layout == topic.layout, "rows do not move between prepare and replay"
            cells, times = place.cells, place.times
            for cell_at, time_at, value in zip(topic.cells_at, topic.times_at, values, strict=False):
                _put_cell(cells, cell_at, value)
                _put_time(times, time_at, timestamp_ms)

    def _put(self, offsets: CommittedOffsets) -> None:
        values = iter(self._cells)
        for topic in self._topics:
            place = offsets.topic_for(self.group_id, topic.name)
            if not place.cells:
                place.topic_id = topic.topic_id
            for partition, value in zip(topic.partitions, values, strict=False):
                place.put_cell(partition, value, self.timestamp_ms)
