# SPDX-License-Identifier: Apache-2.0
"""Committed offsets: the last record per (group, topic, partition). Only the shard's replay changes them.

A shard may hold a million of them, and most requests are about them. So they are kept as packed rows: one run of bytes
per group and topic. OffsetFetch v8 and later returns them in this form, so a response is a copy. `CommittedOffset`
objects are made only on demand. Snapshots store and restore the same bytes.

**Rows and layout.** The rows of a topic are ordered by partition. A commit to a present partition overwrites its row in
place. A new partition inserts a row, and a deletion removes one; both move rows and therefore change `layout`. The fast
paths remember row numbers for as long as `layout` stays the same.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from kcoord_protocol.uuid import ZERO_UUID

CELL: Final = Struct(">iqi4s")
"""A row: partition, offset, leader epoch, and CELL_END, which follows them in a response."""
CELL_END: Final = b"\x01\0\0\0"
"""Empty metadata, no error, no tags. An offset with metadata has a Note."""
CELL_BYTES: Final = CELL.size
TIME: Final = Struct(">q")
"""The commit timestamp."""
TIME_BYTES: Final = TIME.size
NO_EXPIRE_TIMESTAMP: Final = -1
_PARTITION: Final = Struct(">i")
_VALUE: Final = Struct(">qi")
"""Offset and leader epoch."""


class Note(NamedTuple):
    """The fields of one partition's offset that most offsets do not have."""

    metadata: str
    topic_id: bytes
    expire_timestamp_ms: int


@dataclass(slots=True)
class CommittedOffset:
    """One committed offset. `expire_timestamp_ms` is -1 unless an old client sent a retention time (KIP-211)."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int = -1
    topic_id: bytes = ZERO_UUID


class TopicOffsets(Mapping[int, CommittedOffset]):
    """One group's offsets of one topic by partition, in ascending order of partitions.

    `cells` and `times` have one row per partition. `notes` has the partitions with metadata, with an expire timestamp,
    or with another topic id than `topic_id`; it is None if there are none. `layout` grows whenever a row gets a new
    partition.
    """

    __slots__ = ("cells", "layout", "notes", "times", "topic_id")

    def __init__(self, topic_id: bytes, cells: bytearray, times: bytearray, notes: dict[int, Note] | None) -> None:
        self.topic_id = topic_id
        self.cells = cells
        self.times = times
        self.notes = notes
        self.layout = 0

    def __len__(self) -> int:
        return len(self.times) // TIME_BYTES

    def __iter__(self) -> Iterator[int]:
        return (cell[0] for cell in CELL.iter_unpack(self.cells))

    def __contains__(self, partition: object) -> bool:
        return isinstance(partition, int) and self._find(partition)[1]

    def __getitem__(self, partition: int) -> CommittedOffset:
        row, is_present = self._find(partition)
        if not is_present:
            raise KeyError(partition)
        return self._at(row)

    def get(self, partition: int, default: object = None) -> CommittedOffset | None:  # type: ignore[override]
        row, is_present = self._find(partition)
        return self._at(row) if is_present else None

    def items(self) -> ItemsView[int, CommittedOffset]:
        offset = self._offset
        rows = zip(CELL.iter_unpack(self.cells), TIME.iter_unpack(self.times), strict=True)
        return {cell[0]: offset(*cell, *time) for cell, time in rows}.items()

    def values(self) -> ValuesView[CommittedOffset]:
        return dict(self.items()).values()

    def _at(self, row: int) -> CommittedOffset:
        cell = CELL.unpack_from(self.cells, row * CELL_BYTES)
        return self._offset(*cell, *TIME.unpack_from(self.times, row * TIME_BYTES))

    def _offset(self, partition: int, offset: int, leader_epoch: int, _: bytes, committed: int) -> CommittedOffset:
        note = self.notes.get(partition) if self.notes is not None else None
        if note is not None:
            return CommittedOffset(
                offset, leader_epoch, note.metadata, committed, note.expire_timestamp_ms, note.topic_id
            )
        return CommittedOffset(offset, leader_epoch, "", committed, NO_EXPIRE_TIMESTAMP, self.topic_id)

    def oldest(self) -> tuple[int, bool]:
        """Returns the earliest commit timestamp, and whether an offset may have its own expire timestamp."""
        (time_ms,) = min(TIME.iter_unpack(self.times))
        return time_ms, self.notes is not None

    def is_dense(self) -> bool:
        """True if the partitions are 0, 1, 2 and so on without a gap."""
        cells = self.cells
        return not cells or _PARTITION.unpack_from(cells, len(cells) - CELL_BYTES) == (len(self) - 1,)

    def rows_of(self, partitions: Sequence[int]) -> list[int] | None:
        """Returns the rows of these partitions; None if a partition has no offset. Valid until `layout` changes."""
        rows = [row for row in map(self.row_of, partitions) if row is not None]
        return rows if len(rows) == len(partitions) else None

    def row_of(self, partition: int) -> int | None:
        """Returns the row of the partition; None if it has no offset. Valid until `layout` changes."""
        row, is_present = self._find(partition)
        return row if is_present else None

    def _find(self, partition: int) -> tuple[int, bool]:
        """Returns the row of a partition and True, or the row where it would be and False."""
        # In most groups every partition of a topic has an offset, so the row is the partition's number.
        cells = self.cells
        count = len(self.times) // TIME_BYTES
        number_at = _PARTITION.unpack_from
        number = (partition,)
        if 0 <= partition < count and number_at(cells, partition * CELL_BYTES) == number:
            return partition, True
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if number_at(cells, middle * CELL_BYTES) < number:
                low = middle + 1
            else:
                high = middle
        return low, low < count and number_at(cells, low * CELL_BYTES) == number

    def put(self, partition: int, offset: CommittedOffset) -> None:
        """Stores an offset; the last commit wins."""
        self.put_cell(partition, _VALUE.pack(offset.offset, offset.leader_epoch), offset.commit_timestamp_ms)
        if len(self.cells) == CELL_BYTES:
            self.topic_id, self.notes = offset.topic_id, None
        if offset.metadata or offset.topic_id != self.topic_id or offset.expire_timestamp_ms != NO_EXPIRE_TIMESTAMP:
            self.notes = self.notes or {}
            self.notes[partition] = Note(offset.metadata, offset.topic_id, offset.expire_timestamp_ms)
        elif self.notes is not None:
            self._forget_note(partition)

    def _forget_note(self, partition: int) -> None:
        """Removes the partition's note. Without notes the fast paths apply, so an empty dictionary becomes None."""
        assert self.notes is not None
        self.notes.pop(partition, None)
        if not self.notes:
            self.notes = None

    def put_cell(self, partition: int, cell: bytes, time_ms: int) -> None:
        """Stores an offset without a note, with the topic id of the topic. `cell` has offset and leader epoch."""
        row, is_present = self._find(partition)
        after = row + 1 if is_present else row
        if not is_present:
            self.layout += 1
        self.cells[row * CELL_BYTES : after * CELL_BYTES] = _PARTITION.pack(partition) + cell + CELL_END
        self.times[row * TIME_BYTES : after * TIME_BYTES] = TIME.pack(time_ms)

    def put_first(self, partitions: Sequence[int], cells: bytes, times: bytes) -> None:
        """Stores offsets without notes in one piece.

        `partitions` are contiguous and begin at most one after the last row; the present rows are dense (`is_dense`).
        """
        first, after = partitions[0], partitions[-1] + 1
        assert first <= len(self), f"G-11: partition {first} would be stored in row {len(self)}"
        if after > len(self):
            self.layout += 1
        self.cells[first * CELL_BYTES : after * CELL_BYTES] = cells
        self.times[first * TIME_BYTES : after * TIME_BYTES] = times

    def remove(self, partition: int) -> None:
        row, is_present = self._find(partition)
        if is_present:
            self.layout += 1
            del self.cells[row * CELL_BYTES : (row + 1) * CELL_BYTES]
            del self.times[row * TIME_BYTES : (row + 1) * TIME_BYTES]
            if self.notes is not None:
                self._forget_note(partition)


