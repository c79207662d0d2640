# SPDX-License-Identifier: Apache-2.0
"""The parts of OffsetCommit and OffsetFetch that the consumer and the admin client share. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kcoord.client.results import error_of
from kcoord.client.types import OffsetAndMetadata, Offsets, TopicPartition
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse, OffsetFetchResponse

GroupOffsets = dict[TopicPartition, OffsetAndMetadata | None]
OffsetsOrError = GroupOffsets | KafkaError

LAST_VERSION_WITH_NAMES: Final = 9
"""From v10 OffsetCommit and OffsetFetch name topics by id, which is of no use where a person gave names."""

LAST_TXN_VERSION_WITH_NAMES: Final = 5
"""TxnOffsetCommit names topics by id from v6 on."""


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[int]]:
    """Sorted, as requests group them."""
    topics: dict[str, list[int]] = {}
    for topic, partition in sorted(set(partitions)):
        topics.setdefault(topic, []).append(partition)
    return topics


def fetched_offsets(group: OffsetFetchResponse.OffsetFetchResponseGroup) -> OffsetsOrError:
    """The group's offsets, None for a partition without one; the first error is that of all, so that none is missed."""
    if group.error_code:
        return KafkaError(error_of(group.error_code))
    offsets: GroupOffsets = {}
    for topic in group.topics:
        for each in topic.partitions:
            if each.error_code:
                return KafkaError(error_of(each.error_code), f"{topic.name}-{each.partition_index}")
            found = None
            if each.committed_offset >= 0:
                found = OffsetAndMetadata(each.committed_offset, each.metadata or "", each.committed_leader_epoch)
            offsets[TopicPartition(topic.name, each.partition_index)] = found
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
    return [each.error_code for topic in response.topics for each in topic.partitions]
