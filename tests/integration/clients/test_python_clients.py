# SPDX-License-Identifier: Apache-2.0
"""kafka-python and aiokafka: topics, produce, fetch, offsets and admin. Their groups use the classic protocol."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioTopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as AioNewTopic
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import ConfigResource, ConfigResourceType, KafkaAdminClient, NewPartitions, NewTopic

from tests.support.kcoord_process import KcoordProcess

CODECS = [None, "gzip", "lz4", "zstd"]
TIMEOUT_SECONDS = 20
TIMEOUT_MS = TIMEOUT_SECONDS * 1000


@pytest.mark.parametrize("codec", CODECS)
def test_kafka_python_produces_and_fetches(broker: KcoordProcess, name: str, codec: str | None) -> None:
    values = [f"{name}-{number}".encode() * 20 for number in range(50)]
    producer = KafkaProducer(bootstrap_servers=broker.address, compression_type=codec)
    for value in values:
        producer.send(name, value, key=b"k", headers=[("h", b"v")], partition=0)
    producer.flush(TIMEOUT_SECONDS)
    producer.close()
    consumer = KafkaConsumer(bootstrap_servers=broker.address, consumer_timeout_ms=TIMEOUT_MS, group_id=None)
    partition = TopicPartition(name, 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    records = [next(consumer) for _ in values]
    assert [(record.offset, record.value, record.headers) for record in records] == [
        (offset, value, [("h", b"v")]) for offset, value in enumerate(values)
    ]
    middle = records[25].timestamp
    offset = consumer.offsets_for_times({partition: middle})[partition]
    assert offset is not None and offset.offset <= 25 and offset.timestamp == middle
    assert (consumer.beginning_offsets([partition]), consumer.end_offsets([partition])) == (
        {partition: 0},
        {partition: len(values)},
    )
    consumer.close()


def test_kafka_python_admin(broker: KcoordProcess, name: str) -> None:
    admin = KafkaAdminClient(bootstrap_servers=broker.address)
    admin.create_topics([NewTopic(name, 2, 1, topic_configs={"retention.ms": "120000"})])
    assert name in admin.list_topics()
    admin.create_partitions({name: NewPartitions(3)})
    (topic,) = admin.describe_topics([name])
    assert len(topic["partitions"]) == 3
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    assert "120000" in repr(admin.describe_configs([resource]))
    admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, name, configs={"retention.ms": "240000"})])
    assert "240000" in repr(admin.describe_configs([resource]))
    assert admin.describe_cluster()["cluster_id"]
    admin.delete_topics([name])
    assert name not in admin.list_topics()
    admin.close()


@pytest.mark.parametrize("codec", [*CODECS, "snappy"])
async def test_aiokafka_produces_and_fetches(broker: KcoordProcess, name: str, codec: str | None) -> None:
    values = [f"{name}-{number}".encode() * 20 for number in range(50)]
    async with AIOKafkaProducer(
        bootstrap_servers=broker.address, compression_type=codec, enable_idempotence=True
    ) as producer:
        for value in values:
            await producer.send(name, value, partition=0)
        await producer.flush()
    partition = AioTopicPartition(name, 0)
    consumer = AIOKafkaConsumer(bootstrap_servers=broker.address, group_id=None)
    await consumer.start()
    try:
        consumer.assign([partition])
        await consumer.seek_to_beginning(partition)
        records = [await asyncio.wait_for(consumer.getone(), TIMEOUT_SECONDS) for _ in values]
        assert [(record.offset, record.value) for record in records] == list(enumerate(values))
        assert await consumer.end_offsets([partition]) == {partition: len(values)}
    finally:
        await consumer.stop()


async def test_aiokafka_admin(broker: KcoordProcess, name: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.address)
    await admin.start()
    try:
        await admin.create_topics([AioNewTopic(name, 2, 1)])
        assert name in await admin.list_topics()
        (topic,) = await admin.describe_topics([name])
        assert len(topic["partitions"]) == 2
        await admin.delete_topics([name])
        assert name not in await admin.list_topics()
    finally:
        await admin.close()
