# SPDX-License-Identifier: Apache-2.0
"""Clients that know nothing of client-side assignors, on a broker that serves them, beside members that use them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka.admin import AdminClient
from kafka.admin import KafkaAdminClient

from kcoord.client import Consumer, LagAssignor
from tests.support.confluent import PolledConsumer, create_topic, partitions_of, produce
from tests.support.kafka_jars import KafkaJars
from tests.support.kafka_python import KafkaPythonMember
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.ownership import Partition
from tests.support.waiting import wait_until

PARTITIONS, RECORDS, SECONDS = 4, 5, 30.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    folder: Path = tmp_path_factory.mktemp("kcoord")
    process = KcoordProcess(folder, {**FAST, "kcoord.client.assignors.enable": "true"}).start()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def topic(broker: KcoordProcess, name: str) -> str:
    create_topic(broker.address, name, PARTITIONS)
    produce(broker.address, name, PARTITIONS, RECORDS)
    return name


class Computing:
    """A kcoord.client consumer with a client-side assignor, which is polled in a task."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.records = 0

    @property
    def assigned(self) -> set[Partition]:
        return {(partition.topic, partition.partition) for partition in self.consumer.assignment}

    async def poll(self) -> None:
        while True:
            self.records += len(await self.consumer.poll(100))


@asynccontextmanager
async def computing_members(broker: KcoordProcess, topic: str, count: int = 2) -> AsyncIterator[list[Computing]]:
    """Yields members of the group `topic`, each with its part of the partitions."""
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        members, polls = [], []
        for _ in range(count):
            consumer = Consumer(
                bootstrap_servers=broker.address,
                group_id=topic,
                auto_offset_reset="earliest",
                group_local_assignors=[LagAssignor()],
            )
            await stack.enter_async_context(consumer)
            consumer.subscribe([topic])
            members.append(Computing(consumer))
            polls.append(tasks.create_task(members[-1].poll()))
        await until(lambda: is_split(topic, *(member.assigned for member in members)))
        yield members
        for poll in polls:
            poll.cancel()


def is_split(topic: str, *parts: set[Partition]) -> bool:
    """True if each partition has one owner, and each owner has partitions."""
    return all(parts) and sorted(p for part in parts for p in part) == sorted(partitions_of(topic, PARTITIONS))


async def until(condition: object, seconds: float = SECONDS) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def test_a_member_of_librdkafka_moves_the_group_to_the_broker_and_back(broker: KcoordProcess, topic: str) -> None:
    async with computing_members(broker, topic) as members:
        admin = AdminClient({"bootstrap.servers": broker.address})
        (described,) = admin.describe_consumer_groups([topic]).values()
        assert described.result(SECONDS).partition_assignor == "lag"
        with PolledConsumer(broker.address, topic, [topic]) as newcomer:
            await until(lambda: is_split(topic, newcomer.assigned, *(member.assigned for member in members)))
            assert not newcomer.errors
        await until(lambda: is_split(topic, *(member.assigned for member in members)))


async def test_other_clients_describe_a_group_with_client_side_assignors(broker: KcoordProcess, topic: str) -> None:
    async with computing_members(broker, topic) as members:
        confluent = AdminClient({"bootstrap.servers": broker.address})
        (future,) = confluent.describe_consumer_groups([topic]).values()
        described = await asyncio.to_thread(future.result, SECONDS)
        assert {
            (partition.topic, partition.partition)
            for member in described.members
            for partition in member.assignment.topic_partitions
        } == partitions_of(topic, PARTITIONS)
        kafka_python = KafkaAdminClient(bootstrap_servers=broker.address)
        groups = await asyncio.to_thread(kafka_python.describe_groups, [topic])
        assert topic in repr(groups)
        kafka_python.close()
        assert len(members) == 2


@pytest.mark.java
async def test_the_tool_of_kafka_describes_a_group_with_client_side_assignors(
    broker: KcoordProcess, topic: str
) -> None:
    jars = KafkaJars()
    async with computing_members(broker, topic):
        arguments = ("--bootstrap-server", broker.address, "--describe", "--group", topic, "--members", "--verbose")
        shown = await asyncio.to_thread(jars.tool, "consumer-groups", *arguments)
        assert shown.count(topic) >= 3
        assert "Error" not in shown
        state = await asyncio.to_thread(jars.tool, "consumer-groups", *arguments[:-2], "--state")
        assert "lag" in state


async def test_other_clients_consume_in_groups_of_their_own(broker: KcoordProcess, topic: str) -> None:
    everything = PARTITIONS * RECORDS
    with PolledConsumer(broker.address, f"{topic}-librdkafka", [topic]) as librdkafka:
        librdkafka.wait_for(everything)
    with KafkaPythonMember(broker.address, f"{topic}-kafka-python", [topic]) as kafka_python:
        wait_until(lambda: len(kafka_python.seen) == everything, "kafka-python reads all records")
    consumer = AIOKafkaConsumer(
        topic, bootstrap_servers=broker.address, group_id=f"{topic}-aiokafka", auto_offset_reset="earliest"
    )
    await consumer.start()
    try:
        for _ in range(everything):
            await asyncio.wait_for(consumer.getone(), SECONDS)
    finally:
        await consumer.stop()
