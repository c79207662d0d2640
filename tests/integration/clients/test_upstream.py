# SPDX-License-Identifier: Apache-2.0
"""kcoord in front of Apache Kafka 4.3.1 that has no consumer groups of KIP-848: real clients, unchanged."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from kcoord.client import Consumer as KcoordConsumer
from kcoord.client import Producer as KcoordProducer
from tests.integration.clients.moving import confluent_application, java_application, move_and_return
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

COUNT = 60
CONSUME_SECONDS = 30.0
FIRST_ID = 1_000_000
SESSION_MS = 2_000

Settings = Mapping[str, object]
NO_SETTINGS: Settings = {}
MakeGateway = Callable[..., KcoordProcess]


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture(scope="module")
def kafka(jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """Kafka without KIP-848, with a second listener for clients that log in."""
    login = f"LOGIN://127.0.0.1:{free_ports()}"
    plain = "PLAINTEXT://127.0.0.1:{port}"
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    broker = KafkaBroker(
        jars,
        tmp_path_factory.mktemp("kafka"),
        listeners=f"{plain},CONTROLLER://127.0.0.1:{{controller_port}},{login}",
        advertised_listeners=f"{plain},{login}",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LOGIN:SASL_PLAINTEXT",
        sasl_enabled_mechanisms="PLAIN",
        group_min_session_timeout_ms="1000",
        **{"listener.name.login.plain.sasl.jaas.config": f'{module} user_gateway="secret";'},
    )
    try:
        jars.tool("features", "--bootstrap-server", broker.address, "downgrade", "--feature", "group.version=0")
        broker.sasl_address = login.removeprefix("LOGIN://")
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def make_gateway(kafka: KafkaBroker, tmp_path: Path) -> Iterator[MakeGateway]:
    """Makes gateways that are not started yet. Keyword arguments are settings, with underscores for dots."""
    made: list[KcoordProcess] = []

    def make(**settings: str) -> KcoordProcess:
        folder = tmp_path / f"gateway{len(made)}"
        folder.mkdir()
        overrides = {
            **FAST,
            "kcoord.upstream.bootstrap.servers": kafka.address,
            "kcoord.upstream.ports": "0",
            "kcoord.upstream.metadata.max.age.ms": "100",
            "kcoord.upstream.session.timeout.ms": str(SESSION_MS),
            "kcoord.upstream.heartbeat.interval.ms": "200",
            "node.id": str(FIRST_ID + len(made)),
            **{key.replace("_", "."): text for key, text in settings.items()},
        }
        made.append(KcoordProcess(folder, overrides))
        return made[-1]

    yield make
    for gateway in made:
        # An instance that is killed stays in the group until its session ends.
        gateway.stop()


@pytest.fixture
def gateway(make_gateway: MakeGateway) -> KcoordProcess:
    """A running gateway."""
    return make_gateway().start()


def create(address: str, topic: str, partitions: int = 3) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


def group_ids(address: str) -> list[str]:
    admin = AdminClient({"bootstrap.servers": address})
    return [group.group_id for group in admin.list_consumer_groups().result().valid]


def brokers(address: str) -> dict[int, str]:
    """Returns the addresses of all brokers, as an instance shows them."""
    shown = AdminClient({"bootstrap.servers": address}).list_topics(timeout=10).brokers
    return {node_id: f"{broker.host}:{broker.port}" for node_id, broker in shown.items()}


def produce(address: str, topic: str, count: int = COUNT, settings: Settings = NO_SETTINGS) -> None:
    producer = Producer({"bootstrap.servers": address, **settings})
    for number in range(count):
        producer.produce(topic, str(number).encode(), partition=number % 3)
    assert producer.flush(20) == 0


def consume(address: str, group: str, topic: str, count: int = COUNT, settings: Settings = NO_SETTINGS) -> list[int]:
    """Consumes and commits `count` records. Returns their values, sorted."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": group, "auto.offset.reset": "earliest", **settings})
    consumer.subscribe([topic])
    values: list[int] = []

    def has_all() -> bool:
        message = consumer.poll(0.2)
        if message is not None and not message.error():
            values.append(int(message.value() or b""))
        return len(values) >= count

    wait_until(has_all, f"{count} records of {topic}", CONSUME_SECONDS)
    consumer.commit(asynchronous=False)
    consumer.close()
    return sorted(values)


