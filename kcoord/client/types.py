# SPDX-License-Identifier: Apache-2.0
"""The parameters and results of the clients. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kcoord_protocol.batch_header import TimestampType

NO_LEADER_EPOCH = -1
HIGHEST_OFFSET = (1 << 63) - 1


class TopicPartition(NamedTuple):
    """A partition by topic name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicIdPartition(NamedTuple):
    """A partition by topic id. A topic that was deleted and created again has another id."""

    topic_id: bytes
    partition: int


class OffsetAndMetadata(NamedTuple):
    """A committed offset of a group: the offset of the next record to read, with metadata and leader epoch."""

    offset: int
    metadata: str = ""
    leader_epoch: int = NO_LEADER_EPOCH


class OffsetAndTimestamp(NamedTuple):
    """The offset and timestamp of a record, as `offsets_for_times` returns them."""

    offset: int
    timestamp_ms: int
    leader_epoch: int = NO_LEADER_EPOCH


@dataclass(slots=True)
class ConsumerRecord:
    """A record that the consumer read."""

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
        """The partition that the record was read from."""
        return TopicPartition(self.topic, self.partition)


class RecordMetadata(NamedTuple):
    """The partition and offset of a produced record. The offset is None with `acks=0`, which has no response."""

    topic: str
    partition: int
    offset: int | None
    timestamp_ms: int


class ListOffsetsResult(NamedTuple):
    """The result of ListOffsets for a partition. Offset -1 means that no record is at or after the time."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class ConsumerGroupMetadata(NamedTuple):
    """The group and the member that a producer needs to commit offsets for a consumer within a transaction."""

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
