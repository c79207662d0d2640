# SPDX-License-Identifier: Apache-2.0
"""Requests to the leaders of partitions: ListOffsets and DeleteRecords.

`list_offsets` and `delete_records` return a function that makes one attempt. The caller repeats it, with `repeat`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.connection import Connection
from kcoord.client.offset_messages import by_topic
from kcoord.client.results import outcome_of
from kcoord.client.types import ListOffsetsResult, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
)

V = TypeVar("V")

_CONSUMER_REPLICA_ID: Final = -1
# The version of ListOffsets that introduced each special timestamp. An older version would read it as a time.
_SPECIAL_TIMESTAMPS: Final = {-3: 7, -4: 8, -5: 9, -6: 11}

AskLeader = Callable[[Connection, list[TopicPartition]], Awaitable[Mapping[TopicPartition, V | KafkaError]]]


async def ask_leaders(
    cluster: Cluster, partitions: list[TopicPartition], ask: AskLeader[V]
) -> dict[TopicPartition, V | KafkaError]:
    """Sends one request to each leader, about all of its partitions.

    A retriable error drops the topic's metadata, so that the next attempt fetches it again.
    """
    unknown = {partition.topic for partition in partitions if cluster.metadata.leader(partition) is None}
    if unknown:
        await cluster.refresh_metadata(unknown)
    outcomes: dict[TopicPartition, V | KafkaError] = {}
    by_leader: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        leader = cluster.metadata.leader(partition)
        if leader is None:
            outcomes[partition] = _no_leader(cluster, partition)
        else:
            by_leader.setdefault(leader, []).append(partition)
    for leader, asked in by_leader.items():
        try:
            outcomes.update(await ask(await cluster.connection(leader), asked))
        except KafkaError as error:
            outcomes.update(dict.fromkeys(asked, error))
    for partition, outcome in outcomes.items():
        if isinstance(outcome, KafkaError) and outcome.error.retriable:
            cluster.metadata.topics.pop(partition.topic, None)
    return outcomes


def _no_leader(cluster: Cluster, partition: TopicPartition) -> KafkaError:
    topic = cluster.metadata.topics.get(partition.topic)
    if topic is not None and topic.error:
        return KafkaError(topic.error, str(partition))
    if topic is None or partition.partition not in topic.partitions:
        return KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, str(partition))
    return KafkaError(Errors.LEADER_NOT_AVAILABLE, str(partition))


def list_offsets(
    cluster: Cluster, deadline: Deadline, timestamps: Mapping[TopicPartition, int], *, read_committed: bool = False
) -> Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, ListOffsetsResult | KafkaError]]]:
    """Returns an attempt to look up offsets by timestamp. Negative timestamps are the special ones of ListOffsets."""
    lowest = max((_SPECIAL_TIMESTAMPS.get(timestamp, 1) for timestamp in timestamps.values()), default=1)

    async def ask(
        connection: Connection, asked: list[TopicPartition]
    ) -> Mapping[TopicPartition, ListOffsetsResult | KafkaError]:
        request = ListOffsetsRequest(
            replica_id=_CONSUMER_REPLICA_ID,
            isolation_level=int(read_committed),
            topics=[
                ListOffsetsRequest.ListOffsetsTopic(
                    name=name,
                    partitions=[
                        ListOffsetsRequest.ListOffsetsPartition(
                            partition_index=index,
                            current_leader_epoch=cluster.metadata.leader_epoch(TopicPartition(name, index)),
                            timestamp=timestamps[TopicPartition(name, index)],
                        )
                        for index in indexes
                    ],
                )
                for name, indexes in by_topic(asked).items()
            ],
            timeout_ms=max(int(deadline.left_ms()), 1),
        )
        response = await connection.call(request, ListOffsetsResponse, lowest=lowest)
        return {
            TopicPartition(topic.name, partition.partition_index): outcome_of(
                partition.error_code,
                None,
                ListOffsetsResult(partition.offset, partition.timestamp, partition.leader_epoch),
            )
            for topic in response.topics
            for partition in topic.partitions
        }

    async def attempt(pending: list[TopicPartition]) -> Mapping[TopicPartition, ListOffsetsResult | KafkaError]:
        return await ask_leaders(cluster, pending, ask)

    return attempt


def delete_records(
    cluster: Cluster, deadline: Deadline, before: Mapping[TopicPartition, int]
) -> Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, int | KafkaError]]]:
    """Returns an attempt to delete the records before an offset. Its results are the new first offsets."""

    async def ask(connection: Connection, asked: list[TopicPartition]) -> Mapping[TopicPartition, int | KafkaError]:
        request = DeleteRecordsRequest(
            topics=[_records_of(name, indexes, before) for name, indexes in by_topic(asked).items()],
            timeout_ms=max(int(deadline.left_ms()), 1),
        )
        response = await connection.call(request, DeleteRecordsResponse)
        return {
            TopicPartition(topic.name, partition.partition_index): outcome_of(
                partition.error_code, None, partition.low_watermark
            )
            for topic in response.topics
            for partition in topic.partitions
        }

    async def attempt(pending: list[TopicPartition]) -> Mapping[TopicPartition, int | KafkaError]:
        return await ask_leaders(cluster, pending, ask)

    return attempt


def _records_of(
    name: str, indexes: Iterable[int], before: Mapping[TopicPartition, int]
) -> DeleteRecordsRequest.DeleteRecordsTopic:
    return DeleteRecordsRequest.DeleteRecordsTopic(
        name=name,
        partitions=[
            DeleteRecordsRequest.DeleteRecordsPartition(
                partition_index=index, offset=before[TopicPartition(name, index)]
            )
            for index in indexes
        ],
    )
