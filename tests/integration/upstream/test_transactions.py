# SPDX-License-Identifier: Apache-2.0
"""Offsets in transactions of an upstream: Apache Kafka 4.3.1 with each transaction.version, and kcoord."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaProducer
from kafka import TopicPartition as PythonTopicPartition
from kafka.structs import OffsetAndMetadata as PythonOffset

from kcoord.client import Consumer as KcoordConsumer
from kcoord.client import Producer as KcoordProducer
from kcoord.client.types import OffsetAndMetadata
from kcoord.client.types import TopicPartition as KcoordPartition
from kcoord.testing import start_broker
from tests.exactly_once.applications import Application, copy_command
from tests.integration.clients.test_transactions import committed_offset, consume, producer_of, send
from tests.integration.upstream.gateways import Gateways
from tests.support.confluent import create_topic
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

SECONDS = 30
NUMBERS = count()
FeatureLevel = Callable[[int], None]


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture(scope="module")
def kafka(jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    settings = {"transaction_abort_timed_out_transaction_cleanup_interval_ms": "200"}
    broker = KafkaBroker(jars, tmp_path_factory.mktemp("kafka"), **settings)
    yield broker
    broker.stop()


@pytest.fixture(scope="module")
def before_kafka(kafka: KafkaBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    gateways = Gateways(kafka.address, tmp_path_factory)
    yield gateways.start(
        kcoord_upstream_metadata_max_age_ms="100",
        kcoord_upstream_import="off",
        kcoord_upstream_ports=str(free_ports(2)),
    )
    gateways.stop()


@pytest.fixture(scope="module")
def before_kcoord(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    with start_broker() as upstream:
        gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
        yield gateways.start(kcoord_upstream_import="off", kcoord_upstream_ports=str(free_ports(2)))
        gateways.stop()


@pytest.fixture(params=["before_kafka", "before_kcoord"])
def gateway(request: pytest.FixtureRequest) -> KcoordProcess:
    process: KcoordProcess = request.getfixturevalue(request.param)
    return process


@pytest.fixture
def name(gateway: KcoordProcess) -> str:
    """The name of a group and of a topic, which exists."""
    name = f"t{next(NUMBERS)}"
    create_topic(gateway.address, name)
    return name


def offsets_of(name: str, offset: int) -> list[TopicPartition]:
    return [TopicPartition(name, 0, offset)]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_confluent_kafka_copies_a_topic(gateway: KcoordProcess, name: str, protocol: str) -> None:
    source, target = name, f"{name}-out"
    create_topic(gateway.address, target)
    plain = Producer({"bootstrap.servers": gateway.address})
    for number in range(12):
        plain.produce(source, str(number).encode())
    plain.flush(SECONDS)
    consumer = Consumer(
        {
            "bootstrap.servers": gateway.address,
            "group.id": name,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([source])
    producer = producer_of(gateway.address, name)
    copied: list[str] = []
    for round_number in range(3):
        batch = [message for message in consumer.consume(4, SECONDS) if message.error() is None]
        producer.begin_transaction()
        values = [(message.value() or b"").decode() for message in batch]
        send(producer, target, values)
        position = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata(), SECONDS)
        if round_number == 1:
            producer.abort_transaction(SECONDS)
            assert committed_offset(gateway.address, name, source) == 4
        else:
            producer.commit_transaction(SECONDS)
            assert committed_offset(gateway.address, name, source) == 4 * (round_number + 1)
            copied += values
    consumer.close()
    assert consume(gateway.address, target, 8) == copied


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_the_java_client_copies_a_topic(before_kafka: KcoordProcess, tmp_path: Path, protocol: str) -> None:
    name = f"java-{protocol}"
    for topic in (name, f"{name}-out"):
        create_topic(before_kafka.address, topic)
    plain = Producer({"bootstrap.servers": before_kafka.address})
    for number in range(200):
        plain.produce(name, str(number).encode())
    plain.flush(SECONDS)
    command = copy_command(before_kafka.address, f"{name}-out", name, protocol, source=name)
    with Application(command, tmp_path / "copy.txt") as application:
        wait_until(lambda: application.output.count("committed") >= 4, "the topic is copied", SECONDS)
        assert consume(before_kafka.address, f"{name}-out", 200) == [str(number) for number in range(200)]
        assert "restart" not in application.output
    assert committed_offset(before_kafka.address, f"{name}-out", name) == 200


def test_kafka_python(gateway: KcoordProcess, name: str) -> None:
    producer = KafkaProducer(bootstrap_servers=gateway.address, transactional_id=name)
    producer.init_transactions()
    partition = PythonTopicPartition(name, 0)
    for number in range(4):
        producer.begin_transaction()
        producer.send(name, str(number).encode(), partition=0).get(SECONDS)
        producer.send_offsets_to_transaction({partition: PythonOffset(number + 1, "", -1)}, name)
        if number == 3:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    assert committed_offset(gateway.address, name, name) == 3
    assert consume(gateway.address, name, 3) == ["0", "1", "2"]


async def test_kcoord_client(gateway: KcoordProcess, name: str) -> None:
    async with (
        KcoordConsumer(bootstrap_servers=gateway.address, group_id=name) as consumer,
        KcoordProducer(bootstrap_servers=gateway.address, transactional_id=name) as producer,
    ):
        await producer.init_transactions()
        for number in range(4):
            await producer.begin_transaction()
            await producer.send(name, value=str(number).encode())
            offsets = {KcoordPartition(name, 0): OffsetAndMetadata(number + 1)}
            await producer.send_offsets_to_transaction(offsets, consumer.group_metadata)
            await (producer.abort_transaction() if number == 3 else producer.commit_transaction())
    assert committed_offset(gateway.address, name, name) == 3
    assert consume(gateway.address, name, 3) == ["0", "1", "2"]


def test_offsets_of_an_open_transaction_are_unstable_also_after_kill_9(gateway: KcoordProcess, name: str) -> None:
    producer = producer_of(gateway.address, name)
    group = Consumer({"bootstrap.servers": gateway.address, "group.id": name})
    producer.begin_transaction()
    producer.send_offsets_to_transaction(offsets_of(name, 5), group.consumer_group_metadata(), SECONDS)
    for _ in range(2):
        with pytest.raises(KafkaException) as unstable:
            group.committed([TopicPartition(name, 0)], timeout=0.5)
        assert unstable.value.args[0].name() in ("_TIMED_OUT", "UNSTABLE_OFFSET_COMMIT")
        gateway.restart(signal.SIGKILL)
    producer.commit_transaction(SECONDS)
    assert committed_offset(gateway.address, name, name) == 5
    gateway.restart(signal.SIGKILL)
    assert committed_offset(gateway.address, name, name) == 5
    group.close()


def test_a_producer_that_is_fenced_commits_no_offsets(gateway: KcoordProcess, name: str) -> None:
    group = Consumer({"bootstrap.servers": gateway.address, "group.id": name})
    first = producer_of(gateway.address, name)
    first.begin_transaction()
    first.send_offsets_to_transaction(offsets_of(name, 5), group.consumer_group_metadata(), SECONDS)
    second = producer_of(gateway.address, name)
    second.begin_transaction()
    second.send_offsets_to_transaction(offsets_of(name, 7), group.consumer_group_metadata(), SECONDS)
    with pytest.raises(KafkaException):
        first.send_offsets_to_transaction(offsets_of(name, 9), group.consumer_group_metadata(), SECONDS)
    second.commit_transaction(SECONDS)
    assert committed_offset(gateway.address, name, name) == 7
    group.close()


def test_a_transaction_that_takes_too_long_is_aborted_with_its_offsets(gateway: KcoordProcess, name: str) -> None:
    group = Consumer({"bootstrap.servers": gateway.address, "group.id": name})
    late = producer_of(gateway.address, name, timeout_ms=1_000)
    late.begin_transaction()
    late.send_offsets_to_transaction(offsets_of(name, 5), group.consumer_group_metadata(), SECONDS)
    assert committed_offset(gateway.address, name, name) == -1001
    with pytest.raises(KafkaException):
        late.commit_transaction(SECONDS)
    other = producer_of(gateway.address, name)
    other.begin_transaction()
    other.send_offsets_to_transaction(offsets_of(name, 7), group.consumer_group_metadata(), SECONDS)
    other.commit_transaction(SECONDS)
    assert committed_offset(gateway.address, name, name) == 7
    group.close()


@pytest.mark.parametrize("level", [2, 1, 0])
def test_each_transaction_version_of_the_upstream(
    before_kafka: KcoordProcess, kafka: KafkaBroker, jars: KafkaJars, level: int
) -> None:
    """Clients use the first transaction protocol, whatever the upstream has. The other tests have run with 2."""
    if level < 2:
        feature = f"transaction.version={level}"
        jars.tool("features", "--bootstrap-server", kafka.address, "downgrade", "--feature", feature)
    name = f"level{level}"
    create_topic(before_kafka.address, name)
    producer = producer_of(before_kafka.address, name)
    group = Consumer({"bootstrap.servers": before_kafka.address, "group.id": name}).consumer_group_metadata()
    expected = -1001
    for offset in range(1, 7):
        producer.begin_transaction()
        send(producer, name, [str(offset)])
        producer.send_offsets_to_transaction(offsets_of(name, offset), group, SECONDS)
        if offset % 3:
            producer.commit_transaction(SECONDS)
            expected = offset
        else:
            producer.abort_transaction(SECONDS)
        assert committed_offset(before_kafka.address, name, name) == expected
    assert consume(before_kafka.address, name, 4) == ["1", "2", "4", "5"]
