# SPDX-License-Identifier: Apache-2.0
"""DescribeTopicPartitions (KIP-966): topics in the order of their names, a limited number of partitions at a time.

The cursor names the first partition of the next answer. As observed in Kafka 4.3.1: a limit below 1 acts as 1, unknown
topics do not count, and a cursor that names a topic which was not asked for fails every topic.
"""

from __future__ import annotations

from collections.abc import Collection

from kcoord.metadata.image import PartitionImage
from kcoord.metadata.names import topic_name_problem
from kcoord.metadata.records import NO_LEADER
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import TOPIC_OPERATIONS
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import INTERNAL_TOPICS
from kcoord_protocol.messages import DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse

API_KEY = ApiKey.DESCRIBE_TOPIC_PARTITIONS
VERSIONS = range(0, 2)

Topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic
Partition = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponsePartition


def handle(
    broker: Broker, context: RequestContext, request: DescribeTopicPartitionsRequest
) -> DescribeTopicPartitionsResponse:
    cursor = request.cursor
    names = _names_from_cursor(broker, request)
    room = max(min(request.response_partition_limit, broker.config.max_request_partition_size_limit), 1)
    response = DescribeTopicPartitionsResponse()
    away = broker.image.fenced_brokers()
    for name in names:
        if room == 0:
            response.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=0)
            break
        image = broker.image.topics.get(name)
        if image is None:
            response.topics.append(_missing(name))
            continue
        first = cursor.partition_index if cursor is not None and cursor.topic_name == name else 0
        end = min(first + room, len(image.partitions))
        partitions = [_partition(partition, away) for partition in image.partitions[first:end]]
        response.topics.append(
            Topic(
                name=name,
                topic_id=image.id,
                is_internal=image.internal,
                partitions=partitions,
                topic_authorized_operations=TOPIC_OPERATIONS,
            )
        )
        if end < len(image.partitions):
            response.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=end)
            break
        room -= len(partitions)
    return response


def _names_from_cursor(broker: Broker, request: DescribeTopicPartitionsRequest) -> list[str]:
    """The topics that are left, in order; without names in the request all that there are."""
    cursor = request.cursor
    start = "" if cursor is None else cursor.topic_name
    asked = {topic.name for topic in request.topics} if request.topics else broker.image.topics.keys()
    names = sorted(name for name in asked if name >= start)
    if cursor is not None:
        if request.topics and cursor.topic_name not in asked:
            raise KafkaError(Errors.INVALID_REQUEST, f"The cursor is at {start!r}, which is not among the topics.")
        if cursor.partition_index < 0:
            raise KafkaError(Errors.INVALID_REQUEST, f"The cursor is at partition {cursor.partition_index}.")
    return names


def _missing(name: str) -> Topic:
    illegal = topic_name_problem(name) is not None
    return Topic(
        error_code=Errors.INVALID_TOPIC_EXCEPTION if illegal else Errors.UNKNOWN_TOPIC_OR_PARTITION,
        name=name,
        is_internal=name in INTERNAL_TOPICS,
        topic_authorized_operations=TOPIC_OPERATIONS,
    )


def _partition(partition: PartitionImage, away: Collection[int]) -> Partition:
    return Partition(
        error_code=Errors.LEADER_NOT_AVAILABLE if partition.leader == NO_LEADER else Errors.NONE,
        partition_index=partition.partition_id,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.isr,
        offline_replicas=[one for one in partition.replicas if one in away] if away else [],
        eligible_leader_replicas=[],
        last_known_elr=[],
        creation_time_ms=partition.creation_time_ms,
    )


def error_response(
    request: DescribeTopicPartitionsRequest, error: KafkaError, version: int
) -> DescribeTopicPartitionsResponse:
    return DescribeTopicPartitionsResponse(
        topics=[Topic(error_code=error.error, name=topic.name) for topic in request.topics]
    )
