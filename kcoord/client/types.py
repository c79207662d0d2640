# SPDX-License-Identifier: Apache-2.0
"""The values that the client's methods take and return. Plain data; a time or an offset that is unknown is None."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kcoord_protocol.batch_header import TimestampType

NO_LEADER_EPOCH = -1


class TopicPartition(NamedTuple):
    """A partition by topic name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicIdPartition(NamedTuple):
    """A partition by topic id: a topic that was deleted and made again is another one."""

    topic_id: bytes
    partition: int


class OffsetAndMetadata(NamedTuple):
    """What a group commits for a partition: the offset of the next record to read."""

    offset: int
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH


class OffsetAndTimestamp(NamedTuple):
    """A record's place and time, as found by a look-up by time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = NO_LEADER_EPOCH


@dataclass(slots=True)
class ConsumerRecord:
    """A record as it was read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: TimestampType
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    leader_epoch: int = NO_LEADER_EPOCH

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


class RecordMetadata(NamedTuple):
    """Where a produced record was stored; the offset is None with `acks=0`, which is never answered."""

    topic: str
    partition: int
    offset: int | None
    timestamp_ms: int


class ListOffsetsResult(NamedTuple):
    """What a look-up found: offset -1 means that no record is that new."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class ConsumerGroupMetadata(NamedTuple):
    """Who commits: what a producer needs to commit offsets for a consumer within a transaction."""

    group_id: str
    member_id: str = ""
    member_epoch: int = -1
    group_instance_id: str | None = None


class Node(NamedTuple):
    """A broker's address."""

    node_id: int
    host: str
    port: int
    rack: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port} (id {self.node_id})"


Offsets = Mapping[TopicPartition, OffsetAndMetadata]
