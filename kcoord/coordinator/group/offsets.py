# SPDX-License-Identifier: Apache-2.0
"""Committed offsets: the last record per (group, topic, partition). Only the shard's replay changes them.

A million of them is an ordinary number, so they are kept as packed rows, one run of bytes per group and topic, and
become objects when somebody looks. The same bytes go into snapshots and come back from there without being unpacked.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from dataclasses import dataclass
from struct import Struct
from typing import Final

from protocol.uuid import ZERO_UUID

ROW: Final = Struct(">iiqqq")
"""partition, leader epoch, offset, commit timestamp, expire timestamp."""
_PARTITION: Final = Struct(">i")
_ROW_BYTES: Final = ROW.size


@dataclass(slots=True)
class CommittedOffset:
    """One committed offset. `expire_timestamp_ms` is -1 but where an old client sent its own retention (KIP-211)."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int = -1
    topic_id: bytes = ZERO_UUID


class TopicOffsets(Mapping[int, CommittedOffset]):
    """One group's offsets of one topic by partition; partitions ascend.

    `notes` has metadata and topic id of the partitions that have metadata, or another topic id than the rest.
    """

    __slots__ = ("notes", "rows", "topic_id")

    def __init__(self, topic_id: bytes, rows: bytearray, notes: dict[int, tuple[str, bytes]] | None) -> None:
        self.topic_id = topic_id
        self.rows = rows
        self.notes = notes

    def __len__(self) -> int:
        return len(self.rows) // _ROW_BYTES

    def __iter__(self) -> Iterator[int]:
        return (row[0] for row in ROW.iter_unpack(self.rows))

    def __contains__(self, partition: object) -> bool:
        return isinstance(partition, int) and self._find(partition)[1]

    def __getitem__(self, partition: int) -> CommittedOffset:
        at, found = self._find(partition)
        if not found:
            raise KeyError(partition)
        return self._offset(*ROW.unpack_from(self.rows, at))

    def get(self, partition: int, default: object = None) -> CommittedOffset | None:  # type: ignore[override]
        at, found = self._find(partition)
        return self._offset(*ROW.unpack_from(self.rows, at)) if found else None

    def items(self) -> ItemsView[int, CommittedOffset]:
        offset = self._offset
        return {row[0]: offset(*row) for row in ROW.iter_unpack(self.rows)}.items()

    def values(self) -> ValuesView[CommittedOffset]:
        return dict(self.items()).values()

    def _offset(self, partition: int, leader_epoch: int, offset: int, committed: int, expires: int) -> CommittedOffset:
        metadata, topic_id = "", self.topic_id
        if self.notes is not None:
            metadata, topic_id = self.notes.get(partition, (metadata, topic_id))
        return CommittedOffset(offset, leader_epoch, metadata, committed, expires, topic_id)

    def is_dense(self) -> bool:
        """Whether the partitions are 0, 1, 2 and so on without a gap."""
        rows = self.rows
        return not rows or _PARTITION.unpack_from(rows, len(rows) - _ROW_BYTES)[0] == len(rows) // _ROW_BYTES - 1

    def _find(self, partition: int) -> tuple[int, bool]:
        """Where the row of a partition is, or would be. Most topics have every partition: it is at its own number."""
        rows = self.rows
        count = len(rows) // _ROW_BYTES
        number_at = _PARTITION.unpack_from
        if 0 <= partition < count and number_at(rows, partition * _ROW_BYTES)[0] == partition:
            return partition * _ROW_BYTES, True
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if number_at(rows, middle * _ROW_BYTES)[0] < partition:
                low = middle + 1
            else:
                high = middle
        at = low * _ROW_BYTES
        return at, low < count and number_at(rows, at)[0] == partition

    def put(
        self,
        partition: int,
        leader_epoch: int,
        offset: int,
        commit_timestamp_ms: int,
        expire_timestamp_ms: int,
        metadata: str,
        topic_id: bytes,
    ) -> None:
        """The last commit wins."""
        rows = self.rows
        at = len(rows)
        if at == 0 or _PARTITION.unpack_from(rows, at - _ROW_BYTES)[0] < partition:
            rows += ROW.pack(partition, leader_epoch, offset, commit_timestamp_ms, expire_timestamp_ms)
        else:
            at, found = self._find(partition)
            if found:
                ROW.pack_into(rows, at, partition, leader_epoch, offset, commit_timestamp_ms, expire_timestamp_ms)
            else:
                rows[at:at] = ROW.pack(partition, leader_epoch, offset, commit_timestamp_ms, expire_timestamp_ms)
        if len(rows) == _ROW_BYTES:
            self.topic_id, self.notes = topic_id, None
        if metadata or topic_id != self.topic_id:
            self.notes = self.notes or {}
            self.notes[partition] = metadata, topic_id
        elif self.notes is not None:
            self.notes.pop(partition, None)

    def remove(self, partition: int) -> None:
        at, found = self._find(partition)
        if found:
            del self.rows[at : at + _ROW_BYTES]
            if self.notes is not None:
                self.notes.pop(partition, None)


class CommittedOffsets:
    """All committed offsets of a shard: group -> topic -> partition -> offset; empty levels are dropped."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, TopicOffsets]] = {}

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        found = self._groups.get(group_id, {}).get(topic)
        return found.get(partition) if found is not None else None

    def of_group(self, group_id: str) -> Mapping[str, Mapping[int, CommittedOffset]]:
        return self._groups.get(group_id, {})

    def packed(self, group_id: str) -> Mapping[str, TopicOffsets]:
        """As `of_group`, in the form in which they are kept."""
        return self._groups.get(group_id, {})

    def of_topic(self, topic: str) -> Iterator[tuple[str, list[int]]]:
        """Group id and partitions of every group that has offsets of `topic`."""
        for group_id, topics in self._groups.items():
            if topic in topics:
                yield group_id, list(topics[topic])

    def group_ids(self) -> Iterator[str]:
        return iter(self._groups)

    def topic_for(self, group_id: str, topic: str) -> TopicOffsets:
        """What `put` puts into: made where it is missing, so something has to be put there."""
        topics = self._groups.get(group_id)
        if topics is None:
            topics = self._groups[group_id] = {}
        found = topics.get(topic)
        if found is None:
            found = topics[topic] = TopicOffsets(ZERO_UUID, bytearray(), None)
        return found

    def put(self, group_id: str, topic: str, partition: int, offset: CommittedOffset) -> None:
        self.topic_for(group_id, topic).put(
            partition,
            offset.leader_epoch,
            offset.offset,
            offset.commit_timestamp_ms,
            offset.expire_timestamp_ms,
            offset.metadata,
            offset.topic_id,
        )

    def put_topic(self, group_id: str, topic: str, offsets: TopicOffsets) -> None:
        """Takes over all offsets of a topic at once, in place of what was there."""
        self._groups.setdefault(group_id, {})[topic] = offsets

    def remove(self, group_id: str, topic: str, partition: int) -> None:
        topics = self._groups.get(group_id)
        found = topics.get(topic) if topics is not None else None
        if topics is None or found is None:
            return
        found.remove(partition)
        if not found.rows:
            del topics[topic]
            if not topics:
                del self._groups[group_id]
