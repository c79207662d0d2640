# SPDX-License-Identifier: Apache-2.0
"""Three worker processes are three brokers for clients, which share groups, topics and transactions."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonTopicPartition
from kafka.structs import OffsetAndMetadata

from kcoord.runtime.serde import partition_for
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kcoord_protocol.record_batch import decode_records, iter_headers
from tests.integration.wire import WireClient
from tests.support.client_races import note_retry
from tests.support.confluent import PolledConsumer, committed, partitions_of, produce, wait_for_split
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

WORKERS = 3
SHARDS = 8
TIMEOUT_SECONDS = 30


def settings(workers: int = WORKERS) -> dict[str, str]:
    return {
        **FAST,
        "offsets.topic.num.partitions": str(SHARDS),
        "transaction.state.log.num.partitions": str(SHARDS),
        "group.coordinator.threads": str(workers),
        "node.id": "10",
    }


@pytest.fixture(scope="module")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    """A broker for tests that end none of its processes."""
    process = KcoordProcess(tmp_path_factory.mktemp("kcoord"), settings()).start()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, settings()).start()
    yield process
    process.kill()


def addresses(broker: KcoordProcess) -> str:
    return ",".join(f"127.0.0.1:{port}" for port in broker.ports)


def group_on(worker: int, prefix: str = "group") -> str:
    """Returns a group id whose coordinator is this worker."""
    return next(
        f"{prefix}-{number}"
        for number in range(1000)
        if partition_for(f"{prefix}-{number}", SHARDS) % WORKERS == worker
    )


def metadata(port: int, topics: list[str] | None = None) -> MetadataResponse:
    requested = None if topics is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in topics]
    with WireClient(port) as client:
        return client.call(MetadataRequest(topics=requested, allow_auto_topic_creation=False), 12, MetadataResponse)


def create(port: int, topic: str, partitions: int, factor: int) -> CreateTopicsResponse.CreatableTopicResult:
    creatable = CreateTopicsRequest.CreatableTopic(name=topic, num_partitions=partitions, replication_factor=factor)
    with WireClient(port) as client:
        answer = client.call(CreateTopicsRequest(topics=[creatable], timeout_ms=10_000), 7, CreateTopicsResponse)
    return answer.topics[0]


# --- the cluster ------------------------------------------------------------------------------------------------------


def test_every_worker_names_all_brokers_and_the_controller(shared_broker: KcoordProcess) -> None:
    expected = {10 + number: port for number, port in enumerate(shared_broker.ports)}
    for port in shared_broker.ports:
        answer = metadata(port, [])
        assert {node.node_id: node.port for node in answer.brokers} == expected
        assert answer.controller_id == 10
        with WireClient(port) as client:
            cluster = client.call(DescribeClusterRequest(), 1, DescribeClusterResponse)
        assert {node.broker_id: node.port for node in cluster.brokers} == expected


def test_every_worker_knows_a_topic_when_the_response_to_its_creation_is_sent(shared_broker: KcoordProcess) -> None:
    for number, port in enumerate(shared_broker.ports * 3):
        topic = f"known-{number}"
        assert create(port, topic, 4, 2).error_code == 0
        for other in shared_broker.ports:
            known_topic = metadata(other, [topic]).topics[0]
            assert known_topic.error_code == 0
            assert sorted(partition.leader_id for partition in known_topic.partitions) != [10, 10, 10, 10]


def test_a_partition_is_newer_than_groups_of_all_workers(shared_broker: KcoordProcess) -> None:
    """The topic grows right after each group is created, so equal times would be detected (KIP-1327)."""
    port = shared_broker.port
    assert create(port, "growing", 1, 1).error_code == 0
    with WireClient(port) as client:
        client.call(FindCoordinatorRequest(key="g"), 3, FindCoordinatorResponse)
    for count in range(2, 14):
        worker = count % WORKERS
        group_id = group_on(worker, f"older-{count}")
        request = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id="m",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=["growing"],
            topic_partitions=[],
        )
        with WireClient(shared_broker.ports[worker]) as coordinator, WireClient(port) as client:
            joined = coordinator.call(request, 2, ConsumerGroupHeartbeatResponse)
            assert joined.error_code == 0
            topic = CreatePartitionsRequest.CreatePartitionsTopic(name="growing", count=count, assignments=None)
            grown = client.call(CreatePartitionsRequest(topics=[topic], timeout_ms=5000), 3, CreatePartitionsResponse)
            assert [result.error_code for result in grown.results] == [0]
            asked = MetadataRequest.MetadataRequestTopic(name="growing")
            answer = client.call(MetadataRequest(topics=[asked]), 14, MetadataResponse)
        times = {partition.partition_index: partition.creation_time_ms for partition in answer.topics[0].partitions}
        assert times[count - 1] > joined.group_creation_time_ms >= times[count - 2]


def test_replication_factors_are_checked_and_reported(shared_broker: KcoordProcess) -> None:
    result = create(shared_broker.ports[1], "replicated", 3, 3)
    assert (result.error_code, result.num_partitions, result.replication_factor) == (0, 3, 3)
    for partition in metadata(shared_broker.ports[2], ["replicated"]).topics[0].partitions:
        assert partition.replica_nodes[0] == partition.leader_id
        assert sorted(partition.replica_nodes) == sorted(partition.isr_nodes) == [10, 11, 12]
    refused = create(shared_broker.ports[2], "too-many", 1, 4)
    assert refused.error_code == Errors.INVALID_REPLICATION_FACTOR
    assert refused.error_message == (
        "Unable to replicate the partition 4 time(s): The target replication factor of 4 cannot be reached because "
        "only 3 broker(s) are registered or some brokers have all their log directories cordoned."
    )


def test_a_broker_config_takes_effect_only_on_its_broker(shared_broker: KcoordProcess) -> None:
    setting = IncrementalAlterConfigsRequest.AlterableConfig(name="max.connections", config_operation=0, value="777")
    change = IncrementalAlterConfigsRequest.AlterConfigsResource(resource_type=4, resource_name="12", configs=[setting])
    with WireClient(shared_broker.ports[1]) as client:
        answer = client.call(IncrementalAlterConfigsRequest(resources=[change]), 1, IncrementalAlterConfigsResponse)
    assert answer.responses[0].error_code == 0
    limits = {10 + number: described(port, str(10 + number)) for number, port in enumerate(shared_broker.ports)}
    assert limits == {10: "20000", 11: "20000", 12: "777"}


def described(port: int, broker_id: str) -> str | None:
    """Returns max.connections of a broker."""
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=4, resource_name=broker_id, configuration_keys=["max.connections"]
    )
    with WireClient(port) as client:
        answer = client.call(DescribeConfigsRequest(resources=[resource]), 4, DescribeConfigsResponse)
    assert answer.results[0].error_code == 0
    return answer.results[0].configs[0].value


def test_no_producer_id_is_given_twice(shared_broker: KcoordProcess) -> None:
    ids = []
    for port in shared_broker.ports * 4:
        with WireClient(port) as client:
            ids.append(client.call(InitProducerIdRequest(transactional_id=None), 4, InitProducerIdResponse).producer_id)
    assert len(set(ids)) == len(ids)
    assert min(ids) >= 0


# --- groups -----------------------------------------------------------------------------------------------------------


def test_each_worker_coordinates_only_its_groups(shared_broker: KcoordProcess) -> None:
    for worker in range(WORKERS):
        group_id = group_on(worker)
        for port in shared_broker.ports:
            with WireClient(port) as client:
                request = FindCoordinatorRequest(key_type=0, coordinator_keys=[group_id])
                coordinator_node = client.call(request, 4, FindCoordinatorResponse).coordinators[0]
                assert (coordinator_node.error_code, coordinator_node.node_id) == (0, 10 + worker)
                assert coordinator_node.port == shared_broker.ports[worker]
                beat = HeartbeatRequest(group_id=group_id, generation_id=1, member_id="m")
                error = client.call(beat, 4, HeartbeatResponse).error_code
                is_coordinator = port == shared_broker.ports[worker]
                assert error == (Errors.UNKNOWN_MEMBER_ID if is_coordinator else Errors.NOT_COORDINATOR)


def test_groups_of_both_types_on_every_worker(shared_broker: KcoordProcess) -> None:
    bootstrap = addresses(shared_broker)
    create(shared_broker.port, "spread", 6, 1)
    produce(bootstrap, "spread", 6, 5)
    groups = {}
    for worker in range(WORKERS):
        groups[group_on(worker, "modern")] = worker
        groups[group_on(worker, "classic")] = worker
    for group_id in groups:
        if group_id.startswith("modern"):
            with PolledConsumer(bootstrap, group_id, ["spread"], commit_each=True) as member:
                wait_for_split([member], partitions_of("spread", 6), TIMEOUT_SECONDS)
                member.wait_for(30, TIMEOUT_SECONDS)
        else:
            assert read_as_classic_group(bootstrap, group_id, "spread", 30) == 30
    assert set(committed(bootstrap, group_on(2, "modern"), sorted(partitions_of("spread", 6))).values()) == {5}
    for number, port in enumerate(shared_broker.ports):
        with WireClient(port) as client:
            listed = {group.group_id for group in client.call(ListGroupsRequest(), 5, ListGroupsResponse).groups}
        assert listed & groups.keys() == {group_id for group_id, worker in groups.items() if worker == number}
    admin = AdminClient({"bootstrap.servers": bootstrap})
    everywhere = {group.group_id for group in admin.list_consumer_groups().result(TIMEOUT_SECONDS).valid}
    assert groups.keys() <= everywhere
    descriptions = admin.describe_consumer_groups(list(groups))
    for group_id, future in descriptions.items():
        assert future.result(TIMEOUT_SECONDS).coordinator.id == 10 + groups[group_id]


def read_as_classic_group(bootstrap: str, group_id: str, topic: str, count: int, *, retries: bool = True) -> int:
    """Returns how many of `count` messages a kafka-python consumer reads as the only member of a group.

    If the consumer joins before it knows the topic, it assigns itself nothing, and does not join again.
    """
    consumer = KafkaConsumer(
        topic, bootstrap_servers=bootstrap.split(","), group_id=group_id, auto_offset_reset="earliest"
    )
    seen = 0
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while seen < count and time.monotonic() < deadline:
        seen += sum(len(messages) for messages in consumer.poll(timeout_ms=500).values())
    owns_nothing = not consumer.assignment()
    consumer.close()
    if retries and not seen and owns_nothing:
        note_retry("kafka-python forgets to rebalance when it learns of a topic")
        return read_as_classic_group(bootstrap, group_id, topic, count, retries=False)
    return seen


# --- transactions -----------------------------------------------------------------------------------------------------


def transactional_id_on(worker: int) -> str:
    return group_on(worker, "producer")


@pytest.mark.parametrize("worker", range(WORKERS))
@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction_over_all_workers(shared_broker: KcoordProcess, worker: int, commits: bool) -> None:
    bootstrap = addresses(shared_broker)
    topic = f"transaction-{worker}-{commits}"
    create(shared_broker.port, topic, WORKERS, 1)
    group_id = group_on((worker + 1) % WORKERS, f"offsets-{commits}")
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": f"{transactional_id_on(worker)}",
            "metadata.recovery.strategy": "none",
        }
    )
    producer.init_transactions(TIMEOUT_SECONDS)
    producer.begin_transaction()
    for partition in range(WORKERS):
        producer.produce(topic, b"value", partition=partition)
    producer.flush(TIMEOUT_SECONDS)
    group = ConsumerGroupTopicPartitions(group_id).group_id
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    producer.send_offsets_to_transaction(
        [TopicPartition(topic, 0, 7)], consumer.consumer_group_metadata(), TIMEOUT_SECONDS
    )
    (producer.commit_transaction if commits else producer.abort_transaction)(TIMEOUT_SECONDS)
    consumer.close()
    expected = WORKERS if commits else 0
    wait_until(
        lambda: committed(bootstrap, group_id, [(topic, 0)]).get((topic, 0), -1) == (7 if commits else -1001),
        "the committed offset",
        TIMEOUT_SECONDS,
    )
    assert len(read_committed(bootstrap, topic)) == expected


def copies_of(folder: Path, topic: str) -> Counter[tuple[bytes | None, int]]:
    """Returns how often the logs of a topic have each message from each epoch of its producer.

    If a request is rejected because of the one before it, librdkafka continues with a new epoch. It sends everything
    again then that has no response, and no broker can know what of it is in the log.
    """
    copies: Counter[tuple[bytes | None, int]] = Counter()
    for file in folder.glob(f"{topic}-*/*.log"):
        data = file.read_bytes()
        for position, header in iter_headers(data):
            copies.update((record.value, header.producer_epoch) for record in decode_records(data, position))
    return copies


def read_committed(bootstrap: str, topic: str) -> list[bytes]:
    """Returns all values up to the last stable offsets, which are the ends of the partitions here."""
    partitions = [PythonTopicPartition(topic, number) for number in range(WORKERS)]
    reader = KafkaConsumer(bootstrap_servers=bootstrap.split(","), isolation_level="read_committed")
    try:
        reader.assign(partitions)
        reader.seek_to_beginning()
        ends = reader.end_offsets(partitions)
        values: list[bytes] = []
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline and any(
            reader.position(partition) < ends[partition] for partition in partitions
        ):
            for messages in reader.poll(timeout_ms=200).values():
                values += [message.value for message in messages]
        return values
    finally:
        reader.close()


# --- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node_id", [10, 11])
def test_a_killed_worker_restarts_while_the_other_workers_serve(broker: KcoordProcess, node_id: int) -> None:
    bootstrap = addresses(broker)
    create(broker.port, "kept", 6, 1)
    produce(bootstrap, "kept", 6, 3)
    groups = [group_on(worker) for worker in range(WORKERS)]
    commit(bootstrap, groups, "kept", 2)
    os.kill(broker.worker_pid(node_id), signal.SIGKILL)
    survivor = 12 - 10
    with WireClient(broker.ports[survivor]) as client:
        request = HeartbeatRequest(group_id=groups[survivor], generation_id=1, member_id="m")
        assert client.call(request, 4, HeartbeatResponse).error_code == Errors.UNKNOWN_MEMBER_ID
    wait_until(lambda: "serves again" in broker.log, "the worker is back", TIMEOUT_SECONDS)
    for group_id in groups:
        assert set(committed(bootstrap, group_id, sorted(partitions_of("kept", 6))).values()) == {2}
    assert create(broker.ports[survivor], "later", 3, 3).error_code == 0
    produce(bootstrap, "kept", 6, 1)
    assert total_records(bootstrap, "kept", 6) == 24
    assert broker.stop() == 0, broker.log


def test_no_acknowledged_record_is_lost_while_each_worker_is_killed_once(broker: KcoordProcess) -> None:
    bootstrap = addresses(broker)
    for topic in ("plain", "transactional"):
        create(broker.port, topic, WORKERS, 1)
    writer = Writer(bootstrap)
    for count, node_id in enumerate((10, 11, 12), 1):
        writer.wait_for_progress()
        os.kill(broker.worker_pid(node_id), signal.SIGKILL)
        wait_until(lambda: broker.log.count("serves again") == count, "the worker is back", TIMEOUT_SECONDS)  # noqa: B023
    writer.wait_for_progress()
    writer.close()
    assert set(copies_of(broker.data, "plain").values()) == {1}, "each message of an idempotent producer exists once"
    assert writer.acknowledged <= set(read_committed(bootstrap, "plain"))
    committed_values = Counter(read_committed(bootstrap, "transactional"))
    assert set(committed_values.values()) == {WORKERS}, "a transaction exists as a whole"
    assert writer.committed <= committed_values.keys()


class Writer:
    """An idempotent and a transactional producer that write to all partitions until they are closed."""

    def __init__(self, bootstrap: str) -> None:
        self.acknowledged: set[bytes] = set()
        self.committed: set[bytes] = set()
        self._ending = threading.Event()
        self._plain = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 2})
        self._transactional = Producer({"bootstrap.servers": bootstrap, "transactional.id": "t"})
        self._transactional.init_transactions(TIMEOUT_SECONDS)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._produce, self._transact)]
        for thread in self._threads:
            thread.start()

    def _produce(self) -> None:
        for number in itertools.count():
            if self._ending.wait(0.002):
                break
            self._plain.produce("plain", b"%d" % number, partition=number % WORKERS, on_delivery=self._delivered)
            self._plain.poll(0)
        self._plain.flush(TIMEOUT_SECONDS)

    def _delivered(self, error: object, message: Message) -> None:
        if error is None:
            self.acknowledged.add(message.value() or b"")

    def _transact(self) -> None:
        for number in itertools.count():
            if self._ending.is_set():
                return
            try:
                self._transactional.begin_transaction()
                for partition in range(WORKERS):
                    self._transactional.produce("transactional", b"%d" % number, partition=partition)
                self._transactional.commit_transaction(TIMEOUT_SECONDS)
                self.committed.add(b"%d" % number)
            except KafkaException:
                self._transactional.abort_transaction(TIMEOUT_SECONDS)

    def wait_for_progress(self) -> None:
        plain, transactional = len(self.acknowledged), len(self.committed)
        wait_until(
            lambda: len(self.acknowledged) > plain + 20 and len(self.committed) > transactional + 2,
            "both producers make progress",
            2 * TIMEOUT_SECONDS,
        )

    def close(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_SECONDS)
            assert not thread.is_alive()


def commit(bootstrap: str, groups: list[str], topic: str, offset: int) -> None:
    for group_id in groups:
        consumer = KafkaConsumer(bootstrap_servers=bootstrap.split(","), group_id=group_id, enable_auto_commit=False)
        partitions = [PythonTopicPartition(topic, number) for number in range(6)]
        consumer.assign(partitions)
        consumer.commit({partition: OffsetAndMetadata(offset, "", -1) for partition in partitions})
        consumer.close()


def total_records(bootstrap: str, topic: str, partitions: int) -> int:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap.split(","))
    try:
        ends = consumer.end_offsets([PythonTopicPartition(topic, number) for number in range(partitions)])
        return sum(ends.values())
    finally:
        consumer.close()


def test_the_number_of_workers_may_change(tmp_path: Path) -> None:
    broker = KcoordProcess(tmp_path, settings(3)).start()
    try:
        create(broker.port, "moved", 6, 3)
        produce(addresses(broker), "moved", 6, 2)
        groups = [group_on(worker) for worker in range(WORKERS)]
        commit(addresses(broker), groups, "moved", 1)
        total = 12
        for count, how in ((1, signal.SIGHUP), (2, signal.SIGKILL), (3, signal.SIGTERM)):
            broker.stop(how)
            broker.ports = []
            broker.overrides = settings(count)
            broker.start()
            bootstrap = addresses(broker)
            topic = metadata(broker.ports[-1], ["moved"]).topics[0]
            assert {partition.leader_id for partition in topic.partitions} == {10 + number for number in range(count)}
            for group_id in groups:
                assert set(committed(bootstrap, group_id, sorted(partitions_of("moved", 6))).values()) == {1}
            produce(bootstrap, "moved", 6, 1)
            total += 6
            assert total_records(bootstrap, "moved", 6) == total
        assert broker.stop() == 0, broker.log
        assert (broker.data / ".kafka_cleanshutdown").exists()
        assert not (broker.data / ".workers").exists()
    finally:
        broker.kill()


def test_sigterm_ends_all_within_five_seconds(broker: KcoordProcess) -> None:
    pids = broker.worker_pids()
    assert len(pids) == WORKERS
    producer = KafkaProducer(bootstrap_servers=addresses(broker).split(","))
    producer.send("last", b"words").get(TIMEOUT_SECONDS)
    began = time.monotonic()
    assert broker.stop() == 0, broker.log
    assert time.monotonic() - began < 5
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    producer.close(timeout=0)


def test_the_error_names_a_port_that_is_in_use(tmp_path: Path, shared_broker: KcoordProcess) -> None:
    taken = shared_broker.ports[1]
    other = KcoordProcess(tmp_path, {**settings(), "kcoord.worker.ports": f"0,{taken},0"})
    with pytest.raises(AssertionError, match=f"cannot listen on PLAINTEXT://127.0.0.1:{taken}"):
        other.start()


@pytest.mark.java
def test_kafkas_own_tools_see_three_brokers(shared_broker: KcoordProcess) -> None:
    jars = KafkaJars()
    server = ("--bootstrap-server", f"127.0.0.1:{shared_broker.ports[1]}")
    jars.tool("topics", *server, "--create", "--topic", "by-tool", "--partitions", "3", "--replication-factor", "3")
    described = jars.tool("topics", *server, "--describe", "--topic", "by-tool")
    assert "ReplicationFactor: 3" in described
    assert {line.split("Leader: ")[1].split()[0] for line in described.splitlines() if "Leader: " in line} == {
        "10",
        "11",
        "12",
    }
    groups = [group_on(worker, "tool") for worker in range(WORKERS)]
    create(shared_broker.port, "tool-offsets", 6, 1)
    commit(addresses(shared_broker), groups, "tool-offsets", 0)
    listed = jars.tool("consumer-groups", *server, "--describe", "--all-groups", "--state")
    for worker, group_id in enumerate(groups):
        line = next(line for line in listed.splitlines() if line.startswith(group_id))
        assert f"({10 + worker})" in line


def test_new_topics_by_confluent_are_spread(shared_broker: KcoordProcess) -> None:
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{shared_broker.ports[2]}"})
    admin.create_topics([NewTopic("by-confluent", 6, 2)])["by-confluent"].result(TIMEOUT_SECONDS)
    topic = admin.list_topics("by-confluent", timeout=TIMEOUT_SECONDS).topics["by-confluent"]
    leaders = [topic.partitions[number].leader for number in range(6)]
    assert sorted(leaders) == [10, 10, 11, 11, 12, 12]
