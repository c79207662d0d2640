# SPDX-License-Identifier: Apache-2.0
"""Requests to the leaders of partitions: ListOffsets, DeleteRecords, Fetch and DescribeProducers.

Each function returns a function that makes one attempt. The caller repeats it, such as with `repeat`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from kcoord.client.cluster import Cluster, Deadline, Purpose
from kcoord.client.connection import Connection
from kcoord.client.errors import ThrottledException
from kcoord.client.offset_messages import by_topic
from kcoord.client.results import error_of, outcome_of
from kcoord.client.types import ListOffsetsResult, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
)
from kcoord_protocol.uuid import ZERO_UUID

V = TypeVar("V")
ActiveProducers = list[DescribeProducersResponse.ProducerState]

_CONSUMER_REPLICA_ID: Final = -1
_FIRST_FETCH_WITH_TOPIC_IDS: Final = 13
# The version of ListOffsets that introduced each special timestamp. An older version would read it as a time.
_SPECIAL_TIMESTAMPS: Final = {-3: 7, -4: 8, -5: 9, -6: 11}

AskLeader = Callable[[Connection, list[TopicPartition]], Awaitable[Mapping[TopicPartition, V | KafkaError]]]


async def ask_leaders(
    cluster: Cluster, partitions: list[TopicPartition], ask: AskLeader[V], purpose: Purpose = Purpose.REQUESTS
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
            outcomes.update(await ask(await cluster.connection(leader, purpose), asked))
        except KafkaError as error:
            outcomes.update(dict.fromkeys(asked, error))
    for partition, outcome in outcomes.items():
        if isinstance(outcome, KafkaError) and outcome.error.retriable:
            cluster.metadata.topics.pop(partition.topic, None)
    return outcomes


def _no_leader(cluster: Cluster, partition: TopicPartition) -> KafkaError:
    error = cluster.metadata.topic_error(partition.topic)
    if not error:
        is_known = cluster.metadata.partition(partition) is not None
        error = Errors.LEADER_NOT_AVAILABLE if is_known else Errors.UNKNOWN_TOPIC_OR_PARTITION
    return KafkaError(error, str(partition))


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


def fetch_batches(
    cluster: Cluster, offset: int, max_bytes: int, topic_id: bytes = ZERO_UUID
) -> Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, FetchResponse.PartitionData | KafkaError]]]:
    """Returns an attempt to fetch the batches of one partition from an offset on, as bytes.

    The fetch is read_uncommitted, so it has all batches up to the high watermark, control batches too.
    OFFSET_OUT_OF_RANGE is a result, not an error. With a topic id the broker returns UNKNOWN_TOPIC_ID if the topic was
    created again. If a quota throttles the client, the response has no partition, and the error is
    ThrottledException.
    """

    async def ask(
        connection: Connection, asked: list[TopicPartition]
    ) -> Mapping[TopicPartition, FetchResponse.PartitionData | KafkaError]:
        (partition,) = asked
        asked_partition = FetchRequest.FetchPartition(
            partition=partition.partition, fetch_offset=offset, partition_max_bytes=max_bytes
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=max_bytes,
            topics=[FetchRequest.FetchTopic(topic=partition.topic, topic_id=topic_id, partitions=[asked_partition])],
        )
        by_name = topic_id == ZERO_UUID
        lowest, highest = (0, _FIRST_FETCH_WITH_TOPIC_IDS - 1) if by_name else (_FIRST_FETCH_WITH_TOPIC_IDS, None)
        response = await connection.call(request, FetchResponse, lowest=lowest, highest=highest)
        if response.error_code:
            return {partition: KafkaError(error_of(response.error_code), f"reading {partition}")}
        fetched = [data for topic in response.responses for data in topic.partitions]
        if not fetched:
            return {partition: ThrottledException(response.throttle_time_ms, f"reading {partition}")}
        if fetched[0].error_code == Errors.OFFSET_OUT_OF_RANGE:
            return {partition: fetched[0]}
        return {partition: outcome_of(fetched[0].error_code, f"reading {partition}", fetched[0])}

    async def attempt(
        pending: list[TopicPartition],
    ) -> Mapping[TopicPartition, FetchResponse.PartitionData | KafkaError]:
        return await ask_leaders(cluster, pending, ask, Purpose.FETCHES)

    return attempt


def describe_producers(
    cluster: Cluster,
) -> Callable[
    [list[TopicPartition]],
    Awaitable[Mapping[TopicPartition, ActiveProducers | KafkaError]],
]:
    """Returns an attempt to look up the active producers of partitions, with their open transactions (KIP-664)."""

    async def ask(
        connection: Connection, asked: list[TopicPartition]
    ) -> Mapping[TopicPartition, ActiveProducers | KafkaError]:
        request = DescribeProducersRequest(
            topics=[
                DescribeProducersRequest.TopicRequest(name=name, partition_indexes=indexes)
                for name, indexes in by_topic(asked).items()
            ]
        )
        response = await connection.call(request, DescribeProducersResponse)
        return {
            TopicPartition(topic.name, partition.partition_index): outcome_of(
                partition.error_code, partition.error_message, partition.active_producers
            )
            for topic in response.topics
            for partition in topic.partitions
        }

    async def attempt(
        pending: list[TopicPartition],
    ) -> Mapping[TopicPartition, ActiveProducers | KafkaError]:
        return await ask_leaders(cluster, pending, ask)

    return attempt
