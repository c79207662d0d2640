# SPDX-License-Identifier: Apache-2.0
"""Topics and the cluster: create and delete topics, add partitions, list and describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcoord.client.admin.model import (
    ClusterDescription,
    CreatedTopic,
    NewPartitions,
    NewTopic,
    TopicDescription,
    TopicListing,
    TopicPartitionInfo,
    authorized_operations,
    known_time,
)
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord.client.types import Node
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kcoord_protocol.uuid import ZERO_UUID

PARTITIONS_PER_PAGE = 2000


def _timeout_ms(deadline: Deadline) -> int:
    return max(int(deadline.left_ms()), 1)


async def create_topics(
    cluster: Cluster, deadline: Deadline, topics: Iterable[NewTopic], validate_only: bool
) -> dict[str, CreatedTopic | KafkaError]:
    by_name = {topic.name: topic for topic in topics}

    async def attempt(names: list[str]) -> Mapping[str, CreatedTopic | KafkaError]:
        request = CreateTopicsRequest(
            topics=[_creatable(by_name[name]) for name in names],
            timeout_ms=_timeout_ms(deadline),
            validate_only=validate_only,
        )
        response = await cluster.call_controller(request, CreateTopicsResponse)
        return {
            topic.name: outcome_of(topic.error_code, topic.error_message, _created(topic)) for topic in response.topics
        }

    return await repeat(cluster, deadline, by_name, attempt)


def _creatable(topic: NewTopic) -> CreateTopicsRequest.CreatableTopic:
    assignments = [
        CreateTopicsRequest.CreatableReplicaAssignment(partition_index=index, broker_ids=list(brokers))
        for index, brokers in sorted(topic.assignments.items())
    ]
    return CreateTopicsRequest.CreatableTopic(
        name=topic.name,
        num_partitions=-1 if assignments else topic.num_partitions,
        replication_factor=-1 if assignments else topic.replication_factor,
        assignments=assignments,
        configs=[
            CreateTopicsRequest.CreatableTopicConfig(name=name, value=value) for name, value in topic.configs.items()
        ],
    )


def _created(topic: CreateTopicsResponse.CreatableTopicResult) -> CreatedTopic:
    return CreatedTopic(
        topic.name,
        topic.topic_id,
        topic.num_partitions if topic.num_partitions >= 0 else None,
        topic.replication_factor if topic.replication_factor >= 0 else None,
        {config.name: config.value for config in topic.configs} if topic.configs else None,
    )


async def delete_topics(cluster: Cluster, deadline: Deadline, names: Iterable[str]) -> dict[str, KafkaError | None]:
    async def attempt(pending: list[str]) -> Mapping[str, KafkaError | None]:
        request = DeleteTopicsRequest(
            topics=[DeleteTopicsRequest.DeleteTopicState(name=name) for name in pending],
            timeout_ms=_timeout_ms(deadline),
        )
        connection = await cluster.any_connection()
        if not connection.versions.offers(ApiKey.DELETE_TOPICS, 6):
            request = DeleteTopicsRequest(topic_names=pending, timeout_ms=_timeout_ms(deadline))
        response = await cluster.call_controller(request, DeleteTopicsResponse)
        return {
            result.name: outcome_of(result.error_code, result.error_message, None)
            for result in response.responses
            if result.name is not None
        }

    return await repeat(cluster, deadline, names, attempt)


async def create_partitions(
    cluster: Cluster, deadline: Deadline, new_partitions: Mapping[str, NewPartitions], validate_only: bool
) -> dict[str, KafkaError | None]:
    async def attempt(names: list[str]) -> Mapping[str, KafkaError | None]:
        request = CreatePartitionsRequest(
            topics=[_growing(name, new_partitions[name]) for name in names],
            timeout_ms=_timeout_ms(deadline),
            validate_only=validate_only,
        )
        response = await cluster.call_controller(request, CreatePartitionsResponse)
        return {result.name: outcome_of(result.error_code, result.error_message, None) for result in response.results}

    return await repeat(cluster, deadline, new_partitions, attempt)


def _growing(name: str, new_partitions: NewPartitions) -> CreatePartitionsRequest.CreatePartitionsTopic:
    assignments = None
    if new_partitions.assignments is not None:
        assignments = [
            CreatePartitionsRequest.CreatePartitionsAssignment(broker_ids=list(brokers))
            for brokers in new_partitions.assignments
        ]
    return CreatePartitionsRequest.CreatePartitionsTopic(
        name=name, count=new_partitions.total_count, assignments=assignments
    )


async def list_topics(cluster: Cluster, include_internal: bool) -> list[TopicListing]:
    response = await cluster.refresh_metadata(None)
    return sorted(
        (
            TopicListing(topic.name, topic.topic_id, topic.is_internal)
            for topic in response.topics
            if topic.name is not None and (include_internal or not topic.is_internal)
        ),
        key=lambda topic: topic.name,
    )


async def describe_cluster(cluster: Cluster, include_authorized_operations: bool) -> ClusterDescription:
    request = DescribeClusterRequest(include_cluster_authorized_operations=include_authorized_operations)
    response = await cluster.call_any(request, DescribeClusterResponse)
    if response.error_code:
        raise KafkaError(error_of(response.error_code), response.error_message)
    nodes = {
        broker.broker_id: Node(broker.broker_id, broker.host, broker.port, broker.rack) for broker in response.brokers
    }
    return ClusterDescription(
        response.cluster_id,
        nodes.get(response.controller_id),
        [nodes[node_id] for node_id in sorted(nodes)],
        authorized_operations(response.cluster_authorized_operations),
    )


async def describe_topics(
    cluster: Cluster, deadline: Deadline, names: Iterable[str], partitions_per_page: int
) -> dict[str, TopicDescription | KafkaError]:
    """Describes topics page by page with DescribeTopicPartitions, or with Metadata if the broker does not have it."""

    async def attempt(pending: list[str]) -> Mapping[str, TopicDescription | KafkaError]:
        await cluster.refresh_metadata(())
        connection = await cluster.any_connection()
        if connection.versions.offers(ApiKey.DESCRIBE_TOPIC_PARTITIONS):
            return await _describe_by_page(cluster, sorted(pending), partitions_per_page)
        return await _describe_by_metadata(cluster, pending)

    return await repeat(cluster, deadline, names, attempt)


async def describe_topic_ids(
    cluster: Cluster, deadline: Deadline, topic_ids: Iterable[bytes]
) -> dict[bytes, TopicDescription | KafkaError]:
    async def attempt(pending: list[bytes]) -> Mapping[bytes, TopicDescription | KafkaError]:
        response = await cluster.refresh_topic_ids(pending)
        return {
            topic.topic_id: outcome_of(topic.error_code, None, _from_metadata(cluster, topic.name or "", topic))
            for topic in response.topics
        }

    return await repeat(cluster, deadline, topic_ids, attempt)


async def _describe_by_page(
    cluster: Cluster, names: list[str], partitions_per_page: int
) -> dict[str, TopicDescription | KafkaError]:
    descriptions: dict[str, TopicDescription | KafkaError] = {}
    cursor: DescribeTopicPartitionsRequest.Cursor | None = None
    while True:
        request = DescribeTopicPartitionsRequest(
            topics=[DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in names],
            response_partition_limit=partitions_per_page,
            cursor=cursor,
        )
        response = await cluster.call_any(request, DescribeTopicPartitionsResponse)
        for topic in response.topics:
            if topic.name is not None:
                _add_page(cluster, descriptions, topic.name, topic)
        following = response.next_cursor
        if following is None:
            return descriptions
        cursor = DescribeTopicPartitionsRequest.Cursor(
            topic_name=following.topic_name, partition_index=following.partition_index
        )
        names = [name for name in names if name >= following.topic_name]


def _add_page(
    cluster: Cluster,
    descriptions: dict[str, TopicDescription | KafkaError],
    name: str,
    topic: DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic,
) -> None:
    if topic.error_code:
        descriptions[name] = KafkaError(error_of(topic.error_code))
        return
    description = descriptions.get(name)
    if not isinstance(description, TopicDescription):
        operations = authorized_operations(topic.topic_authorized_operations)
        description = descriptions[name] = TopicDescription(name, topic.topic_id, topic.is_internal, [], operations)
    description.partitions += (
        TopicPartitionInfo(
            partition.partition_index,
            cluster.metadata.brokers.get(partition.leader_id),
            partition.leader_epoch,
            partition.replica_nodes,
            partition.isr_nodes,
            partition.offline_replicas,
            known_time(partition.creation_time_ms),
            partition.eligible_leader_replicas,
            partition.last_known_elr,
        )
        for partition in topic.partitions
    )


async def _describe_by_metadata(cluster: Cluster, names: list[str]) -> dict[str, TopicDescription | KafkaError]:
    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=name, topic_id=ZERO_UUID) for name in names],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    response = await cluster.call_any(request, MetadataResponse)
    return {
        topic.name: outcome_of(topic.error_code, None, _from_metadata(cluster, topic.name, topic))
        for topic in response.topics
        if topic.name is not None
    }


def _from_metadata(cluster: Cluster, name: str, topic: MetadataResponse.MetadataResponseTopic) -> TopicDescription:
    partitions = [
        TopicPartitionInfo(
            partition.partition_index,
            cluster.metadata.brokers.get(partition.leader_id),
            partition.leader_epoch,
            partition.replica_nodes,
            partition.isr_nodes,
            partition.offline_replicas,
            known_time(partition.creation_time_ms),
        )
        for partition in sorted(topic.partitions, key=lambda partition: partition.partition_index)
    ]
    operations = authorized_operations(topic.topic_authorized_operations)
    return TopicDescription(name, topic.topic_id, topic.is_internal, partitions, operations)
