# SPDX-License-Identifier: Apache-2.0
"""The fast path of loading: replays the bytes of offset commits into the packed rows of `CommittedOffsets`.

Most of a coordinator's log is offset commits, so they decide how long a load takes. This path only accepts the shapes
that this broker writes: no metadata, no expire timestamp, no unknown tag. Every other record needs the general replay,
which has the same result.

Records of equal size and with equal fixed bytes are a *run*. A run is unpacked with one `Struct`, whose columns are
then compared and stored together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from struct import Struct, pack
from typing import Final, NamedTuple

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import (
    CELL,
    CELL_END,
    NO_EXPIRE_TIMESTAMP,
    CommittedOffset,
    CommittedOffsets,
    TopicOffsets,
)
from kcoord.coordinator.group.offsets.transactional_offsets import TransactionalOffsets
from kcoord_protocol.primitives import decode_uvarint, encode_varint
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES
from kcoord_protocol.uuid import ZERO_UUID

_KEY_TYPES: Final = (b"\x00\x00", b"\x00\x01")
_PARTITION_BYTES: Final = 4
_CELL_ENDS: Final = repeat(CELL_END)
_SHORT_DELTAS: Final = 64
_FIRST_DELTAS: Final = tuple(bytes([delta << 1]) for delta in range(_SHORT_DELTAS))
_ODD_BYTES: Final = bytes(range(1, 256, 2))
_INT32: Final = Struct(">i")
_LAST_OFFSET_DELTA_AT: Final = 23

_VALUE_3: Final = ("qi2sq1s", 24, b"\0\3", b"\0\0")
"""The layout of offset, leader epoch, empty metadata, commit timestamp and the record's header count; the size of the
value in bytes; then the expected version and the expected empty metadata."""
_VALUE_4: Final = ("qi1sq20s", 42, b"\0\4", b"\1")
_TOPIC_ID_TAG: Final = b"\x01\x00\x10"


class _Shape(NamedTuple):
    """The shape of the records of a run: all fields have equal sizes, and `start` and `middle` have equal bytes."""

    layout: Struct
    start: bytes
    middle: bytes
    metadata: bytes
    key_size_bytes: int
    has_short_delta: bool
    """True if the offset delta takes one byte, as it does in the first 64 records of a batch."""


_NO_SHAPE: Final = _Shape(Struct(">1s1s1si1sqi1sq1s"), b"", b"", b"", 0, False)
"""Fits no record: a record begins with its length, which takes at least one byte."""


class OffsetCommitReader:
    """Replays batches of offset commits into a shard that is being loaded.

    It remembers the TopicOffsets of each record key, until a batch with other records may have deleted them.
    """

    __slots__ = ("_delta", "_groups", "_last", "_layouts", "_offsets", "_pending", "_places", "_tail", "_topic_id")

    def __init__(self, groups: dict[str, Group], offsets: CommittedOffsets, pending: TransactionalOffsets) -> None:
        self._groups = groups
        self._offsets = offsets
        self._pending = pending
        self._places: dict[bytes, TopicOffsets] = {}
        self._layouts: dict[str, Struct] = {}
        self._last = _NO_SHAPE
        self._delta = -1
        self._tail = b""
        self._topic_id: bytes | None = None

    def replay(self, batch: bytes, count: int) -> bool:
        """Replays the `count` records of a batch that is not compressed.

        Returns False if any record needs the general replay. The caller then replays the whole batch; replaying again
        is harmless.
        """
        if self._pending:
            # A commit supersedes pending offsets of its partition, which this path does not do.
            self._places.clear()
            return False
        self._delta = -1
        view = memoryview(batch)
        end = len(batch)
        position = BATCH_OVERHEAD_BYTES
        while count > 0:
            done = self._replay_run(self._last, view, position, count)
            if done == 0:
                shape = self._shape(batch, position, end)
                if shape is None:
                    break
                self._last = shape
                done = self._replay_run(shape, view, position, count)
                if done == 0:
                    break
            size = self._last.layout.size
            count -= done
            position += done * size
        (last_delta,) = _INT32.unpack_from(batch, _LAST_OFFSET_DELTA_AT)
        if count == 0 and position == end and self._delta <= last_delta:
            return True
        self._places.clear()
        return False

    def _replay_run(self, shape: _Shape, batch: memoryview, position: int, count: int) -> int:
        """Replays the records from `position` on that have this shape, at most `count`; returns how many."""
        layout = shape.layout
        count = min(count, (len(batch) - position) // layout.size)
        if count > 0 and shape.has_short_delta:
            count = min(count, _SHORT_DELTAS - (batch[position + len(shape.start)] >> 1))
        if count <= 0:
            return 0
        columns = zip(*layout.iter_unpack(batch[position : position + count * layout.size]), strict=True)
        starts, deltas, keys, partitions, middles, offsets, leader_epochs, metadata, times, tails = columns
        tail = tails[0]
        if tail != self._tail:
            self._tail, self._topic_id = tail, _topic_id(tail)
        topic_id = self._topic_id
        if topic_id is None:
            return 0
        is_uniform = (
            starts.count(shape.start) == count
            and middles.count(shape.middle) == count
            and metadata.count(shape.metadata) == count
            and tails.count(tail) == count
        )
        if is_uniform and self._delta == -1 and deltas == _FIRST_DELTAS[:count] and keys.count(keys[0]) == count:
            # Most batches are one commit of one topic.
            place = self._places.get(keys[0]) or self._place(keys[0], shape.key_size_bytes)
            if place is None:
                return 0
            self._delta = count - 1
            _put(place, topic_id, partitions, leader_epochs, offsets, times)
            return count
        alike = min(_alike(starts, shape.start), _alike(middles, shape.middle), _alike(metadata, shape.metadata))
        alike = min(alike, _alike(tails, tail))
        last_delta = _last_delta(deltas[:alike], self._delta)
        if last_delta is None:
            return 0
        self._delta = last_delta
        done = 0
        while done < alike:
            key = keys[done]
            end = done + _alike(keys[done:alike], key)
            place = self._places.get(key) or self._place(key, shape.key_size_bytes)
            if place is None:
                break
            run = slice(done, end)
            _put(place, topic_id, partitions[run], leader_epochs[run], offsets[run], times[run])
            done = end
        return done

    def _shape(self, batch: bytes, position: int, end: int) -> _Shape | None:
        """Returns the shape of the record at `position`; None if it is not an offset commit of an accepted shape."""
        try:
            size, start = decode_uvarint(batch, position)
            record_end = start + (size >> 1)
            if size & 1 or record_end > end or batch[start] or batch[start + 1]:
                return None
            _, delta_end = decode_uvarint(batch, start + 2)
            key_size, key_start = decode_uvarint(batch, delta_end)
            partition_at = key_start + (key_size >> 1) - _PARTITION_BYTES
            value_size, value_start = decode_uvarint(batch, partition_at + _PARTITION_BYTES)
        except (IndexError, ValueError):
            return None
        value = _VALUE_4 if value_size >> 1 == _VALUE_4[1] else _VALUE_3
        fields, value_bytes, version, metadata = value
        if key_size & 1 or value_size != value_bytes << 1 or partition_at < key_start:
            return None
        if value_start + value_bytes + 1 != record_end:
            return None
        middle_end = value_start + len(version)
        middle_at = partition_at + _PARTITION_BYTES
        if batch[value_start:middle_end] != version:
            return None
        text = (
            f">{start + 2 - position}s{delta_end - start - 2}s{partition_at - delta_end}si{middle_end - middle_at}s"
            f"{fields}"
        )
        layout = self._layouts.get(text)
        if layout is None:
            layout = self._layouts[text] = Struct(text)
        fixed = batch[position : start + 2], batch[middle_at:middle_end]
        return _Shape(layout, *fixed, metadata, key_start - delta_end, delta_end == start + 3)

    def _place(self, key: bytes, size_bytes: int) -> TopicOffsets | None:
        """Returns the TopicOffsets for a record key, and creates the group if necessary.

        `key` is the key with its length, but without the partition. Returns None if it is no key of an offset commit.
        """
        prefix = key[size_bytes:]
        if prefix[:2] not in _KEY_TYPES or key[:size_bytes] != encode_varint(len(prefix) + _PARTITION_BYTES):
            return None
        group_end = 4 + int.from_bytes(prefix[2:4], "big")
        topic_start = group_end + 2
        if topic_start + int.from_bytes(prefix[group_end:topic_start], "big") != len(prefix):
            return None
        try:
            group_id, topic = prefix[4:group_end].decode(), prefix[topic_start:].decode()
        except UnicodeDecodeError:
            return None
        if group_id not in self._groups:
            self._groups[group_id] = ClassicGroup(group_id)
        place = self._places[key] = self._offsets.topic_for(group_id, topic)
        return place


def _last_delta(deltas: Sequence[bytes], previous: int) -> int | None:
    """Returns the last of these offset deltas, or None.

    None means that the deltas do not grow, or that one is negative (odd in zigzag) or not a varint of this size.
    """
    if not deltas:
        return previous
    size = len(deltas[0])
    joined = b"".join(deltas)
    if size == 1:
        is_sound = joined[0] >> 1 > previous and joined.isascii() and sorted(set(joined)) == list(joined)
        is_sound = is_sound and len(joined.translate(None, _ODD_BYTES)) == len(joined)
        return joined[-1] >> 1 if is_sound else None
    if not joined[size - 1 :: size].isascii() or any(min(joined[at::size]) < 0x80 for at in range(size - 1)):
        return None
    for delta in deltas:
        number, _ = decode_uvarint(delta, 0)
        if number & 1 or number >> 1 <= previous:
            return None
        previous = number >> 1
    return previous


def _alike(values: Sequence[bytes], expected: bytes) -> int:
    """Returns how many values equal `expected` before the first one that does not."""
    if values.count(expected) == len(values):
        return len(values)
    return next(number for number, value in enumerate(values) if value != expected)


def _put(
    place: TopicOffsets,
    topic_id: bytes,
    partitions: tuple[int, ...],
    leader_epochs: tuple[int, ...],
    offsets: tuple[int, ...],
    times: tuple[int, ...],
) -> None:
    """Stores a run of offsets; in one piece if the partitions are contiguous and no row before them is missing."""
    first, count = partitions[0], len(partitions)
    if (
        place.notes is None
        and (not place.cells or (topic_id == place.topic_id and place.is_dense()))
        and 0 <= first <= len(place)
        and partitions == tuple(range(first, first + count))
    ):
        place.topic_id = topic_id
        cells = b"".join(map(CELL.pack, partitions, offsets, leader_epochs, _CELL_ENDS))
        place.put_first(partitions, cells, pack(f">{count}q", *times))
        return
    for partition, leader_epoch, offset, time in zip(partitions, leader_epochs, offsets, times, strict=True):
        place.put(partition, CommittedOffset(offset, leader_epoch, "", time, NO_EXPIRE_TIMESTAMP, topic_id))


def _topic_id(tail: bytes) -> bytes | None:
    """Returns the topic id from the bytes after the commit timestamp; None if they have any other shape.

    The bytes are nothing, or the topic id as the only tag; then a header count of zero.
    """
    if len(tail) == 1:
        return ZERO_UUID if tail == b"\0" else None
    if tail[:3] != _TOPIC_ID_TAG or tail[19]:
        return None
    return tail[3:19]
