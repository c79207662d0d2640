# SPDX-License-Identifier: Apache-2.0
"""DescribeTopicPartitions (KIP-966).

The response has topics in the order of their names, with a limited number of partitions.

The cursor names the first partition of the next response. Observed in Kafka 4.3.1: a limit below 1 acts as 1, unknown
topics do not count towards it, and every topic fails if the cursor names a topic that the request does not name.
"""

from __future__ import annotations

from collections.abc import Collection

from kcoord.metadata.image import PartitionImage
from kcoord.metadata.names import topic_name_problem
from kcoord.metadata.records import NO_LEADER
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import operations_on
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation, ResourceType
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
    refused: list[Topic] = []
    if context.rights is not None:
        logs_denial = bool(request.topics)
        allowed = context.rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names, logs_denial=logs_denial)
        if request.topics:
            error = Errors.TOPIC_AUTHORIZATION_FAILED
            refused = [Topic(error_code=error, name=name) for name in names if name not in allowed]
        names = [name for name in names if name in allowed]
    room = max(min(request.response_partition_limit, broker.config.max_request_partition_size_limit), 1)
    response = DescribeTopicPartitionsResponse()
    away = broker.image.fenced_brokers()
    for name in names:
        if room == 0:
            response.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=0)
            break
        image = broker.image.topics.get(name)
        if image is None:
            response.topics.append(_missing(name, operations_on(context.rights, ResourceType.TOPIC, name)))
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
                topic_authorized_operations=operations_on(context.rights, ResourceType.TOPIC, name),
            )
        )
        if end < len(image.partitions):
            response.next_cursor = DescribeTopicPartitionsResponse.Cursor(topic_name=name, partition_index=end)
            break
        room -= len(partitions)
    response.topics += refused
    return response


def _names_from_cursor(broker: Broker, request: DescribeTopicPartitionsRequest) -> list[str]:
    """Returns the names of the remaining topics in order. A request without names asks for all topics."""
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


def _missing(name: str, operations: int) -> Topic:
    illegal = topic_name_problem(name) is not None
    return Topic(
        error_code=Errors.INVALID_TOPIC_EXCEPTION if illegal else Errors.UNKNOWN_TOPIC_OR_PARTITION,
        name=name,
        is_internal=name in INTERNAL_TOPICS,
        topic_authorized_operations=operations,
    )


def _partition(partition: PartitionImage, away: Collection[int]) -> Partition:
    return Partition(
        error_code=Errors.LEADER_NOT_AVAILABLE if partition.leader == NO_LEADER else Errors.NONE,
        partition_index=partition.partition_id,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.isr,
        offline_replicas=[replica for replica in partition.replicas if replica in away] if away else [],
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
