# SPDX-License-Identifier: Apache-2.0
"""Clients for Python that copy a topic at least once, until they are killed: consume, produce, commit.

`python -m tests.clients_before_kafka.copying ADDRESS SOURCE TARGET` runs a client. The target is also the group, and a
key of CLIENTS. The program prints a line for each error that a call raised.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.errors import KafkaError as AioKafkaError
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

from kcoord.client import Consumer as KcoordConsumer
from kcoord.client import Producer as KcoordProducer
from kcoord.client.errors import is_retriable
from kcoord_protocol.errors import Errors
from kcoord_protocol.errors import KafkaError as KcoordError

POLL_SECONDS = 0.2
POLL_MS = 500


def report(error: BaseException | KafkaError, is_documented: bool) -> None:
    print("retriable" if is_documented else "error", repr(error), flush=True)


def report_delivery(error: KafkaError | None, _: Message) -> None:
    if error is not None:
        report(error, is_documented=False)


def confluent(address: str, source: str, target: str) -> None:
    settings: dict[str, str | bool] = {
        "bootstrap.servers": address,
        "group.id": target,
        "group.protocol": target.split("-")[1],
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    if target.endswith("static"):
        settings["group.instance.id"] = "instance"
    consumer = Consumer(settings)
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 5})
    consumer.subscribe(["^" + source[:-1] + "." if target.endswith("regex") else source])
    while True:
        messages = consumer.consume(100, POLL_SECONDS)
        for message in messages:
            error = message.error()
            if error is not None:
                report(error, error.retriable())
            else:
                partition = message.partition()
                assert partition is not None
                producer.produce(target, message.value(), message.key(), partition, on_delivery=report_delivery)
        producer.flush()
        if messages:
            try:
                consumer.commit(asynchronous=False)
            except KafkaException as raised:
                code = raised.args[0].code()
                # librdkafka says only of errors of transactions whether they are retriable.
                report(raised, code == KafkaError._WAIT_COORD or (code > 0 and Errors(code).retriable))


def kafka_python(address: str, source: str, target: str) -> None:
    servers = address.split(",")
    consumer = KafkaConsumer(
        source,
        bootstrap_servers=servers,
        group_id=target,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    producer = KafkaProducer(bootstrap_servers=servers)
    while True:
        try:
            polled = consumer.poll(POLL_MS)
            records = [record for partition in polled.values() for record in partition]
            for sent in [producer.send(target, record.value, record.key) for record in records]:
                sent.get()
            if records:
                consumer.commit()
        except PythonKafkaError as error:
            report(error, error.retriable)


async def aiokafka(address: str, source: str, target: str) -> None:
    consumer = AIOKafkaConsumer(
        source,
        bootstrap_servers=address,
        group_id=target,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    )
    async with consumer, AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True) as producer:
        while True:
            try:
                polled = await consumer.getmany(timeout_ms=POLL_MS)
                records = [record for partition in polled.values() for record in partition]
                for sent in [await producer.send(target, record.value, record.key) for record in records]:
                    await sent
                if records:
                    await consumer.commit()
            except AioKafkaError as error:
                report(error, error.retriable)


async def kcoord(address: str, source: str, target: str) -> None:
    async with (
        KcoordConsumer(
            bootstrap_servers=address, group_id=target, auto_offset_reset="earliest", enable_auto_commit=False
        ) as consumer,
        KcoordProducer(bootstrap_servers=address) as producer,
    ):
        consumer.subscribe([source])
        while True:
            try:
                records = await consumer.poll(POLL_MS)
                await asyncio.gather(*(producer.send(target, record.value, record.key) for record in records))
                if records:
                    await consumer.commit()
            except KcoordError as error:
                report(error, is_retriable(error))


def _run_aiokafka(address: str, source: str, target: str) -> None:
    asyncio.run(aiokafka(address, source, target))


def _run_kcoord(address: str, source: str, target: str) -> None:
    asyncio.run(kcoord(address, source, target))


CLIENTS: dict[str, Callable[[str, str, str], None]] = {
    "confluent-classic": confluent,
    "confluent-consumer": confluent,
    "confluent-classic-regex": confluent,
    "confluent-consumer-static": confluent,
    "kafka-python": kafka_python,
    "aiokafka": _run_aiokafka,
    "kcoord-client": _run_kcoord,
}
"""What copies to a target."""

if __name__ == "__main__":
    CLIENTS[sys.argv[3]](*sys.argv[1:4])
