# SPDX-License-Identifier: Apache-2.0
"""Transactions of real clients: confluent-kafka (librdkafka) and kafka-python, also across kill -9 and fencing."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

import pytest
from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonTopicPartition
from kafka.structs import OffsetAndMetadata

from tests.support.confluent import create_topic
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

TIMEOUT_SECONDS = 30

StartBroker = Callable[..., KcoordProcess]


def producer_of(address: str, transactional_id: str, timeout_ms: int = 60_000) -> Producer:
    """Returns a transactional producer that does not bootstrap again.

    In librdkafka 2.16, bootstrapping again loses the handle of the only broker, and with it requests.
    """
    producer = Producer(
        {
            "bootstrap.servers": address,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "reconnect.backoff.max.ms": 500,
            "metadata.recovery.strategy": "none",
        }
    )
    producer.init_transactions(TIMEOUT_SECONDS)
    return producer


def send(producer: Producer, topic: str, values: Iterable[str], partition: int = 0) -> None:
    for value in values:
        producer.produce(topic, value.encode(), partition=partition)
    producer.flush(TIMEOUT_SECONDS)


def consume(address: str, topic: str, count: int, *, committed: bool = True, partition: int = 0) -> list[str]:
    """Returns the first `count` values that a consumer reads."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "unused",
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0)])
    values: list[str] = []

    def enough() -> bool:
        for message in consumer.consume(100, 0.2):
            assert message.error() is None, message.error()
            values.append((message.value() or b"").decode())
        return len(values) >= count

    try:
        wait_until(enough, f"{count} messages of {topic}, not {values}", TIMEOUT_SECONDS)
    finally:
        consumer.close()
    return values


def end_offset(address: str, topic: str, *, committed: bool) -> int:
    admin = AdminClient({"bootstrap.servers": address})
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    partition = TopicPartition(topic, 0)
    future = admin.list_offsets({partition: OffsetSpec.latest()}, isolation_level=level)[partition]  # type: ignore[no-untyped-call]
    return int(future.result(TIMEOUT_SECONDS).offset)


def committed_offset(address: str, group: str, topic: str) -> int:
    """Returns the stable committed offset. librdkafka gives up after some retries if a transaction is still open."""
    admin = AdminClient({"bootstrap.servers": address})
    requested = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        result = admin.list_consumer_group_offsets([requested], require_stable=True)[group].result(TIMEOUT_SECONDS)
        partition = result.topic_partitions[0]
        if partition.error is None:
            return int(partition.offset)
        assert partition.error.code() == KafkaError.UNSTABLE_OFFSET_COMMIT, partition.error
        assert time.monotonic() < deadline, partition.error


# --- confluent-kafka --------------------------------------------------------------------------------------------------


def test_committed_and_aborted_transactions(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 2)
    producer = producer_of(broker.address, name)
    for number in range(6):
        producer.begin_transaction()
        send(producer, name, [f"{number}a", f"{number}b"])
        send(producer, name, [f"{number}c"], partition=1)
        if number % 3 == 1:
            producer.abort_transaction(TIMEOUT_SECONDS)
        else:
            producer.commit_transaction(TIMEOUT_SECONDS)
    kept = (0, 2, 3, 5)
    assert consume(broker.address, name, 8) == [f"{number}{part}" for number in kept for part in "ab"]
    assert consume(broker.address, name, 4, partition=1) == [f"{number}c" for number in kept]
    everything = consume(broker.address, name, 12, committed=False)
    assert everything == [f"{number}{part}" for number in range(6) for part in "ab"]


