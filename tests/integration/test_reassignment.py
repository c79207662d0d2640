# SPDX-License-Identifier: Apache-2.0
"""Partitions, also those of the coordinators, move from worker to worker while clients use them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kcoord.runtime.serde import partition_for
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)
from tests.integration.test_workers import (
    SHARDS,
    TIMEOUT_SECONDS,
    WORKERS,
    Writer,
    addresses,
    commit,
    copies_of,
    create,
    metadata,
    read_committed,
    settings,
    total_records,
)
from tests.integration.wire import WireClient
from tests.support.confluent import PolledConsumer, committed, partitions_of, produce
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

NODES = [10 + number for number in range(WORKERS)]
Assignment = Mapping[int, list[int] | None]


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, settings()).start()
    yield process
    process.kill()


def reassign(port: int, topic: str, assignment: Assignment) -> dict[int, int]:
    """Moves partitions to other replicas; returns the error of each partition."""
    request = AlterPartitionReassignmentsRequest(
        topics=[
            AlterPartitionReassignmentsRequest.ReassignableTopic(
                name=topic,
                partitions=[
                    AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=index, replicas=replicas)
                    for index, replicas in assignment.items()
                ],
            )
        ]
    )
    with WireClient(port) as client:
        answer = client.call(request, 1, AlterPartitionReassignmentsResponse)
        in_progress = client.call(ListPartitionReassignmentsRequest(topics=None), 0, ListPartitionReassignmentsResponse)
    assert answer.error_code == 0, answer.error_message
    assert in_progress.topics == []
    return {partition.partition_index: partition.error_code for partition in answer.responses[0].partitions}


def leaders(port: int, topic: str) -> dict[int, tuple[int, int]]:
    """Returns leader and leader epoch of each partition."""
    partitions = metadata(port, [topic]).topics[0].partitions
    return {partition.partition_index: (partition.leader_id, partition.leader_epoch) for partition in partitions}


def start_offset(port: int, topic: str) -> int:
    partition = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-2)
    request = ListOffsetsRequest(topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[partition])])
    with WireClient(port) as client:
        answer = client.call(request, 7, ListOffsetsResponse).topics[0].partitions[0]
    assert answer.error_code == 0
    return answer.offset


def rotated(number: int) -> dict[int, list[int] | None]:
    return {partition: [NODES[(partition + number) % WORKERS]] for partition in range(WORKERS)}


def test_records_and_leaders_after_a_move(broker: KcoordProcess) -> None:
    create(broker.port, "t", 1, 1)
    (first, _) = leaders(broker.port, "t")[0]
    produce(addresses(broker), "t", 1, 5)
    second = NODES[(NODES.index(first) + 1) % WORKERS]
    for asked in broker.ports:
        # When any worker sends the response, all workers know the new leader.
        moves = [second, first]
        for epoch, leader in enumerate(moves, leaders(broker.port, "t")[0][1] + 1):
            assert reassign(asked, "t", {0: [leader]}) == {0: 0}
            assert {leaders(port, "t")[0] for port in broker.ports} == {(leader, epoch)}
            assert start_offset(broker.ports[NODES.index(leader)], "t") == 0
    assert total_records(addresses(broker), "t", 1) == 5


def test_errors_are_those_of_kafka(broker: KcoordProcess) -> None:
    create(broker.port, "t", 2, 1)
    before = leaders(broker.port, "t")
    errors = reassign(broker.ports[1], "t", {0: None, 1: [99], 2: [10]})
    assert errors == {
        0: Errors.NO_REASSIGNMENT_IN_PROGRESS,
        1: Errors.INVALID_REPLICA_ASSIGNMENT,
        2: Errors.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert reassign(broker.port, "t", {0: [], 1: [10, 10]}) == dict.fromkeys((0, 1), Errors.INVALID_REPLICA_ASSIGNMENT)
    assert leaders(broker.port, "t") == before


def test_the_preferred_leader_is_elected_on_request(broker: KcoordProcess) -> None:
    create(broker.port, "t", 1, 1)
    (leader, epoch) = leaders(broker.port, "t")[0]
    other = next(node for node in NODES if node != leader)
    assert reassign(broker.port, "t", {0: [other, leader]}) == {0: 0}
    assert leaders(broker.port, "t")[0] == (leader, epoch), "the leader stays as long as it is a replica"
    requested = [ElectLeadersRequest.TopicPartitions(topic="t", partitions=[0, 5])]
    with WireClient(broker.ports[1]) as client:
        answer = client.call(ElectLeadersRequest(topic_partitions=requested), 2, ElectLeadersResponse)
        again = client.call(ElectLeadersRequest(topic_partitions=None), 2, ElectLeadersResponse)
    results = answer.replica_election_results[0].partition_result
    assert {partition.partition_id: partition.error_code for partition in results} == {
        0: 0,
        5: Errors.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert leaders(broker.port, "t")[0] == (other, epoch + 1)
    assert again.replica_election_results == []


def test_producers_and_transactions_continue_while_all_partitions_move(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    for topic in ("plain", "transactional"):
        create(broker.port, topic, WORKERS, 1)
    writer = Writer(bootstrap)
    for number in range(1, 4):
        writer.wait_for_progress()
        for topic in ("plain", "transactional"):
            assert set(reassign(broker.ports[number % WORKERS], topic, rotated(number)).values()) == {0}
        shards = {shard: [NODES[(shard + number) % WORKERS]] for shard in range(SHARDS)}
        assert set(reassign(broker.port, "__transaction_state", shards).values()) == {0}
    writer.wait_for_progress()
    writer.close()
    copies = Counter(read_committed(bootstrap, "plain"))
    assert set(copies.values()) == {1}, "each message of an idempotent producer exists once"
    assert writer.acknowledged <= copies.keys()
    committed_values = Counter(read_committed(bootstrap, "transactional"))
    assert set(committed_values.values()) == {WORKERS}, "a transaction exists as a whole"
    assert writer.committed <= committed_values.keys()
    assert broker.stop() == 0, broker.log


@pytest.mark.parametrize("classic", [None, "range"])
def test_a_group_continues_when_its_coordinator_moves(broker: KcoordProcess, classic: str | None) -> None:
    bootstrap = addresses(broker)
    create(broker.port, "t", 2, 1)
    shard = partition_for("g", SHARDS)
    with PolledConsumer(bootstrap, "g", ["t"], commit_each=True, classic=classic) as consumer:
        for number in range(1, 4):
            produce(bootstrap, "t", 2, 3)
            consumer.wait_for(6 * number, TIMEOUT_SECONDS)
            assert reassign(broker.port, "__consumer_offsets", {shard: [NODES[number % WORKERS]]}) == {shard: 0}
        assert consumer.errors == []
        produce(bootstrap, "t", 2, 3)
        consumer.wait_for(24, TIMEOUT_SECONDS)
    assert committed(bootstrap, "g", sorted(partitions_of("t", 2))) == {("t", 0): 12, ("t", 1): 12}


def test_leaders_and_data_survive_a_restart(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    create(broker.port, "kept", 6, 1)
    produce(bootstrap, "kept", 6, 4)
    commit(bootstrap, ["g"], "kept", 3)
    shard = partition_for("g", SHARDS)
    reassign(broker.port, "kept", {partition: [12] for partition in range(6)})
    reassign(broker.port, "__consumer_offsets", {shard: [12 if shard % WORKERS != 2 else 10]})
    partition = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=2)
    topic = DeleteRecordsRequest.DeleteRecordsTopic(name="kept", partitions=[partition])
    with WireClient(broker.ports[2]) as client:
        deleted = client.call(DeleteRecordsRequest(topics=[topic]), 2, DeleteRecordsResponse)
    assert deleted.topics[0].partitions[0].low_watermark == 2
    reassign(broker.port, "kept", {0: [11]})
    before = leaders(broker.port, "kept"), leaders(broker.port, "__consumer_offsets")
    for how in (signal.SIGTERM, signal.SIGKILL):
        broker.restart(how)
        assert (leaders(broker.port, "kept"), leaders(broker.port, "__consumer_offsets")) == before
        assert start_offset(broker.ports[1], "kept") == 2
        assert total_records(addresses(broker), "kept", 6) == 24
        assert committed(addresses(broker), "g", [("kept", 0)]) == {("kept", 0): 3}


@pytest.mark.parametrize("victim", NODES)
def test_a_worker_that_dies_while_partitions_move(broker: KcoordProcess, victim: int) -> None:
    bootstrap = addresses(broker)
    for topic in ("plain", "transactional"):
        create(broker.port, topic, WORKERS, 1)
    writer = Writer(bootstrap)
    writer.wait_for_progress()
    asked = broker.ports[NODES.index(victim) - 1]
    request = AlterPartitionReassignmentsRequest(
        topics=[
            AlterPartitionReassignmentsRequest.ReassignableTopic(
                name=topic,
                partitions=[
                    AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=index, replicas=replicas)
                    for index, replicas in rotated(2).items()
                ],
            )
            for topic in ("plain", "transactional")
        ]
    )
    pid = broker.worker_pid(victim)
    with WireClient(asked) as client:
        client.send(request, 1)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "serves again" in broker.log, "the worker serves again", TIMEOUT_SECONDS)
    for topic in ("plain", "transactional"):
        # The controller may have died before the change was in its log.
        wait_until(lambda: set(reassign(broker.port, topic, rotated(2)).values()) == {0}, "a move", TIMEOUT_SECONDS)  # noqa: B023
    writer.wait_for_progress()
    writer.close()
    assert set(copies_of(broker.data, "plain").values()) == {1}
    assert writer.acknowledged <= set(read_committed(bootstrap, "plain"))
    committed_values = Counter(read_committed(bootstrap, "transactional"))
    assert set(committed_values.values()) == {WORKERS}
    assert writer.committed <= committed_values.keys()
    assert broker.stop() == 0, broker.log


def log_dirs(port: int, version: int = 4) -> tuple[DescribeLogDirsResponse.DescribeLogDirsResult, dict[str, list[int]]]:
    """Returns the data folder, and the sizes of the partitions in it."""
    with WireClient(port) as client:
        answer = client.call(DescribeLogDirsRequest(topics=None), version, DescribeLogDirsResponse)
    (folder,) = answer.results
    return folder, {topic.name: [partition.partition_size for partition in topic.partitions] for topic in folder.topics}


def test_each_worker_describes_the_logs_that_it_leads(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    create(broker.port, "t", 3, 1)
    produce(bootstrap, "t", 3, 5)
    described = [log_dirs(port) for port in broker.ports]
    for folder, sizes in described:
        assert folder.log_dir == str(broker.data)
        assert 0 < folder.usable_bytes <= folder.total_bytes
        assert len(sizes["t"]) == 1
        assert sizes["t"][0] > 0
    reassign(broker.port, "t", {0: [10], 1: [10], 2: [10]})
    before = sorted(size for _, sizes in described for size in sizes["t"])
    assert sorted(log_dirs(broker.port)[1]["t"]) == before, "sizes are known also for logs that are not open yet"
    assert "t" not in log_dirs(broker.ports[1], 1)[1]


@pytest.mark.java
def test_kafkas_own_tool_moves_partitions(broker: KcoordProcess, tmp_path: Path) -> None:
    jars = KafkaJars()
    bootstrap = ["--bootstrap-server", addresses(broker)]
    create(broker.port, "t", 1, 1)
    plan = tmp_path / "plan.json"
    move = {"topic": "t", "partition": 0, "replicas": [12, 10, 11]}
    plan.write_text(json.dumps({"version": 1, "partitions": [move]}))
    options = [*bootstrap, "--reassignment-json-file", str(plan)]
    assert "Successfully started partition reassignment for t-0" in jars.tool("reassign", *options, "--execute")
    assert "Reassignment of partition t-0 is completed" in jars.tool("reassign", *options, "--verify")
    assert set(metadata(broker.port, ["t"]).topics[0].partitions[0].replica_nodes) == set(NODES)


@pytest.mark.java
def test_kafkas_own_tools_elect_leaders_and_list_no_reassignment(broker: KcoordProcess) -> None:
    jars = KafkaJars()
    bootstrap = ["--bootstrap-server", addresses(broker)]
    create(broker.port, "t", 1, 1)
    (leader, _) = leaders(broker.port, "t")[0]
    other = next(node for node in NODES if node != leader)
    reassign(broker.port, "t", {0: [other, leader]})
    assert "No partition reassignments found" in jars.tool("reassign", *bootstrap, "--list")
    output = jars.tool(
        "leader-election", *bootstrap, "--election-type", "preferred", "--topic", "t", "--partition", "0"
    )
    assert "Successfully completed leader election (PREFERRED) for partitions t-0" in output
    assert leaders(broker.port, "t")[0][0] == other
