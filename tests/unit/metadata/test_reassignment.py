# SPDX-License-Identifier: Apache-2.0
"""Reassignments of partitions and elections of leaders: replicas, leaders, epochs, and errors."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    ElectLeadersRequest,
)
from tests.unit.metadata.cluster import Cluster, manual, registration

Wanted = AlterPartitionReassignmentsRequest.ReassignablePartition


@pytest.fixture
def cluster() -> Cluster:
    """Returns a cluster. Partition 0 of `t` is on brokers 1 and 2, partition 1 only on 2."""
    cluster = Cluster()
    cluster.register(*(registration(broker_id) for broker_id in (1, 2, 3)))
    cluster.create(manual("t", (0, [1, 2]), (1, [2, 3])))
    return cluster


def reassign(
    cluster: Cluster,
    *moves: tuple[int, list[int] | None],
    topic: str = "t",
    allow_factor_change: bool = True,
) -> AlterPartitionReassignmentsResponse:
    request = AlterPartitionReassignmentsRequest(
        allow_replication_factor_change=allow_factor_change,
        topics=[
            AlterPartitionReassignmentsRequest.ReassignableTopic(
                name=topic, partitions=[Wanted(partition_index=index, replicas=replicas) for index, replicas in moves]
            )
        ],
    )
    return cluster.run(lambda machine, context: machine.alter_partition_reassignments(context, request))


def errors(response: AlterPartitionReassignmentsResponse) -> list[Errors]:
    return [Errors(partition.error_code) for topic in response.responses for partition in topic.partitions]


def state(cluster: Cluster, partition_id: int = 0) -> tuple[list[int], list[int], int, int, int]:
    """Returns replicas, ISR, leader, leader epoch and partition epoch."""
    partition = cluster.image.partition("t", partition_id)
    assert partition is not None
    assert len(partition.directories) == len(partition.replicas)
    return partition.replicas, partition.isr, partition.leader, partition.leader_epoch, partition.partition_epoch


def test_the_first_replica_leads_if_the_leader_is_no_longer_a_replica(cluster: Cluster) -> None:
    assert errors(reassign(cluster, (0, [3, 2]))) == [Errors.NONE]
    assert state(cluster) == ([3, 2], [3, 2], 3, 1, 1)


def test_the_leader_stays_if_it_is_still_a_replica(cluster: Cluster) -> None:
    reassign(cluster, (0, [3, 2, 1]))
    assert state(cluster) == ([3, 2, 1], [3, 2, 1], 1, 0, 1)
    reassign(cluster, (0, [1]))
    assert state(cluster) == ([1], [1], 1, 1, 2), "replicas that go make a new leader epoch, as in Kafka"


def test_a_reassignment_to_the_current_replicas_changes_nothing(cluster: Cluster) -> None:
    before = cluster.image
    assert errors(reassign(cluster, (0, [1, 2]), (1, [2, 3]))) == [Errors.NONE, Errors.NONE]
    assert cluster.image is before


def test_each_partition_has_its_own_error(cluster: Cluster) -> None:
    response = reassign(cluster, (0, None), (1, [3, 2]), (2, [1]), (-1, [1]))
    assert errors(response) == [
        Errors.NO_REASSIGNMENT_IN_PROGRESS,
        Errors.NONE,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert state(cluster)[4] == 0
    assert state(cluster, 1)[0] == [3, 2]
    assert errors(reassign(cluster, (0, [1]), topic="unknown")) == [Errors.UNKNOWN_TOPIC_OR_PARTITION]


@pytest.mark.parametrize("replicas", [[], [1, 1], [4], [-1], [1, 2, 3, 4]])
def test_invalid_replicas(cluster: Cluster, replicas: list[int]) -> None:
    assert errors(reassign(cluster, (0, replicas))) == [Errors.INVALID_REPLICA_ASSIGNMENT]
    assert state(cluster)[4] == 0


def test_a_request_can_forbid_another_replication_factor(cluster: Cluster) -> None:
    response = reassign(cluster, (0, [1]), (1, [1, 3]), allow_factor_change=False)
    assert errors(response) == [Errors.INVALID_REPLICATION_FACTOR, Errors.NONE]
    assert not response.allow_replication_factor_change
    assert state(cluster, 1) == ([1, 3], [1, 3], 1, 1, 1)


def test_the_last_of_two_moves_counts(cluster: Cluster) -> None:
    assert errors(reassign(cluster, (0, [3]), (0, [2]))) == [Errors.NONE, Errors.NONE]
    assert state(cluster) == ([2], [2], 2, 2, 2)


def test_a_reassignment_survives_only_a_restart_with_the_same_brokers(cluster: Cluster) -> None:
    reassign(cluster, (0, [3]))
    cluster.register(*(registration(broker_id) for broker_id in (1, 2, 3)))
    assert state(cluster)[:3] == ([3], [3], 3)
    cluster.register(registration(1))
    assert state(cluster)[:3] == ([1], [1], 1)


def elect(
    cluster: Cluster, topics: list[tuple[str, list[int]]] | None, kind: int = 0, version: int = 2
) -> dict[tuple[str, int], Errors]:
    request = ElectLeadersRequest(
        election_type=kind,
        topic_partitions=None
        if topics is None
        else [ElectLeadersRequest.TopicPartitions(topic=topic, partitions=ids) for topic, ids in topics],
    )
    response = cluster.run(lambda machine, context: machine.elect_leaders(context, request), version)
    return {
        (topic.topic, result.partition_id): Errors(result.error_code)
        for topic in response.replica_election_results
        for result in topic.partition_result
    }


def test_the_preferred_leader_is_the_first_replica(cluster: Cluster) -> None:
    reassign(cluster, (0, [2, 1]))
    assert state(cluster)[2] == 1
    errors = elect(cluster, [("t", [0, 1, 1, 7]), ("unknown", [0])])
    assert errors == {
        ("t", 0): Errors.NONE,
        ("t", 1): Errors.ELECTION_NOT_NEEDED,
        ("t", 7): Errors.UNKNOWN_TOPIC_OR_PARTITION,
        ("unknown", 0): Errors.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert state(cluster) == ([2, 1], [2, 1], 2, 1, 2)


@pytest.mark.parametrize("version", [0, 1, 2])
def test_a_request_for_all_partitions_returns_only_those_that_change(cluster: Cluster, version: int) -> None:
    reassign(cluster, (1, [3, 2]))
    assert elect(cluster, None, version=version) == {("t", 1): Errors.NONE}
    assert elect(cluster, None, version=version) == {}


def test_an_unclean_election_is_never_needed(cluster: Cluster) -> None:
    reassign(cluster, (0, [2, 1]))
    assert elect(cluster, [("t", [0])], kind=1) == {("t", 0): Errors.ELECTION_NOT_NEEDED}
    assert elect(cluster, None, kind=1) == {}
    with pytest.raises(KafkaError) as caught:
        elect(cluster, None, kind=2)
    assert caught.value.error == Errors.INVALID_REQUEST
    assert elect(cluster, [("t", [0])], kind=2, version=0) == {("t", 0): Errors.NONE}, "v0 has no types"
