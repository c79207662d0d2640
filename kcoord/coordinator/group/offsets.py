# SPDX-License-Identifier: Apache-2.0
"""Committed offsets: the last record per (group, topic, partition). Only the shard's replay changes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from protocol.uuid import ZERO_UUID


@dataclass(slots=True)
class CommittedOffset:
    """One committed offset. `expire_timestamp_ms` is -1 but where an old client sent its own retention (KIP-211)."""

    offset: int
    leader_epoch: int
    metadata: str
    commit_timestamp_ms: int
    expire_timestamp_ms: int = -1
    topic_id: bytes = ZERO_UUID


class CommittedOffsets:
    """All committed offsets of a shard: group -> topic -> partition -> offset; empty levels are dropped."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, dict[int, CommittedOffset]]] = {}

    def get(self, group_id: str, topic: str, partition: int) -> CommittedOffset | None:
        return self._groups.get(group_id, {}).get(topic, {}).get(partition)

    def of_group(self, group_id: str) -> Mapping[str, Mapping[int, CommittedOffset]]:
        return self._groups.get(group_id, {})

    def of_topic(self, topic: str) -> Iterator[tuple[str, list[int]]]:
        """Group id and partitions of every group that has offsets of `topic`."""
        for group_id, topics in self._groups.items():
            if topic in topics:
                yield group_id, sorted(topics[topic])

    def group_ids(self) -> Iterator[str]:
        return iter(self._groups)

    def put(self, group_id: str, topic: str, partition: int, offset: CommittedOffset) -> None:
        self._groups.setdefault(group_id, {}).setdefault(topic, {})[partition] = offset

    def remove(self, group_id: str, topic: str, partition: int) -> None:
        topics = self._groups.get(group_id)
        partitions = topics.get(topic) if topics is not None else None
        if topics is None or partitions is None:
            return
        partitions.pop(partition, None)
        if not partitions:
            del topics[topic]
            if not topics:
                del self._groups[group_id]