class CommittedOffsets:
    """All committed offsets of a shard: group -> topic -> partition -> offset; empty levels are dropped."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, TopicOffsets]] = {}

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        topic_offsets = self._groups.get(group_id, {}).get(topic)
        return topic_offsets.get(partition) if topic_offsets is not None else None

    def of_group(self, group_id: str) -> Mapping[str, Mapping[int, CommittedOffset]]:
        return self._groups.get(group_id, {})

    def packed(self, group_id: str) -> Mapping[str, TopicOffsets]:
        """Returns the same as `of_group`, as packed rows."""
        return self._groups.get(group_id, {})

    def of_topic(self, topic: str) -> Iterator[tuple[str, list[int]]]:
        """Yields group id and partitions of every group that has offsets of `topic`."""
        for group_id, topics in self._groups.items():
            if topic in topics:
                yield group_id, list(topics[topic])

    def group_ids(self) -> Iterator[str]:
        return iter(self._groups)

    def topic_for(self, group_id: str, topic: str) -> TopicOffsets:
        """Returns the offsets of a group and topic, and creates them if missing.

        The caller has to store an offset in them, since empty ones must not remain.
        """
        topics = self._groups.get(group_id)
        if topics is None:
            topics = self._groups[group_id] = {}
        topic_offsets = topics.get(topic)
        if topic_offsets is None:
            topic_offsets = topics[topic] = TopicOffsets(ZERO_UUID, bytearray(), bytearray(), None)
        return topic_offsets

    def put(self, group_id: str, topic: str, partition: int, offset: CommittedOffset) -> None:
        self.topic_for(group_id, topic).put(partition, offset)

    def put_topic(self, group_id: str, topic: str, offsets: TopicOffsets) -> None:
        """Stores all offsets of a topic at once and replaces the present ones."""
        self._groups.setdefault(group_id, {})[topic] = offsets

    def remove(self, group_id: str, topic: str, partition: int) -> None:
        topics = self._groups.get(group_id)
        topic_offsets = topics.get(topic) if topics is not None else None
        if topics is None or topic_offsets is None:
            return
        topic_offsets.remove(partition)
        if not topic_offsets.cells:
            del topics[topic]
            if not topics:
                del self._groups[group_id]