def test_the_last_stable_offset_waits_for_the_transaction(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name)
    producer = producer_of(broker.address, name)
    producer.begin_transaction()
    send(producer, name, ["a"])
    assert end_offset(broker.address, name, committed=True) == 0
    assert end_offset(broker.address, name, committed=False) == 1
    producer.commit_transaction(TIMEOUT_SECONDS)
    wait_until(lambda: end_offset(broker.address, name, committed=True) == 2, "the marker is written")


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_offsets_are_committed_with_the_transaction(broker: KcoordProcess, name: str, protocol: str) -> None:
    source, target = f"{name}-in", f"{name}-out"
    create_topic(broker.address, source)
    create_topic(broker.address, target)
    plain = Producer({"bootstrap.servers": broker.address})
    for number in range(12):
        plain.produce(source, str(number).encode())
    plain.flush(TIMEOUT_SECONDS)
    config: dict[str, str | int | bool] = {
        "bootstrap.servers": broker.address,
        "group.id": name,
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    consumer = Consumer(config)
    consumer.subscribe([source])
    producer = producer_of(broker.address, name)
    copied: list[str] = []
    for round_number in range(3):
        batch = [message for message in consumer.consume(4, TIMEOUT_SECONDS) if message.error() is None]
        assert len(batch) == 4
        producer.begin_transaction()
        values = [(message.value() or b"").decode() for message in batch]
        send(producer, target, values)
        position = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(position, consumer.consumer_group_metadata(), TIMEOUT_SECONDS)
        if round_number == 1:
            producer.abort_transaction(TIMEOUT_SECONDS)
            assert committed_offset(broker.address, name, source) == 4
        else:
            producer.commit_transaction(TIMEOUT_SECONDS)
            assert committed_offset(broker.address, name, source) == 4 * (round_number + 1)
            copied += values
    consumer.close()
    assert consume(broker.address, target, 8) == copied


def test_a_second_producer_fences_the_first(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name)
    first = producer_of(broker.address, name)
    first.begin_transaction()
    send(first, name, ["lost"])
    second = producer_of(broker.address, name)
    second.begin_transaction()
    send(second, name, ["kept"])
    second.commit_transaction(TIMEOUT_SECONDS)
    with pytest.raises(KafkaException) as caught:
        first.commit_transaction(TIMEOUT_SECONDS)
    assert caught.value.args[0].fatal()
    assert consume(broker.address, name, 1) == ["kept"]


def test_a_transaction_that_takes_too_long_is_aborted(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name)
    producer = producer_of(broker.address, name, timeout_ms=1000)
    producer.begin_transaction()
    send(producer, name, ["lost"])
    wait_until(lambda: end_offset(broker.address, name, committed=True) == 2, "the transaction is aborted")
    with pytest.raises(KafkaException):
        producer.commit_transaction(TIMEOUT_SECONDS)
    other = producer_of(broker.address, name)
    other.begin_transaction()
    send(other, name, ["kept"])
    other.commit_transaction(TIMEOUT_SECONDS)
    assert consume(broker.address, name, 1) == ["kept"]


def test_many_transactions_in_a_row(broker: KcoordProcess, name: str) -> None:
    """The next transaction begins while the markers of the previous transaction are still being written."""
    create_topic(broker.address, name, 4)
    producer = producer_of(broker.address, name)
    for number in range(50):
        producer.begin_transaction()
        for partition in range(4):
            producer.produce(name, str(number).encode(), partition=partition)
        producer.commit_transaction(TIMEOUT_SECONDS)
    for partition in range(4):
        assert consume(broker.address, name, 50, partition=partition) == [str(number) for number in range(50)]


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def kill_and_start(broker: KcoordProcess) -> None:
    broker.stop(signal.SIGKILL)
    broker.start()


def test_a_transaction_survives_the_broker(start_broker: StartBroker, name: str) -> None:
    broker = start_broker()
    create_topic(broker.address, name)
    producer = producer_of(broker.address, name)
    producer.begin_transaction()
    send(producer, name, ["a"])
    kill_and_start(broker)
    assert end_offset(broker.address, name, committed=True) == 0
    send(producer, name, ["b"])
    producer.commit_transaction(TIMEOUT_SECONDS)
    kill_and_start(broker)
    assert consume(broker.address, name, 2) == ["a", "b"]
    producer.begin_transaction()
    send(producer, name, ["c"])
    kill_and_start(broker)
    producer.abort_transaction(TIMEOUT_SECONDS)
    producer.begin_transaction()
    send(producer, name, ["d"])
    producer.commit_transaction(TIMEOUT_SECONDS)
    assert consume(broker.address, name, 3) == ["a", "b", "d"]


def test_an_acknowledged_transaction_survives_a_kill_right_after(start_broker: StartBroker, name: str) -> None:
    """Markers may be missing when the broker dies. The next start completes the transactions that were decided."""
    broker = start_broker()
    source = f"{name}-in"
    for topic in (name, source):
        create_topic(broker.address, topic, 3)
    group = Consumer({"bootstrap.servers": broker.address, "group.id": name})
    producer = producer_of(broker.address, name)
    for number in range(5):
        producer.begin_transaction()
        for partition in range(3):
            producer.produce(name, str(number).encode(), partition=partition)
        offsets = [TopicPartition(source, 0, number + 1)]
        producer.send_offsets_to_transaction(offsets, group.consumer_group_metadata(), TIMEOUT_SECONDS)
        producer.commit_transaction(TIMEOUT_SECONDS)
        kill_and_start(broker)
        assert committed_offset(broker.address, name, source) == number + 1
    for partition in range(3):
        assert consume(broker.address, name, 5, partition=partition) == [str(number) for number in range(5)]
    group.close()


# --- kafka-python -----------------------------------------------------------------------------------------------------


def test_kafka_python(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name)
    producer = KafkaProducer(bootstrap_servers=broker.address, transactional_id=name)
    producer.init_transactions()
    partition = PythonTopicPartition(name, 0)
    for number in range(4):
        producer.begin_transaction()
        producer.send(name, str(number).encode(), partition=0).get(TIMEOUT_SECONDS)
        producer.send_offsets_to_transaction({partition: OffsetAndMetadata(number + 1, "", -1)}, name)
        if number == 3:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    consumer = KafkaConsumer(
        bootstrap_servers=broker.address,
        group_id=name,
        isolation_level="read_committed",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=3000,
    )
    consumer.assign([partition])
    assert consumer.committed(partition) == 3
    consumer.seek_to_beginning(partition)
    assert [record.value for record in consumer] == [b"0", b"1", b"2"]
    consumer.close()
