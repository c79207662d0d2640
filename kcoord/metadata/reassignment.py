# SPDX-License-Identifier: Apache-2.0
"""AlterPartitionReassignments (KIP-455) and ElectLeaders (KIP-460): pure functions from image and request to records
and response.

All brokers share one disk, so a new replica is in sync from the start: a partition is moved by one record, and no move
is ever in progress. What takes time, closing a log here and opening it there, is the brokers' business.
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
    PREFERRED = 0
    UNCLEAN = 1


def alter_partition_reassignments(
    image: MetadataImage, config: BrokerConfig, request: AlterPartitionReassignmentsRequest
) -> CoordinatorResult[AlterPartitionReassignmentsResponse]:
    """Each partition succeeds or fails by itself. A partition that is named twice is altered twice, the last one
    counts, as in Kafka.
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
        for wanted in topic.partitions:
            told = PartitionReassigned(partition_index=wanted.partition_index, error_message=None)
            answer.partitions.append(told)
            try:
                found, partition = _find(
                    image,
                    topic.name,
                    wanted.partition_index,
                    f"Unable to find a topic named {topic.name}.",
                    f"Unable to find partition {topic.name}:{wanted.partition_index}.",
                )
                replicas = _checked_replicas(placement, partition, wanted.replicas, request)
                leader = leaders.get((found.id, partition.partition_id), partition.leader)
            except KafkaError as error:
                told.error_code, told.error_message = error.error, error.message
                continue
            if replicas == partition.replicas and leader == partition.leader:
                continue
            isr, new_leader = settled(replace(partition, leader=leader), replicas, alive)
            leaders[found.id, partition.partition_id] = new_leader
            # As in Kafka, the leader epoch also grows where the leader stays and other replicas go.
            has_new_epoch = new_leader != leader or not set(partition.replicas) <= set(replicas)
            result.records.append(
                new_reassignment_record(
                    found.id,
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
    wanted: Sequence[int] | None,
    request: AlterPartitionReassignmentsRequest,
) -> list[int]:
    if wanted is None:
        raise KafkaError(Errors.NO_REASSIGNMENT_IN_PROGRESS)
    placement.check_replicas(wanted)
    if not request.allow_replication_factor_change and len(wanted) != len(partition.replicas):
        raise KafkaError(
            Errors.INVALID_REPLICATION_FACTOR,
            f"The replication factor would change from {len(partition.replicas)} to {len(wanted)}.",
        )
    return list(wanted)


def elect_leaders(
    image: MetadataImage, context: OperationContext, request: ElectLeadersRequest
) -> CoordinatorResult[ElectLeadersResponse]:
    """Where all partitions are asked for, those that need no election are not told of."""
    kind = request.election_type if context.api_version >= FIRST_VERSION_WITH_ELECTION_TYPE else ElectionType.PREFERRED
    result = CoordinatorResult(ElectLeadersResponse())
    if request.topic_partitions == []:
        # Kafka 4.3.1 answers a request for no partition before it looks at the election type.
        return result
    if kind not in ElectionType.__members__.values():
        raise KafkaError(Errors.INVALID_REQUEST, f"Unknown election type {kind}")
    for topic, partition_ids in _wanted(image, request):
        answer = TopicElected(topic=topic)
        for partition_id in partition_ids:
            told = PartitionElected(partition_id=partition_id, error_message=None)
            try:
                _elect(image, topic, partition_id, ElectionType(kind), result)
            except KafkaError as error:
                if error.error == Errors.ELECTION_NOT_NEEDED and request.topic_partitions is None:
                    continue
                told.error_code, told.error_message = error.error, error.message
            answer.partition_result.append(told)
        if answer.partition_result:
            result.response.replica_election_results.append(answer)
    return result


def _wanted(image: MetadataImage, request: ElectLeadersRequest) -> Iterable[tuple[str, Iterable[int]]]:
    if request.topic_partitions is None:
        return [(name, range(len(topic.partitions))) for name, topic in image.topics.items()]
    return [(one.topic, list(dict.fromkeys(one.partitions))) for one in request.topic_partitions]


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
