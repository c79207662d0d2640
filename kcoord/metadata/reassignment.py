# SPDX-License-Identifier: Apache-2.0
"""AlterPartitionReassignments (KIP-455) and ElectLeaders (KIP-460).

Pure functions from image and request to records and response.

All brokers share one disk, so a new replica is in sync from the start. One record moves a partition, and no
reassignment is ever in progress. The brokers then close the log on the old leader and open it on the new leader, which
takes some time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from kcoord.config import BrokerConfig
from kcoord.metadata.fencing import settled
from kcoord.metadata.image import MetadataImage, PartitionImage, TopicImage
from kcoord.metadata.placement import Placement, directories_of
from kcoord.metadata.records import new_leader_record, new_reassignment_record
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AlterPartitionReassignmentsResponse, ElectLeadersResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import AlterPartitionReassignmentsRequest, ElectLeadersRequest

FIRST_VERSION_WITH_ELECTION_TYPE = 1

TopicReassigned = AlterPartitionReassignmentsResponse.ReassignableTopicResponse
PartitionReassigned = AlterPartitionReassignmentsResponse.ReassignablePartitionResponse
TopicElected = ElectLeadersResponse.ReplicaElectionResult
PartitionElected = ElectLeadersResponse.PartitionResult


class ElectionType(IntEnum):
    """The election types of ElectLeaders, with their codes on the wire (KIP-460)."""

    PREFERRED = 0
    UNCLEAN = 1


def alter_partition_reassignments(
    image: MetadataImage, config: BrokerConfig, request: AlterPartitionReassignmentsRequest
) -> CoordinatorResult[AlterPartitionReassignmentsResponse]:
    """Moves partitions to other replicas. Each partition succeeds or fails by itself.

    As in Kafka, a partition that is named twice is moved twice, and the last move counts.
    """
    result = CoordinatorResult(
        AlterPartitionReassignmentsResponse(
            error_message=None, allow_replication_factor_change=request.allow_replication_factor_change
        )
    )
    placement, alive = Placement(image.brokers, config.node_id), image.alive_brokers()
    leaders: dict[tuple[bytes, int], int] = {}
    for topic in request.topics:
        answer = TopicReassigned(name=topic.name)
        result.response.responses.append(answer)
        for requested in topic.partitions:
            partition_result = PartitionReassigned(partition_index=requested.partition_index, error_message=None)
            answer.partitions.append(partition_result)
            try:
                topic_image, partition = _find(
                    image,
                    topic.name,
                    requested.partition_index,
                    f"Unable to find a topic named {topic.name}.",
                    f"Unable to find partition {topic.name}:{requested.partition_index}.",
                )
                replicas = _checked_replicas(placement, partition, requested.replicas, request)
                leader = leaders.get((topic_image.id, partition.partition_id), partition.leader)
            except KafkaError as error:
                partition_result.error_code, partition_result.error_message = error.error, error.message
                continue
            if replicas == partition.replicas and leader == partition.leader:
                continue
            isr, new_leader = settled(replace(partition, leader=leader), replicas, alive)
            leaders[topic_image.id, partition.partition_id] = new_leader
            # As in Kafka, the leader epoch also grows if the leader stays and another replica is removed.
            has_new_epoch = new_leader != leader or not set(partition.replicas) <= set(replicas)
            result.records.append(
                new_reassignment_record(
                    topic_image.id,
                    partition.partition_id,
                    replicas,
                    directories_of(image, replicas),
                    new_leader if has_new_epoch else None,
                    isr,
                )
            )
    return result


def _find(
    image: MetadataImage, topic: str, partition_id: int, no_topic: str, no_partition: str
) -> tuple[TopicImage, PartitionImage]:
    """Returns the partition and its topic. The two texts are Kafka's for a topic and a partition that do not exist."""
    partition = image.partition(topic, partition_id)
    if partition is None:
        raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, no_partition if topic in image.topics else no_topic)
    return image.topics[topic], partition


def _checked_replicas(
    placement: Placement,
    partition: PartitionImage,
    replicas: Sequence[int] | None,
    request: AlterPartitionReassignmentsRequest,
) -> list[int]:
    if replicas is None:
        raise KafkaError(Errors.NO_REASSIGNMENT_IN_PROGRESS)
    placement.check_replicas(replicas)
    if not request.allow_replication_factor_change and len(replicas) != len(partition.replicas):
        raise KafkaError(
            Errors.INVALID_REPLICATION_FACTOR,
            f"The replication factor would change from {len(partition.replicas)} to {len(replicas)}.",
        )
    return list(replicas)


def elect_leaders(
    image: MetadataImage, context: OperationContext, request: ElectLeadersRequest
) -> CoordinatorResult[ElectLeadersResponse]:
    """Elects leaders. If the request is for all partitions, the response omits those that need no election."""
    kind = request.election_type if context.api_version >= FIRST_VERSION_WITH_ELECTION_TYPE else ElectionType.PREFERRED
    result = CoordinatorResult(ElectLeadersResponse())
    if request.topic_partitions == []:
        # Kafka 4.3.1 answers a request without partitions before it checks the election type.
        return result
    if kind not in ElectionType.__members__.values():
        raise KafkaError(Errors.INVALID_REQUEST, f"Unknown election type {kind}")
    for topic, partition_ids in _requested_partitions(image, request):
        answer = TopicElected(topic=topic)
        for partition_id in partition_ids:
            partition_result = PartitionElected(partition_id=partition_id, error_message=None)
            try:
                _elect(image, topic, partition_id, ElectionType(kind), result)
            except KafkaError as error:
                if error.error == Errors.ELECTION_NOT_NEEDED and request.topic_partitions is None:
                    continue
                partition_result.error_code, partition_result.error_message = error.error, error.message
            answer.partition_result.append(partition_result)
        if answer.partition_result:
            result.response.replica_election_results.append(answer)
    return result


def _requested_partitions(image: MetadataImage, request: ElectLeadersRequest) -> Iterable[tuple[str, Iterable[int]]]:
    if request.topic_partitions is None:
        return [(name, range(len(topic.partitions))) for name, topic in image.topics.items()]
    return [(topic.topic, list(dict.fromkeys(topic.partitions))) for topic in request.topic_partitions]


def _elect(
    image: MetadataImage,
    topic_name: str,
    partition_id: int,
    kind: ElectionType,
    result: CoordinatorResult[ElectLeadersResponse],
) -> None:
    topic, partition = _find(
        image,
        topic_name,
        partition_id,
        f"No such topic as {topic_name}",
        f"No such partition as {topic_name}-{partition_id}",
    )
    preferred = partition.replicas[0]
    if kind is ElectionType.UNCLEAN or partition.leader == preferred:
        # A partition that could have a leader has one.
        raise KafkaError(Errors.ELECTION_NOT_NEEDED, Errors.ELECTION_NOT_NEEDED.description)
    if preferred not in image.alive_brokers():
        raise KafkaError(Errors.PREFERRED_LEADER_NOT_AVAILABLE)
    result.records.append(new_leader_record(topic.id, partition_id, partition.isr, preferred))