def commit(address: str, group: str, offset: int) -> None:
    """Commits an offset of partition 0 of the topic with the name of the group. Raises KafkaException."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": group, "socket.timeout.ms": 4000})
    try:
        consumer.commit(offsets=[TopicPartition(group, 0, offset)], asynchronous=False)
    finally:
        consumer.close()


def committed(address: str, group: str, topic: str) -> list[int]:
    consumer = Consumer({"bootstrap.servers": address, "group.id": group})
    offsets = consumer.committed([TopicPartition(topic, partition) for partition in range(3)], timeout=20)
    consumer.close()
    return [partition.offset for partition in offsets]


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_confluent_kafka(gateway: KcoordProcess, kafka: KafkaBroker, protocol: str) -> None:
    topic = f"confluent-{protocol}"
    create(gateway.address, topic)
    produce(gateway.address, topic, settings={"enable.idempotence": True})
    assert consume(gateway.address, f"g-{protocol}", topic, settings={"group.protocol": protocol}) == list(range(COUNT))
    assert committed(gateway.address, f"g-{protocol}", topic) == [20, 20, 20]
    # The records are in the upstream, the group is not.
    assert group_ids(kafka.address) == []
    assert f"g-{protocol}" in group_ids(gateway.address)


def test_kafka_python(gateway: KcoordProcess) -> None:
    from kafka import KafkaConsumer, KafkaProducer

    create(gateway.address, "kafka-python")
    for acks in (0, 1, "all"):
        producer = KafkaProducer(bootstrap_servers=gateway.address, acks=acks)
        for _ in range(10):
            producer.send("kafka-python", b"x")
        producer.flush()
        producer.close()
    consumer = KafkaConsumer(
        "kafka-python",
        bootstrap_servers=gateway.address,
        group_id="g",
        auto_offset_reset="earliest",
        consumer_timeout_ms=20_000,
    )
    values = [next(consumer).value for _ in range(30)]
    consumer.commit()
    consumer.close()
    assert values == [b"x"] * 30


async def test_kcoord_client_with_creation_times(gateway: KcoordProcess) -> None:
    """The policy of KIP-1327 starts at the creation of the group, also with a topic that is created later."""
    create(gateway.address, "old")
    produce(gateway.address, "old", 3)
    await asyncio.sleep(0.05)
    async with KcoordConsumer(
        bootstrap_servers=gateway.address,
        group_id="g",
        auto_offset_reset="to_start_time",
        allow_auto_create_topics=False,
    ) as consumer:
        consumer.subscribe(["old", "new"])
        async with asyncio.timeout(CONSUME_SECONDS):
            while not consumer.assignment:
                assert not list(await consumer.poll(100))
        await asyncio.to_thread(create, gateway.address, "new", 1)
        async with KcoordProducer(bootstrap_servers=gateway.address) as producer:
            await producer.send("new", value=b"later")
        values: list[bytes | None] = []
        async with asyncio.timeout(CONSUME_SECONDS):
            while not values:
                values += [record.value for record in await consumer.poll(100)]
        assert values == [b"later"]


def test_kafkas_own_tools_with_two_instances(make_gateway: MakeGateway, jars: KafkaJars) -> None:
    """The tools look coordinators up by node id, and ask every broker for its groups."""
    gateway = make_gateway().start()
    make_gateway().start()
    server = ("--bootstrap-server", gateway.address)
    jars.tool("topics", *server, "--create", "--topic", "java", "--partitions", "2")
    jars.tool("console-producer", *server, "--topic", "java", stdin="1\n2\n3\n")
    output = jars.tool(
        "console-consumer",
        *server,
        *("--topic", "java", "--group", "java", "--from-beginning", "--max-messages", "3", "--timeout-ms", "30000"),
        *("--command-property", "group.protocol=consumer"),
    )
    assert {"1", "2", "3"} <= set(output.split())
    described = jars.tool("consumer-groups", *server, "--describe", "--group", "java")
    lags = [line.split()[5] for line in described.splitlines() if line.startswith("java")]
    assert lags == ["0", "0"]
    assert "java" in jars.tool("topics", *server, "--describe", "--topic", "java")
    jars.tool("consumer-groups", *server, "--delete", "--group", "java")
    assert "java" not in jars.tool("consumer-groups", *server, "--list").split()
    group = ("--entity-type", "groups", "--entity-name", "java")
    jars.tool("configs", *server, "--alter", *group, "--add-config", "consumer.session.timeout.ms=50000")
    assert "consumer.session.timeout.ms=50000" in jars.tool("configs", *server, "--describe", *group)


def test_applications_move_and_return(gateway: KcoordProcess, kafka: KafkaBroker, jars: KafkaJars) -> None:
    move_and_return(kafka.address, gateway.address, "moving-confluent", confluent_application)
    with_kip_848 = java_application(jars, "--command-property", "group.protocol=consumer")
    move_and_return(kafka.address, gateway.address, "moving-java", java_application(jars), with_kip_848)


def test_topics_of_the_upstream_come_grow_and_go(gateway: KcoordProcess, kafka: KafkaBroker) -> None:
    """Another client changes topics in the upstream itself, while a member consumes through kcoord."""
    admin = AdminClient({"bootstrap.servers": kafka.address})
    consumer = Consumer(
        {
            "bootstrap.servers": gateway.address,
            "group.id": "g",
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 200,
        }
    )
    consumer.subscribe(["changes"])

    def owns(count: int) -> bool:
        consumer.poll(0.1)
        return len(consumer.assignment()) == count

    wait_until(lambda: owns(0), "the member is there")
    create(kafka.address, "changes", 2)
    wait_until(lambda: owns(2), "a new topic is assigned", CONSUME_SECONDS)
    admin.create_partitions([NewPartitions("changes", 3)])["changes"].result(20)
    wait_until(lambda: owns(3), "a new partition is assigned", CONSUME_SECONDS)
    consumer.commit(offsets=[TopicPartition("changes", 0, 0)], asynchronous=False)
    admin.delete_topics(["changes"])["changes"].result(20)
    wait_until(lambda: owns(0), "a deleted topic is revoked", CONSUME_SECONDS)
    consumer.close()
    create(kafka.address, "changes", 3)
    assert committed(gateway.address, "g", "changes") == [-1001] * 3


def test_offsets_survive_kill_9(gateway: KcoordProcess) -> None:
    create(gateway.address, "survives")
    produce(gateway.address, "survives")
    consume(gateway.address, "g", "survives", settings={"group.protocol": "consumer"})
    gateway.restart(signal.SIGKILL)
    assert committed(gateway.address, "g", "survives") == [20, 20, 20]


def test_offsets_survive_the_loss_of_the_machine(make_gateway: MakeGateway, kafka: KafkaBroker) -> None:
    """The groups are in the upstream: a gateway with an empty data folder has the offsets of the old one."""
    lost = make_gateway().start()
    create(lost.address, "moved")
    produce(lost.address, "moved")
    consume(lost.address, "moved", "moved", settings={"group.protocol": "consumer"})
    lost.stop(signal.SIGKILL)
    successor = make_gateway().start()
    assert committed(successor.address, "moved", "moved") == [20, 20, 20]
    assert "moved" in group_ids(successor.address)
    produce(successor.address, "moved", 3)
    assert len(consume(successor.address, "moved", "moved", 3, {"group.protocol": "consumer"})) == 3


def test_two_gateways_share_the_groups_and_replace_each_other(make_gateway: MakeGateway) -> None:
    first, second = make_gateway().start(), make_gateway().start()
    groups = [f"shared{number}" for number in range(8)]
    for group in groups:
        create(first.address, group)
        commit(first.address, group, 5)
        commit(second.address, group, 6)
    assert set(groups) <= set(group_ids(first.address)) == set(group_ids(second.address))
    shown = brokers(first.address)
    assert {FIRST_ID, FIRST_ID + 1} <= shown.keys()
    assert brokers(second.address) == shown
    first.kill()
    for number, group in enumerate(groups):
        assert committed(second.address, group, group)[0] == 6
        commit(second.address, group, 10 + number)
    first.start()
    assert [committed(first.address, group, group)[0] for group in groups] == list(range(10, 18))
    assert second.stop() == 0
    assert [committed(first.address, group, group)[0] for group in groups] == list(range(10, 18))


def test_a_second_process_with_the_same_node_id_ends_the_first(make_gateway: MakeGateway) -> None:
    first = make_gateway().start()
    second = make_gateway(node_id=str(FIRST_ID)).start()
    wait_until(lambda: first.exit_code is not None, "the first process ends")
    assert first.exit_code == 1
    assert f"Another process has joined with node.id={FIRST_ID}" in first.log.splitlines()[-1]
    create(second.address, "replaced")
    commit(second.address, "replaced", 7)


def test_the_topic_of_the_log_is_not_consumed_by_pattern(gateway: KcoordProcess) -> None:
    create(gateway.address, "pattern-topic", 1)
    consumer = Consumer({"bootstrap.servers": gateway.address, "group.id": "pattern", "group.protocol": "consumer"})
    consumer.subscribe(["^(pattern-.*|__.*)"])

    def topics() -> set[str]:
        consumer.poll(0.1)
        return {partition.topic for partition in consumer.assignment()}

    assert wait_until(topics, "partitions are assigned", CONSUME_SECONDS) == {"pattern-topic"}
    consumer.close()


def test_transactions_with_and_without_offsets(gateway: KcoordProcess) -> None:
    create(gateway.address, "transactions")
    producer = Producer({"bootstrap.servers": gateway.address, "transactional.id": "t"})
    producer.init_transactions(20)
    producer.begin_transaction()
    for number in range(3):
        producer.produce("transactions", str(number).encode(), partition=number)
    producer.commit_transaction(20)
    read = consume(gateway.address, "g", "transactions", 3, {"isolation.level": "read_committed"})
    assert read == [0, 1, 2]
    consumer = Consumer({"bootstrap.servers": gateway.address, "group.id": "g"})
    for offset, finish in ((7, producer.commit_transaction), (9, producer.abort_transaction)):
        producer.begin_transaction()
        offsets = [TopicPartition("transactions", 0, offset)]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 20)
        finish(20)
        assert committed(gateway.address, "g", "transactions")[0] == 7
    consumer.close()


def test_both_sides_may_ask_for_a_login(make_gateway: MakeGateway, kafka: KafkaBroker) -> None:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    gateway = make_gateway(
        kcoord_upstream_bootstrap_servers=kafka.sasl_address,
        kcoord_upstream_security_protocol="SASL_PLAINTEXT",
        kcoord_upstream_sasl_mechanism="PLAIN",
        kcoord_upstream_sasl_jaas_config=f'{module} username="gateway" password="secret";',
        listener_security_protocol_map="PLAINTEXT:SASL_PLAINTEXT",
        sasl_enabled_mechanisms="PLAIN",
        **{"listener.name.plaintext.plain.sasl.jaas.config": f'{module} user_alice="a";'},
    ).start()
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "alice"}
    right, wrong = {**login, "sasl.password": "a"}, {**login, "sasl.password": "b"}
    create(kafka.address, "secured")
    produce(gateway.address, "secured", settings=right)
    assert consume(gateway.address, "g", "secured", settings=right) == list(range(COUNT))
    with pytest.raises(KafkaException):
        AdminClient({"bootstrap.servers": gateway.address, **wrong}).list_topics(timeout=2)


def failed_start(gateway: KcoordProcess) -> str:
    """Starts a gateway that cannot start. Returns its last line."""
    gateway.spawn()
    wait_until(lambda: gateway.exit_code is not None, "the start fails", 40)
    assert gateway.exit_code == 1
    return gateway.log.splitlines()[-1]


def test_a_start_that_cannot_work_says_why(make_gateway: MakeGateway, kafka: KafkaBroker) -> None:
    line = failed_start(make_gateway(node_id="1"))
    assert line == "kcoord: node.id=1 is the id of a broker of the upstream; set node.id to an id that no broker has"
    line = failed_start(make_gateway(kcoord_upstream_ports=str(kafka.port)))
    assert line.startswith(f"kcoord: kcoord.upstream.ports={kafka.port}: cannot listen on PLAINTEXT://127.0.0.1:")
    line = failed_start(make_gateway(kcoord_upstream_group_id=""))
    assert line.startswith("kcoord: kcoord.upstream.group.id=: this instance cannot be a member: INVALID_GROUP_ID")
    line = failed_start(make_gateway(kcoord_upstream_session_timeout_ms="1800001"))
    assert "INVALID_SESSION_TIMEOUT" in line
    assert "kcoord.upstream.session.timeout.ms=1800001 has to be between group.min.session.timeout.ms and" in line
    line = failed_start(make_gateway(kcoord_upstream_ports="7:9999"))
    assert line == "kcoord: kcoord.upstream.ports=7:9999: there is no port for broker 1; add 1:PORT"


def test_a_data_folder_belongs_to_one_cluster_and_to_one_mode(make_gateway: MakeGateway) -> None:
    alone = make_gateway(kcoord_upstream_bootstrap_servers="", node_id="1000000").start()
    assert alone.stop() == 0
    alone.overrides["kcoord.upstream.bootstrap.servers"] = make_gateway().overrides["kcoord.upstream.bootstrap.servers"]
    assert "the folder belongs to cluster.id" in failed_start(alone)
    gateway = make_gateway().start()
    assert gateway.stop() == 0
    gateway.overrides["kcoord.upstream.bootstrap.servers"] = ""
    assert "set kcoord.upstream.bootstrap.servers" in failed_start(gateway)
