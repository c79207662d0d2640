# SPDX-License-Identifier: Apache-2.0
"""`kcoord workers` fences and unfences brokers while clients use the other brokers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    DescribeClusterRequest,
    DescribeClusterResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from tests.integration.test_workers import (
    TIMEOUT_SECONDS,
    WORKERS,
    addresses,
    create,
    metadata,
    settings,
    total_records,
)
from tests.integration.wire import WireClient
from tests.support.confluent import PolledConsumer, committed, partitions_of, produce
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

NODES = [10 + number for number in range(WORKERS)]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    factors = {"offsets.topic.replication.factor": "3", "transaction.state.log.replication.factor": "3"}
    process = KcoordProcess(tmp_path, {**settings(), **factors}).start()
    yield process
    process.kill()


def run(data: Path, action: str, node_id: int) -> tuple[int, str]:
    """Runs `kcoord workers`; returns its exit code and its output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(["workers", action, str(node_id), "--data", str(data)])
    return code, output.getvalue()


def test_the_outcome_as_json(broker: KcoordProcess, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("fence", "unfence"):
        assert main(["workers", action, str(NODES[0]), "--data", str(broker.data), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"broker": NODES[0], "fenced": action == "fence"}


def fence(broker: KcoordProcess, node_id: int) -> None:
    assert run(broker.data, "fence", node_id) == (0, f"Broker {node_id} is out of service\n")
    assert not accepts(broker.ports[NODES.index(node_id)])


def unfence(broker: KcoordProcess, node_id: int) -> None:
    assert run(broker.data, "unfence", node_id) == (0, f"Broker {node_id} is in service\n")
    wait_until(lambda: accepts(broker.ports[NODES.index(node_id)]), "clients are accepted again", TIMEOUT_SECONDS)


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 5).close()
    except ConnectionRefusedError:
        return False
    return True


def leaders(port: int, topic: str) -> list[int]:
    partitions = metadata(port, [topic]).topics[0].partitions
    return [partition.leader_id for partition in sorted(partitions, key=lambda partition: partition.partition_index)]


def cluster(port: int, *, include_fenced: bool) -> dict[int, bool]:
    """Returns whether each broker is fenced."""
    with WireClient(port) as client:
        request = DescribeClusterRequest(include_fenced_brokers=include_fenced)
        answer = client.call(request, 2, DescribeClusterResponse)
    return {broker.broker_id: broker.is_fenced for broker in answer.brokers}


@pytest.mark.parametrize("node_id", NODES)
def test_other_brokers_lead_while_a_broker_is_out_of_service(broker: KcoordProcess, node_id: int) -> None:
    bootstrap = addresses(broker)
    other = broker.ports[NODES.index(node_id) - 1]
    assert create(broker.port, "t", 6, 3).error_code == 0
    assert create(broker.port, "alone", 3, 1).error_code == 0
    produce(bootstrap, "t", 6, 3)
    with PolledConsumer(bootstrap, "g", ["t"], commit_each=True) as consumer:
        consumer.wait_for(18, TIMEOUT_SECONDS)
        fence(broker, node_id)
        answer = metadata(other, ["t", "alone"])
        assert {broker.node_id for broker in answer.brokers} == set(NODES) - {node_id}
        assert answer.controller_id != node_id
        assert cluster(other, include_fenced=False) == dict.fromkeys(set(NODES) - {node_id}, False)
        assert cluster(other, include_fenced=True) == {node: node == node_id for node in NODES}
        replicated, alone = answer.topics
        assert node_id not in leaders(other, "t")
        assert all(partition.offline_replicas == [node_id] for partition in replicated.partitions)
        away = [partition for partition in alone.partitions if partition.replica_nodes == [node_id]]
        assert [(partition.leader_id, partition.error_code) for partition in away] == [
            (-1, Errors.LEADER_NOT_AVAILABLE)
        ]
        produce(bootstrap, "t", 6, 3)
        consumer.wait_for(36, TIMEOUT_SECONDS)
        assert create(other, "later", 4, 1).error_code == 0
        assert node_id not in leaders(other, "later")
        unfence(broker, node_id)
        assert {broker.node_id for broker in metadata(other, []).brokers} == set(NODES)
        assert -1 not in leaders(other, "alone")
        produce(bootstrap, "t", 6, 1)
        consumer.wait_for(42, TIMEOUT_SECONDS)
    assert set(committed(bootstrap, "g", sorted(partitions_of("t", 6))).values()) == {7}
    with WireClient(other) as client:
        client.call(ElectLeadersRequest(topic_partitions=None), 2, ElectLeadersResponse)
    partitions = metadata(other, ["t"]).topics[0].partitions
    assert all(partition.leader_id == partition.replica_nodes[0] for partition in partitions)
    assert total_records(bootstrap, "t", 6) == 42
    assert broker.stop() == 0, broker.log


def test_all_brokers_are_fenced_and_unfenced_one_by_one(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    create(broker.port, "t", 3, 3)
    produce(bootstrap, "t", 3, 2)
    for node_id in NODES:
        fence(broker, node_id)
    for node_id in reversed(NODES):
        unfence(broker, node_id)
    assert set(leaders(broker.port, "t")) == {12}, "the broker that was unfenced first leads"
    assert total_records(bootstrap, "t", 3) == 6
    produce(bootstrap, "t", 3, 1)


def test_a_fenced_worker_that_restarts_stays_fenced(broker: KcoordProcess) -> None:
    create(broker.port, "t", 3, 3)
    fence(broker, 11)
    os.kill(broker.worker_pid(11), signal.SIGKILL)
    wait_until(lambda: "serves again" in broker.log, "the worker serves again", TIMEOUT_SECONDS)
    assert not accepts(broker.ports[1])
    unfence(broker, 11)
    assert metadata(broker.ports[1], ["t"]).topics[0].error_code == 0


def test_a_restart_unfences_all_brokers(broker: KcoordProcess) -> None:
    create(broker.port, "alone", 3, 1)
    for node_id in (10, 12):
        fence(broker, node_id)
    broker.restart()
    assert sorted(leaders(broker.port, "alone")) == NODES
    assert len(metadata(broker.port, []).brokers) == WORKERS


def test_the_coordinator_of_a_group_is_in_service(broker: KcoordProcess) -> None:
    create(broker.port, "t", 1, 1)
    committed(addresses(broker), "g", [("t", 0)])
    fence(broker, 10)
    fence(broker, 11)
    for number in range(10):
        with WireClient(broker.ports[2]) as client:
            request = FindCoordinatorRequest(coordinator_keys=[f"g{number}"])
            coordinator = client.call(request, 4, FindCoordinatorResponse).coordinators[0]
        assert (coordinator.error_code, coordinator.node_id) == (0, 12)


def test_unknown_brokers_and_folders(broker: KcoordProcess, tmp_path: Path) -> None:
    code, said = run(broker.data, "fence", 99)
    assert (code, "BROKER_ID_NOT_REGISTERED" in said) == (1, True)
    code, said = run(tmp_path, "unfence", 10)
    assert (code, "no worker processes use" in said) == (1, True)
