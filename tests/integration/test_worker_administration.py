# SPDX-License-Identifier: Apache-2.0
"""Features, the quorum, registrations and log folders of a cluster with several workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
)
from tests.integration.test_features import levels, update
from tests.integration.test_fencing import NODES, accepts, cluster, fence, leaders, run
from tests.integration.test_workers import TIMEOUT_SECONDS, create, metadata, settings
from tests.integration.wire import WireClient
from tests.support.kcoord_process import KcoordProcess
from tests.support.quotas import alter_quota
from tests.support.waiting import wait_until

SAFE_DOWNGRADE = 2


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, settings()).start()
    yield process
    process.kill()


def test_levels_are_the_same_at_every_worker(broker: KcoordProcess) -> None:
    """Every worker sends its response only when all workers have the new level."""
    for change, port in enumerate(broker.ports):
        level = change % 2
        with WireClient(port) as client:
            response = update(client, SAFE_DOWNGRADE, group_version=level)
            assert (response.error_code, response.error_message) == (0, None)
            refused = update(client, group_version=2)
        assert refused.error_code == Errors.INVALID_UPDATE_VERSION
        assert (refused.error_message or "").endswith("Local controller 10 only supports versions 0-1")
        seen = []
        for other in broker.ports:
            with WireClient(other) as client:
                seen.append(levels(client))
        assert seen == [seen[0]] * 3
        assert seen[0][0].get("group.version", 0) == level
    before = seen[0]
    broker.restart()
    for port in broker.ports:
        with WireClient(port) as client:
            after = levels(client)
        assert after[0] == before[0]
        assert after[1] >= before[1]


def test_all_workers_count_partitions_in_one_bucket(broker: KcoordProcess) -> None:
    """The bucket has 110 tokens. Each worker sends the client's requests, with its name, to the first."""
    alter_quota(broker.address, {"user": "ANONYMOUS"}, controller_mutation_rate=10.0)
    topics = []
    for port in broker.ports:
        with WireClient(port) as client:
            topic = CreateTopicsRequest.CreatableTopic(name=f"t{port}", num_partitions=100, replication_factor=1)
            created = client.call(CreateTopicsRequest(topics=[topic], timeout_ms=10_000), 7, CreateTopicsResponse)
            topics += [(topic.error_code, created.throttle_time_ms > 0) for topic in created.topics]
    assert topics == [(0, False), (0, False), (Errors.THROTTLING_QUOTA_EXCEEDED, True)]


def quorum(port: int) -> DescribeQuorumResponse.PartitionData:
    topic = DescribeQuorumRequest.TopicData(
        topic_name="__cluster_metadata", partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
    )
    with WireClient(port) as client:
        response = client.call(DescribeQuorumRequest(topics=[topic]), 2, DescribeQuorumResponse)
    assert {node.node_id for node in response.nodes} <= {10}
    return response.topics[0].partitions[0]


def test_the_first_worker_is_the_voter_and_the_other_workers_observe(broker: KcoordProcess) -> None:
    assert create(broker.ports[1], "t", 3, 1).error_code == 0
    states = [quorum(port) for port in broker.ports]
    assert {state.leader_id for state in states} == {10}
    assert len({state.high_watermark for state in states}) == 1
    for state in states:
        assert [voter.replica_id for voter in state.current_voters] == [10]
        assert [observer.replica_id for observer in state.observers] == [11, 12]
        assert {replica.log_end_offset for replica in state.current_voters + state.observers} == {state.high_watermark}
    assert create(broker.ports[2], "u", 3, 1).error_code == 0
    assert quorum(broker.ports[1]).high_watermark > states[0].high_watermark
    fence(broker, 12)
    assert [observer.replica_id for observer in quorum(broker.ports[0]).observers] == [11]


def unregister(port: int, broker_id: int) -> tuple[int, str | None]:
    with WireClient(port) as client:
        response = client.call(UnregisterBrokerRequest(broker_id=broker_id), 0, UnregisterBrokerResponse)
    return response.error_code, response.error_message


@pytest.mark.parametrize("is_fenced", [False, True])
def test_an_unregistered_worker_is_out_of_service_until_the_next_start(broker: KcoordProcess, is_fenced: bool) -> None:
    assert create(broker.port, "t", 6, 3).error_code == 0
    if is_fenced:
        fence(broker, 12)
    assert unregister(broker.ports[1], 99) == (102, "Broker ID 99 is not currently registered")
    assert unregister(broker.ports[1], 12) == (0, "")
    assert unregister(broker.ports[0], 12) == (102, "Broker ID 12 is not currently registered")
    wait_until(lambda: not accepts(broker.ports[2]), "the worker accepts no clients", TIMEOUT_SECONDS)
    for port in broker.ports[:2]:
        assert {node.node_id for node in metadata(port, []).brokers} == {10, 11}
        assert cluster(port, include_fenced=True) == {10: False, 11: False}
        assert 12 not in leaders(port, "t")
    code, said = run(broker.data, "unfence", 12)
    assert code == 1
    assert "BROKER_ID_NOT_REGISTERED" in said
    assert not accepts(broker.ports[2])
    broker.restart()
    assert set(cluster(broker.port, include_fenced=False)) == set(NODES)
    assert accepts(broker.ports[2])
    assert 12 in leaders(broker.port, "t")


def test_the_first_worker_is_unregistered(broker: KcoordProcess) -> None:
    """It still has the metadata log, so other workers can change the metadata. Clients see another controller."""
    assert unregister(broker.ports[1], 10) == (0, "")
    wait_until(lambda: not accepts(broker.ports[0]), "the worker accepts no clients", TIMEOUT_SECONDS)
    assert metadata(broker.ports[2], []).controller_id == 11
    assert create(broker.ports[1], "t", 3, 1).error_code == 0
    assert set(leaders(broker.ports[2], "t")) <= {11, 12}
    assert quorum(broker.ports[1]).leader_id == 10


def test_log_folders_of_replicas(broker: KcoordProcess) -> None:
    """A worker has the replicas that the metadata assigns to it."""
    assert create(broker.port, "t", 3, 1).error_code == 0
    leader_of = leaders(broker.port, "t")
    for node_id, port in zip(NODES, broker.ports, strict=True):
        request = AlterReplicaLogDirsRequest(
            dirs=[
                AlterReplicaLogDirsRequest.AlterReplicaLogDir(
                    path=os.path.abspath(broker.data),
                    topics=[AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name="t", partitions=[0, 1, 2])],
                )
            ]
        )
        with WireClient(port) as client:
            response = client.call(request, 2, AlterReplicaLogDirsResponse)
        assert [partition.error_code for partition in response.results[0].partitions] == [
            Errors.NONE if leader == node_id else Errors.REPLICA_NOT_AVAILABLE for leader in leader_of
        ]
