# SPDX-License-Identifier: Apache-2.0
"""Brokers in and out of service: leaders, in-sync replicas, and the placement of new partitions."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import AlterPartitionReassignmentsRequest, ElectLeadersRequest
from tests.unit.metadata.cluster import Cluster, manual, registration, topic

NO_LEADER = -1


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.register(*(registration(broker_id) for broker_id in (1, 2, 3)))
    cluster.create(manual("t", (0, [1, 2, 3]), (1, [2, 1, 3])), manual("alone", (0, [1])))
    return cluster


def fence(cluster: Cluster, *broker_ids: int, fenced: bool = True) -> None:
    for broker_id in broker_ids:
        is_fenced = cluster.run(lambda machine, context: machine.fence_broker(context, broker_id, fenced))  # noqa: B023
        assert is_fenced is fenced


def unfence(cluster: Cluster, *broker_ids: int) -> None:
    fence(cluster, *broker_ids, fenced=False)


def state(cluster: Cluster, name: str = "t", partition_id: int = 0) -> tuple[int, int, list[int]]:
    """Returns leader, leader epoch and ISR."""
    partition = cluster.image.partition(name, partition_id)
    assert partition is not None
    return partition.leader, partition.leader_epoch, partition.isr


def test_the_next_replica_leads(cluster: Cluster) -> None:
    fence(cluster, 1)
    assert cluster.image.fenced_brokers() == {1}
    assert cluster.image.alive_brokers() == {2, 3}
    assert state(cluster) == (2, 1, [2, 3])
    assert state(cluster, partition_id=1) == (2, 0, [2, 3])
    fence(cluster, 2)
    assert state(cluster) == (3, 2, [3])


def test_an_unfenced_broker_is_in_sync_and_leads_only_partitions_without_a_leader(cluster: Cluster) -> None:
    fence(cluster, 1)
    unfence(cluster, 1)
    assert state(cluster) == (2, 1, [1, 2, 3])
    assert state(cluster, "alone") == (1, 2, [1])


def test_a_partition_without_replicas_in_service_has_no_leader(cluster: Cluster) -> None:
    fence(cluster, 1)
    assert state(cluster, "alone") == (NO_LEADER, 1, [1])
    fence(cluster, 2, 3)
    assert state(cluster) == (NO_LEADER, 3, [3])
    unfence(cluster, 1)
    assert state(cluster) == (1, 4, [1]), "all brokers share the disk, so any replica may lead"


def test_fencing_a_fenced_broker_changes_nothing(cluster: Cluster) -> None:
    fence(cluster, 1)
    before = cluster.image
    fence(cluster, 1)
    assert cluster.image is before


def test_a_broker_must_be_registered(cluster: Cluster) -> None:
    with pytest.raises(KafkaError) as caught:
        fence(cluster, 9)
    assert caught.value.error == Errors.BROKER_ID_NOT_REGISTERED


def test_a_start_unfences_all_brokers(cluster: Cluster) -> None:
    fence(cluster, 1, 3)
    cluster.register(*(registration(broker_id) for broker_id in (1, 2, 3)))
    assert cluster.image.fenced_brokers() == frozenset()
    assert state(cluster) == (2, 1, [1, 2, 3])
    assert state(cluster, "alone")[0] == 1
    assert cluster.register(*(registration(broker_id) for broker_id in (1, 2, 3))) == []


@pytest.mark.parametrize("name", ["new", GROUP_METADATA_TOPIC])
def test_new_partitions_go_to_brokers_in_service(cluster: Cluster, name: str) -> None:
    fence(cluster, 2)
    count = 50 if name == GROUP_METADATA_TOPIC else 6
    (answer,) = cluster.create(topic(name, count, 2))
    assert answer.error_code == 0
    assert all(set(partition.replicas) == {1, 3} for partition in cluster.image.topics[name].partitions)


def test_fenced_brokers_get_replicas_if_too_few_brokers_are_in_service(cluster: Cluster) -> None:
    fence(cluster, 2, 3)
    (answer,) = cluster.create(topic("new", 3, 3))
    assert answer.error_code == 0
    for partition in cluster.image.topics["new"].partitions:
        assert sorted(partition.replicas) == [1, 2, 3]
        assert (partition.leader, partition.isr) == (1, [1])
    cluster.create(manual("elsewhere", (0, [2])))
    assert state(cluster, "elsewhere") == (NO_LEADER, 0, [2])
    unfence(cluster, 2)
    assert state(cluster, "elsewhere") == (2, 1, [2])


def test_reassignments_and_elections_do_not_choose_fenced_leaders(cluster: Cluster) -> None:
    fence(cluster, 1)
    partition = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=[1, 3])
    request = AlterPartitionReassignmentsRequest(
        topics=[AlterPartitionReassignmentsRequest.ReassignableTopic(name="t", partitions=[partition])]
    )
    cluster.run(lambda machine, context: machine.alter_partition_reassignments(context, request))
    assert state(cluster) == (3, 2, [3])
    election = ElectLeadersRequest(
        topic_partitions=[ElectLeadersRequest.TopicPartitions(topic="t", partitions=[0])],
    )
    answer = cluster.run(lambda machine, context: machine.elect_leaders(context, election), 2)
    told = answer.replica_election_results[0].partition_result[0]
    assert told.error_code == Errors.PREFERRED_LEADER_NOT_AVAILABLE
    unfence(cluster, 1)
    cluster.run(lambda machine, context: machine.elect_leaders(context, election), 2)
    assert state(cluster) == (1, 3, [1, 3])
