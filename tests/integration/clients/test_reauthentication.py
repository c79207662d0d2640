# SPDX-License-Identifier: Apache-2.0
"""Sessions of 1.5 seconds (KIP-368): clients authenticate again on their connections, and others are disconnected."""

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
from tests.support.waiting import wait_until

SESSION_MS = 1500
SECONDS = 4.5
"""Three sessions."""
EXPIRED = "closing, the session has expired, see connections.max.reauth.ms"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    broker = SaslBroker(tmp_path_factory.mktemp("sessions"), connections_max_reauth_ms=str(SESSION_MS))
    try:
        broker.start_with_users()
        yield broker
    finally:
        broker.kill()


@pytest.fixture(autouse=True)
def nobody_is_disconnected(broker: SaslBroker) -> Iterator[None]:
    begin = len(broker.log)
    yield
    assert "closing, " not in broker.log[begin:].replace(EXPIRED, "")


def test_librdkafka(broker: SaslBroker) -> None:
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
        assert time.monotonic() < end + 30, f"{received} of {sent}"
    for mechanism, producer in producers.items():
        assert producer.flush(10) == 0
        consumers[mechanism].close()
    assert (errors, lost) == ([], [])


async def test_kcoord_client(broker: SaslBroker) -> None:
    async def use(mechanism: str) -> None:
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
                connections |= {id(connection) for connection in producer._cluster._connections.values()}
                await asyncio.sleep(0.02)
            assert len(connections) <= 2, "the connections stay"

    await asyncio.gather(*(use(mechanism) for mechanism in ("PLAIN", "SCRAM-SHA-512")))


@pytest.mark.java
def test_kafkas_consumer(broker: SaslBroker) -> None:
    """The tool reads until it has all records, which come over three sessions."""
    properties = broker.properties("PLAIN", "bob-secret", "bob")
    file = broker.data.parent / "java.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{broker.ports[1]}"})
    producer.produce("java", b"first")
    assert producer.flush(20) == 0
    output: list[str] = []
    count = 10

    def read() -> None:
        arguments = ["--from-beginning", "--max-messages", str(count + 1), "--timeout-ms", "20000", "--topic", "java"]
        file_option = ["--bootstrap-server", broker.address, "--command-config", str(file)]
        output.append(KafkaJars().tool("console-consumer", *file_option, *arguments))

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(2)  # The start of a JVM.
    for number in range(count):
        producer.produce("java", str(number))
        assert producer.flush(20) == 0
        time.sleep(SECONDS / count)
    reader.join(60)
    assert output and output[0].split()[: count + 1] == ["first", *map(str, range(count))]
    assert "WARN" not in output[0] and "ERROR" not in output[0]


def test_a_client_that_does_not_authenticate_again_is_disconnected(broker: SaslBroker) -> None:
    with WireClient(broker.port) as wire:
        assert log_in(wire, b"\0bob\0bob-secret").session_lifetime_ms == SESSION_MS
        assert wire.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers
        time.sleep(SESSION_MS / 1000 + 0.05)
        with pytest.raises((ConnectionClosed, ConnectionResetError)):
            wire.call(MetadataRequest(topics=None), 12, MetadataResponse)
    wait_until(lambda: EXPIRED in broker.log, "the log says why")
