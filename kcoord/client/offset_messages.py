# SPDX-License-Identifier: Apache-2.0
"""Builds and reads OffsetCommit and OffsetFetch messages, for the consumer and the admin client. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kcoord.client.results import error_of
from kcoord.client.types import HIGHEST_OFFSET, OffsetAndMetadata, Offsets, TopicPartition
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse, OffsetFetchResponse

GroupOffsets = dict[TopicPartition, OffsetAndMetadata | None]
OffsetsOrError = GroupOffsets | KafkaError

LAST_VERSION_WITH_NAMES: Final = 9
"""From v10 on OffsetCommit and OffsetFetch identify topics by id. The callers of this client give names."""

LAST_TXN_VERSION_WITH_NAMES: Final = 5
"""TxnOffsetCommit identifies topics by id from v6 on."""


def offsets_to_commit(
    offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Returns the offsets with their metadata. Raises ValueError for a number that is not an offset.

    A coordinator stores a negative offset, and then returns that there is none.
    """
    checked = {
        TopicPartition(*partition): OffsetAndMetadata(offset) if isinstance(offset, int) else offset
        for partition, offset in offsets.items()
    }
    for partition, committed in checked.items():
        if not 0 <= committed.offset <= HIGHEST_OFFSET:
            raise ValueError(f"offset of {partition}: {committed.offset} is not from 0 to {HIGHEST_OFFSET}")
    return checked


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Groups partitions by topic, sorted and without duplicates."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(set(partitions)):
        topics.setdefault(topic, []).append(partition)
    return topics


def fetched_offsets(group: OffsetFetchResponse.OffsetFetchResponseGroup) -> OffsetsOrError:
    """Returns the committed offsets of a group, None for a partition without one.

    Returns the first error of a partition as the error of the group, so that a caller cannot overlook it.
    """
    if group.error_code:
        return KafkaError(error_of(group.error_code))
    offsets: GroupOffsets = {}
    for topic in group.topics:
        for partition in topic.partitions:
            if partition.error_code:
                return KafkaError(error_of(partition.error_code), f"{topic.name}-{partition.partition_index}")
            committed = None
            if partition.committed_offset >= 0:
                committed = OffsetAndMetadata(
                    partition.committed_offset, partition.metadata or "", partition.committed_leader_epoch
                )
            offsets[TopicPartition(topic.name, partition.partition_index)] = committed
    return offsets


def commit_topics(offsets: Offsets) -> list[OffsetCommitRequest.OffsetCommitRequestTopic]:
    return [
        OffsetCommitRequest.OffsetCommitRequestTopic(
            name=name,
            partitions=[
                OffsetCommitRequest.OffsetCommitRequestPartition(
                    partition_index=index,
                    committed_offset=offsets[TopicPartition(name, index)].offset,
                    committed_leader_epoch=offsets[TopicPartition(name, index)].leader_epoch,
                    committed_metadata=offsets[TopicPartition(name, index)].metadata,
                )
                for index in indexes
            ],
        )
        for name, indexes in by_topic(offsets).items()
    ]


def commit_error_codes(response: OffsetCommitResponse) -> list[int]:
    return [partition.error_code for topic in response.topics for partition in topic.partitions]
