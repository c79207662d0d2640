# SPDX-License-Identifier: Apache-2.0
"""`kcoord log import` of the folders of a real Kafka 4.3.1 broker: what is served then is what Kafka served."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kcoord.cli import main
from tests.support.confluent import PolledConsumer, produce
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess

pytestmark = pytest.mark.java

QUIET = {"log_level": 0}


def transaction(address: str, transactional_id: str, offset: int, end: str) -> Producer:
    """Writes to `out` and commits `offset` of orders-0 for the group `in-transactions`; `end` names what follows."""
    producer = Producer({"bootstrap.servers": address, "transactional.id": transactional_id, **QUIET})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("out", f"{transactional_id}:{offset}".encode())
    consumer = Consumer({"bootstrap.servers": address, "group.id": "in-transactions", **QUIET})
    metadata = consumer.consumer_group_metadata()
    producer.send_offsets_to_transaction([TopicPartition("orders", 0, offset)], metadata, 30)
    consumer.close()
    # An abort would drop what was not sent yet.
    producer.flush(30)
    if end == "commit":
        producer.commit_transaction(30)
    elif end == "abort":
        producer.abort_transaction(30)
    return producer


def use(address: str) -> Producer:
    """Topics, groups of each kind, transactions of each outcome. The producer that is returned has one open."""
    admin = AdminClient({"bootstrap.servers": address, **QUIET})
    topics = [NewTopic("orders", 3, 1, config={"retention.ms": "3600000"}), NewTopic("out", 1, 1)]
    for future in admin.create_topics(topics).values():
        future.result(20)
    produce(address, "orders", 3, 20)
    with PolledConsumer(address, "readers", ["orders"], commit_each=True) as member:
        member.wait_for(60)
    with PolledConsumer(address, "static-readers", ["orders"], commit_each=True, instance_id="one") as member:
        member.wait_for(60)
    with PolledConsumer(address, "classic-readers", ["orders"], commit_each=True, classic="range") as member:
        member.wait_for(60)
    simple = Consumer({"bootstrap.servers": address, "group.id": "simple", "enable.auto.commit": False, **QUIET})
    simple.commit(offsets=[TopicPartition("orders", 1, 5, metadata="nötig")], asynchronous=False)
    simple.close()
    transaction(address, "first", 7, "commit")
    transaction(address, "second", 9, "abort")
    return transaction(address, "third", 11, "nothing")


def descriptions(jars: KafkaJars, address: str) -> dict[str, list[str]]:
    """What Kafka's tools say, without what differs between two brokers."""
    server = ("--bootstrap-server", address)
    groups = jars.tool("consumer-groups", *server, "--describe", "--all-groups")
    states = jars.tool("consumer-groups", *server, "--describe", "--all-groups", "--state")
    topics = jars.tool("topics", *server, "--describe", "--exclude-internal")
    return {
        "offsets": sorted(line for line in groups.splitlines() if " orders " in line),
        "states": sorted(
            re.sub(r"127.0.0.1:\d+ +\(1\)", "", line) for line in states.splitlines() if "127.0.0.1" in line
        ),
        "topics": sorted(re.sub(r",?min.insync.replicas=1", "", line) for line in topics.splitlines()),
    }


def read_committed(address: str, topic: str, count: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": address, "group.id": "looks-on", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    for message in consumer.consume(count + 1, 5):
        assert message.error() is None
        value = message.value()
        assert value is not None
        values.append(value)
    consumer.close()
    return values


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture(scope="module")
def kafka(jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    folder = tmp_path_factory.mktemp("kafka")
    broker = KafkaBroker(
        jars,
        folder,
        offsets_topic_num_partitions="5",
        transaction_state_log_num_partitions="2",
        group_min_session_timeout_ms="1000",
    )
    yield broker
    broker.stop()


def test_groups_offsets_topics_and_data_are_served_as_kafka_served_them(
    kafka: KafkaBroker, jars: KafkaJars, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = use(kafka.address)
    before = descriptions(jars, kafka.address)
    kafka.stop()
    assert main(["log", "verify", str(kafka.data)]) == 0
    # A static member that is away still belongs to its group.
    broker = KcoordProcess(tmp_path, {**FAST, "node.id": "1", "group.consumer.session.timeout.ms": "45000"})
    partitions = broker.overrides["offsets.topic.num.partitions"]
    command = ["log", "import", str(kafka.data), "--into", str(broker.data), "--override", "node.id=1"]
    assert main([*command, "--override", f"offsets.topic.num.partitions={partitions}"]) == 0
    assert main(["log", "verify", str(broker.data)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"transactional offsets left out: never decided +1", said)
    assert re.search(r"open transactions in topics ended +1", said)
    broker.start()
    try:
        after = descriptions(jars, broker.address)
        for what, lines in before.items():
            assert after[what] == lines, what
        # The second transaction was aborted by its producer, the third by the import.
        assert read_committed(broker.address, "out", 1) == [b"first:7"]
        produce(broker.address, "orders", 3, 1)
        with PolledConsumer(broker.address, "readers", ["orders"]) as resumed:
            resumed.wait_for(3)
            assert sorted(resumed.seen) == [("orders", number, 20) for number in range(3)]
    finally:
        pending.purge()
        broker.stop()
