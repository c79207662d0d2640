# SPDX-License-Identifier: Apache-2.0
"""Sessions of four seconds (KIP-368): clients authenticate again on their connections, and others are disconnected."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer

from kcoord import client
from kcoord_protocol.messages import MetadataRequest, MetadataResponse
from tests.integration.clients.test_sasl import MECHANISMS, SaslBroker, log_in
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.kafka_jars import KafkaJars
from tests.support.properties import write_properties
from tests.support.waiting import wait_until

SESSION_MS = 4000
"""Clients authenticate after 85 to 95 % of it, so the last 5 % must be enough for a loaded machine."""
SECONDS = 2.1 * SESSION_MS / 1000
"""Two sessions."""
EXPIRED = "closing, the session has expired, see connections.max.reauth.ms"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    broker = SaslBroker(tmp_path_factory.mktemp("sessions"), connections_max_reauth_ms=str(SESSION_MS))
    try:
        broker.start_with_users()
        yield broker
    finally:
        broker.kill()


@pytest.fixture(scope="module", autouse=True)
def silent(broker: SaslBroker) -> Iterator[tuple[WireClient, float]]:
    """A client that logs in once, and the time after its login. Its session ends during the first tests."""
    with WireClient(broker.port) as wire:
        assert log_in(wire, b"\0bob\0bob-secret").session_lifetime_ms == SESSION_MS
        began = time.monotonic()
        assert wire.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers
        yield wire, began


@pytest.fixture
def nobody_is_disconnected(broker: SaslBroker) -> Iterator[None]:
    begin = len(broker.log)
    yield
    assert "closing, " not in broker.log[begin:]


@pytest.mark.usefixtures("nobody_is_disconnected")
async def test_clients_authenticate_again(broker: SaslBroker) -> None:
    """Side by side, since each needs two sessions."""
    kcoord = (use_kcoord(broker, mechanism) for mechanism in ("PLAIN", "SCRAM-SHA-512"))
    await asyncio.gather(asyncio.to_thread(use_librdkafka, broker), *kcoord)


def use_librdkafka(broker: SaslBroker) -> None:
    """With each mechanism: a producer and a consumer per mechanism, side by side."""
    errors: list[str] = []
    lost: list[str] = []

    def note(error: KafkaError) -> None:
        errors.append(error.str())

    def check(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            lost.append(error.str())

    producers = {mechanism: Producer(broker.confluent(mechanism) | {"error_cb": note}) for mechanism in MECHANISMS}
    reading = {"auto.offset.reset": "earliest", "group.protocol": "consumer", "error_cb": note}
    consumers = {
        mechanism: Consumer(broker.confluent(mechanism, group_id=mechanism) | reading) for mechanism in MECHANISMS
    }
    sent, received = 0, dict.fromkeys(MECHANISMS, 0)
    for mechanism, consumer in consumers.items():
        consumer.subscribe([f"librdkafka-{mechanism}"])
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or any(count < sent for count in received.values()):
        if time.monotonic() < end:
            sent += 1
            for mechanism, producer in producers.items():
                producer.produce(f"librdkafka-{mechanism}", b"x", on_delivery=check)
                producer.poll(0)
        for mechanism, consumer in consumers.items():
            message = consumer.poll(0.02)
            received[mechanism] += message is not None and message.error() is None
        assert time.monotonic() < end + 60, f"{received} of {sent}"
    for mechanism, producer in producers.items():
        assert producer.flush(10) == 0
        consumers[mechanism].close()
    assert (errors, lost) == ([], [])


async def use_kcoord(broker: SaslBroker, mechanism: str) -> None:
    topic, properties = f"kcoord-{mechanism}", broker.properties(mechanism)
    connections = set()
    sent = received = 0
    config = client.ConsumerConfig.from_properties({**properties, "auto.offset.reset": "earliest", "group.id": "g"})
    async with (
        client.Producer(client.ProducerConfig.from_properties(properties)) as producer,
        client.Consumer(config) as consumer,
    ):
        consumer.subscribe([topic])
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or received < sent:
            if time.monotonic() < end:
                await producer.send_and_wait(topic, b"x")
                sent += 1
            received += len(await consumer.poll(50))
            connections |= set(producer._cluster._connections.values())
            await asyncio.sleep(0.02)
            assert time.monotonic() < end + 60, f"{received} of {sent}"
    assert len(connections) == 1, "the connection stays"


@pytest.mark.java
@pytest.mark.usefixtures("nobody_is_disconnected")
def test_kafkas_consumer(broker: SaslBroker) -> None:
    """The tool reads until it has all records. The last one comes two sessions after it has logged in."""
    file = write_properties(broker.data.parent / "java.properties", broker.properties("PLAIN", "bob-secret", "bob"))
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{broker.ports[1]}"})
    producer.produce("java", b"first")
    assert producer.flush(20) == 0
    output: list[str] = []
    count = 10
    jars = KafkaJars()

    def read() -> None:
        arguments = ["--from-beginning", "--max-messages", str(count + 1), "--timeout-ms", "20000", "--topic", "java"]
        options = ["--bootstrap-server", broker.address, "--command-config", file, "--group", "java"]
        output.append(jars.tool("console-consumer", *options, *arguments))

    def is_listed() -> bool:
        groups = admin.list_consumer_groups().result(20).valid
        return "java" in {group.group_id for group in groups}

    admin = broker.admin()
    reader = threading.Thread(target=read)
    reader.start()
    wait_until(is_listed, "the tool has logged in", 60)
    for number in range(count):
        time.sleep(SECONDS / count)
        producer.produce("java", str(number))
        assert producer.flush(20) == 0
    reader.join(60)
    assert output and output[0].split()[: count + 1] == ["first", *map(str, range(count))]
    assert "WARN" not in output[0] and "ERROR" not in output[0]


def test_a_client_that_does_not_authenticate_again_is_disconnected(
    broker: SaslBroker, silent: tuple[WireClient, float]
) -> None:
    wire, began = silent
    host, port = wire.socket.getsockname()
    time.sleep(max(0.0, began + SESSION_MS / 1000 + 0.05 - time.monotonic()))
    with pytest.raises((ConnectionClosed, ConnectionResetError)):
        wire.call(MetadataRequest(topics=None), 12, MetadataResponse)
    wait_until(lambda: f"{host}:{port}: {EXPIRED}" in broker.log, "the log says why")
