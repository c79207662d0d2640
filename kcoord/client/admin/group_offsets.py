# SPDX-License-Identifier: Apache-2.0
"""Committed offsets of groups: list, alter and delete them (KIP-496).

An error of a group is the error of each of its partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kcoord.client.admin.groups import ask_coordinators
from kcoord.client.cluster import Cluster, CoordinatorType, Deadline
from kcoord.client.connection import Connection
from kcoord.client.offset_messages import (
    LAST_VERSION_WITH_NAMES,
    OffsetsOrError,
    by_topic,
    commit_error_codes,
    commit_topics,
    fetched_offsets,
)
from kcoord.client.repeat import repeat
from kcoord.client.results import Results, error_of, outcome_of
from kcoord.client.types import Node, Offsets, TopicPartition
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

_FIRST_VERSION_WITH_GROUPS: Final = 8
_FIRST_VERSION_WITH_ALL: Final = 2


class DeleteConsumerGroupOffsetsResult:
    """The outcome of deleting committed offsets, per partition and as a whole (KIP-496)."""

    def __init__(self, outcomes: Mapping[TopicPartition, KafkaError | None]) -> None:
        self._results: Results[TopicPartition, None] = Results(outcomes)

    @property
    def results(self) -> Results[TopicPartition, None]:
        """The result of each partition."""
        return self._results

    def partition_result(self, partition: TopicPartition) -> None:
        """Returns if the partition's offset was deleted; raises its error otherwise.

        Raises ValueError if the call did not name the partition.
        """
        if partition not in self._results:
            raise ValueError(f"{partition} was not among the partitions whose offsets were to be deleted")
        return self._results[partition]

    def all(self) -> None:
        """Returns if all offsets were deleted; raises the first error otherwise."""
        self._results.all()


async def list_group_offsets(
    cluster: Cluster,
    deadline: Deadline,
    partitions_by_group: Mapping[str, Iterable[TopicPartition] | None],
    require_stable: bool,
) -> dict[str, OffsetsOrError]:
    topics = {
        group_id: None if partitions is None else by_topic(partitions)
        for group_id, partitions in partitions_by_group.items()
    }

    async def ask(connection: Connection, _: Node, asked: list[str]) -> Mapping[str, OffsetsOrError]:
        version = connection.versions.choose(OffsetFetchRequest, highest=LAST_VERSION_WITH_NAMES)
        if version < _FIRST_VERSION_WITH_GROUPS:
            answers = [
                await _fetch_single(connection, version, group_id, topics[group_id], require_stable)
                for group_id in asked
            ]
        else:
            request = OffsetFetchRequest(
                groups=[_fetch_group(group_id, topics[group_id]) for group_id in asked], require_stable=require_stable
            )
            answers = (await connection.call_version(request, OffsetFetchResponse, version)).groups
        return {answer.group_id: fetched_offsets(answer) for answer in answers}

    async def attempt(pending: list[str]) -> Mapping[str, OffsetsOrError]:
        return await ask_coordinators(cluster, pending, ask)

    return await repeat(cluster, deadline, topics, attempt)


def _fetch_group(group_id: str, topics: dict[str, list[int]] | None) -> OffsetFetchRequest.OffsetFetchRequestGroup:
    asked = None
    if topics is not None:
        asked = [
            OffsetFetchRequest.OffsetFetchRequestTopics(name=name, partition_indexes=partitions)
            for name, partitions in topics.items()
        ]
    return OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=asked)


async def _fetch_single(
    connection: Connection, version: int, group_id: str, topics: dict[str, list[int]] | None, require_stable: bool
) -> OffsetFetchResponse.OffsetFetchResponseGroup:
    """Fetches the offsets of one group: up to v7 a request has one group. Returns them in the form of v8."""
    asked = None
    if topics is not None:
        asked = [
            OffsetFetchRequest.OffsetFetchRequestTopic(name=name, partition_indexes=partitions)
            for name, partitions in topics.items()
        ]
    request = OffsetFetchRequest(group_id=group_id, topics=asked)
    if version >= 7:
        request.require_stable = require_stable
    answer = await connection.call_version(request, OffsetFetchResponse, max(version, _FIRST_VERSION_WITH_ALL))
    return OffsetFetchResponse.OffsetFetchResponseGroup(
        group_id=group_id,
        error_code=answer.error_code,
        topics=[
            OffsetFetchResponse.OffsetFetchResponseTopics(
                name=topic.name,
                partitions=[
                    OffsetFetchResponse.OffsetFetchResponsePartitions(
                        partition_index=partition.partition_index,
                        committed_offset=partition.committed_offset,
                        committed_leader_epoch=partition.committed_leader_epoch,
                        metadata=partition.metadata,
                        error_code=partition.error_code,
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in answer.topics
        ],
    )


async def alter_group_offsets(
    cluster: Cluster, deadline: Deadline, group_id: str, offsets: Offsets
) -> dict[TopicPartition, KafkaError | None]:
    """Sends an OffsetCommit without a member. Only an empty or unknown group accepts it.

    A group with members returns UNKNOWN_MEMBER_ID.
    """

    async def attempt(pending: list[TopicPartition]) -> Mapping[TopicPartition, KafkaError | None]:
        request = OffsetCommitRequest(
            group_id=group_id,
            topics=commit_topics({partition: offsets[partition] for partition in pending}),
        )
        response = await cluster.call_coordinator(
            CoordinatorType.GROUP,
            group_id,
            request,
            OffsetCommitResponse,
            commit_error_codes,
            highest=LAST_VERSION_WITH_NAMES,
        )
        return {
            TopicPartition(topic.name, partition.partition_index): outcome_of(partition.error_code, None, None)
            for topic in response.topics
            for partition in topic.partitions
        }

    return await repeat(cluster, deadline, offsets, attempt)


async def delete_group_offsets(
    cluster: Cluster, deadline: Deadline, group_id: str, partitions: Iterable[TopicPartition]
) -> DeleteConsumerGroupOffsetsResult:
    async def attempt(pending: list[TopicPartition]) -> Mapping[TopicPartition, KafkaError | None]:
        request = OffsetDeleteRequest(
            group_id=group_id,
            topics=[
                OffsetDeleteRequest.OffsetDeleteRequestTopic(
                    name=name,
                    partitions=[
                        OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=index) for index in indexes
                    ],
                )
                for name, indexes in by_topic(pending).items()
            ],
        )
        response = await cluster.call_coordinator(
            CoordinatorType.GROUP, group_id, request, OffsetDeleteResponse, lambda answer: [answer.error_code]
        )
        if response.error_code:
            return dict.fromkeys(pending, KafkaError(error_of(response.error_code)))
        return {
            TopicPartition(topic.name, partition.partition_index): outcome_of(partition.error_code, None, None)
            for topic in response.topics
            for partition in topic.partitions
        }

    return DeleteConsumerGroupOffsetsResult(await repeat(cluster, deadline, partitions, attempt))
