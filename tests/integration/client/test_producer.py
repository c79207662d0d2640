# SPDX-License-Identifier: Apache-2.0
"""The producer: codecs, batches, order, acknowledgements, transactions."""

from __future__ import annotations

import asyncio
from typing import get_args

import pytest

from kcoord.client import (
    AdminClient,
    AlterConfigOp,
    ConfigResource,
    ConfigResourceType,
    Errors,
    IllegalStateException,
    KafkaError,
    OffsetAndMetadata,
    Producer,
    RecordTooLargeException,
    TimeoutException,
    TopicPartition,
    TransactionAbortedException,
)
from kcoord.client.config import CompressionType
from kcoord.client.producer.partitioner import partition_for_key
from kcoord_protocol.api_keys import ApiKey
from tests.integration.client.conftest import Target
from tests.integration.client.helpers import consumer_of, create_topic, read, values


@pytest.mark.parametrize("codec", get_args(CompressionType))
async def test_compression_codecs(target: Target, admin: AdminClient, name: str, codec: CompressionType) -> None:
    (partition,) = await create_topic(admin, name)
    async with Producer(bootstrap_servers=target.address, compression_type=codec, linger_ms=20) as producer:
        sent = [
            await producer.send(
                name, f"value-{number}" * 20, f"key-{number}", headers=[("n", str(number)), ("e", None)]
            )
            for number in range(200)
        ]
        await producer.flush()
        assert [future.result().offset for future in sent] == list(range(200))
    async with consumer_of(target.address) as consumer:
        consumer.assign([partition])
        records = await read(consumer, 200)
    assert values(records) == [f"value-{number}" * 20 for number in range(200)]
    assert [record.key for record in records] == [f"key-{number}".encode() for number in range(200)]
    assert records[7].headers == [("n", b"7"), ("e", None)]


async def test_records_of_a_key_keep_their_order_over_many_batches(
    target: Target, admin: AdminClient, name: str
) -> None:
    partitions = await create_topic(admin, name, 3)
    keys = [f"k{number}" for number in range(10)]
    async with Producer(bootstrap_servers=target.address, batch_size=500) as producer:
        for number in range(1000):
            await producer.send(name, str(number), keys[number % 10])
    async with consumer_of(target.address) as consumer:
        consumer.assign(partitions)
        records = await read(consumer, 1000)
    for number, key in enumerate(keys):
        mine = [record for record in records if record.key == key.encode()]
        assert values(mine) == [str(value) for value in range(number, 1000, 10)]
        assert {record.partition for record in mine} == {partition_for_key(key.encode(), 3)}


@pytest.mark.parametrize("acks", [0, 1])
async def test_acks_0_and_1_without_idempotence(target: Target, admin: AdminClient, name: str, acks: int) -> None:
    (partition,) = await create_topic(admin, name)
    async with Producer(
        bootstrap_servers=target.address,
        acks=acks,  # type: ignore[arg-type]
        enable_idempotence=False,
    ) as producer:
        stored = await producer.send_and_wait(name, "a", timestamp_ms=77)
    assert stored == (name, 0, 0 if acks else None, 77)
    async with consumer_of(target.address) as consumer:
        consumer.assign([partition])
        (record,) = await read(consumer, 1)
        assert (record.timestamp_ms, record.key) == (77, None)


async def test_the_first_record_creates_a_topic(target: Target, name: str) -> None:
    async with Producer(bootstrap_servers=target.address) as producer:
        assert (await producer.send_and_wait(name, "a")).offset == 0
        assert await producer.partitions_for(name) == [0]


async def test_records_that_cannot_be_sent(target: Target, admin: AdminClient, name: str) -> None:
    await create_topic(admin, name)
    small = {ConfigResource(ConfigResourceType.TOPIC, name): [AlterConfigOp("max.message.bytes", "500")]}
    async with Producer(
        bootstrap_servers=target.address, max_request_size=2000, max_block_ms=300, linger_ms=20
    ) as producer:
        with pytest.raises(RecordTooLargeException):
            await producer.send(name, b"x" * 2000)
        with pytest.raises(TimeoutException, match=f"{name}-5"):
            await producer.send(name, b"x", partition=5)
        (await admin.incremental_alter_configs(small)).all()
        large = await producer.send(name, b"x" * 1000)
        with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
            await large
        # The batch of all four is too large for the topic; single records are not.
        sent = [await producer.send(name, b"x" * 300) for _ in range(4)]
        assert [(await future).offset for future in sent] == [0, 1, 2, 3]
    with pytest.raises(IllegalStateException):
        await producer.send(name, b"x")


async def test_a_full_buffer_makes_send_wait(target: Target, admin: AdminClient, name: str) -> None:
    await create_topic(admin, name)
    async with Producer(bootstrap_servers=target.address, buffer_memory=3000, linger_ms=0) as producer:
        sent = [await producer.send(name, b"x" * 1000) for _ in range(50)]
        await producer.flush()
        assert [future.result().offset for future in sent] == list(range(50))


@pytest.fixture
async def transactional(target: Target, admin: AdminClient) -> Target:
    """A target that supports transactions."""
    connection = await admin._cluster.any_connection()
    if not connection.versions.offers(ApiKey.END_TXN):
        pytest.skip("the broker does not support transactions")
    return target


class TestTransactions:
    async def test_commit_and_abort(self, transactional: Target, admin: AdminClient, name: str) -> None:
        partitions = await create_topic(admin, name, 2)
        address = transactional.address
        async with Producer(bootstrap_servers=address, transactional_id=name, linger_ms=0) as producer:
            await producer.init_transactions()
            for number in range(4):
                await producer.begin_transaction()
                for partition in (0, 1):
                    await producer.send_and_wait(name, f"{number}", partition=partition)
                if number % 2:
                    await producer.abort_transaction()
                else:
                    await producer.commit_transaction()
        async with consumer_of(address, isolation_level="read_committed") as consumer:
            consumer.assign(partitions)
            assert sorted(values(await read(consumer, 4))) == ["0", "0", "2", "2"]
            assert await consumer.poll(100) == []
            assert await consumer.end_offsets(partitions) == dict.fromkeys(partitions, 8)
        async with consumer_of(address) as consumer:
            consumer.assign(partitions)
            assert sorted(values(await read(consumer, 8))) == sorted("00112233")

    async def test_readers_of_committed_records_wait_for_an_open_transaction(
        self, transactional: Target, admin: AdminClient, name: str
    ) -> None:
        (partition,) = await create_topic(admin, name)
        address = transactional.address
        async with (
            Producer(bootstrap_servers=address, transactional_id=name, linger_ms=0) as producer,
            consumer_of(address, isolation_level="read_committed") as consumer,
        ):
            consumer.assign([partition])
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send_and_wait(name, "a")
            assert await consumer.poll(200) == []
            assert await consumer.end_offsets([partition]) == {partition: 0}
            await producer.commit_transaction()
            assert values(await read(consumer, 1)) == ["a"]

    async def test_read_process_write(self, transactional: Target, admin: AdminClient, name: str) -> None:
        """Offsets and results are committed together or not at all."""
        (source,) = await create_topic(admin, name)
        (sink,) = await create_topic(admin, f"{name}-out")
        address = transactional.address
        async with Producer(bootstrap_servers=address) as producer:
            for number in range(6):
                await producer.send(name, str(number))
        async with (
            Producer(bootstrap_servers=address, transactional_id=name) as producer,
            consumer_of(address, name, enable_auto_commit=False, max_poll_records=3) as consumer,
        ):
            consumer.subscribe([name])
            await producer.init_transactions()
            for is_committed in (True, False):
                records = await read(consumer, 3)
                await producer.begin_transaction()
                for record in records:
                    await producer.send(sink.topic, record.value)
                offsets = {source: OffsetAndMetadata(records[-1].offset + 1)}
                await producer.send_offsets_to_transaction(offsets, consumer.group_metadata)
                if is_committed:
                    await producer.commit_transaction()
                else:
                    await producer.abort_transaction()
        committed = await admin.list_consumer_group_offsets([name], require_stable=True)
        assert committed[name] == {source: OffsetAndMetadata(3)}
        async with consumer_of(address, isolation_level="read_committed") as consumer:
            consumer.assign([sink])
            assert values(await read(consumer, 3)) == ["0", "1", "2"]
            assert await consumer.poll(100) == []

    async def test_a_newer_producer_fences_an_older_one(
        self, transactional: Target, admin: AdminClient, name: str
    ) -> None:
        await create_topic(admin, name)
        address = transactional.address
        async with (
            Producer(bootstrap_servers=address, transactional_id=name) as older,
            Producer(bootstrap_servers=address, transactional_id=name) as newer,
        ):
            await older.init_transactions()
            await older.begin_transaction()
            await older.send_and_wait(name, "old")
            await newer.init_transactions()
            with pytest.raises(KafkaError) as failure:
                await older.send_and_wait(name, "zombie")
                await older.commit_transaction()
            assert failure.value.error in (Errors.PRODUCER_FENCED, Errors.INVALID_PRODUCER_EPOCH)
            await newer.begin_transaction()
            await newer.send_and_wait(name, "new")
            await newer.commit_transaction()
        async with consumer_of(address, isolation_level="read_committed") as consumer:
            consumer.assign([TopicPartition(name, 0)])
            assert values(await read(consumer, 1)) == ["new"]

    async def test_an_abort_drops_unsent_records(self, transactional: Target, admin: AdminClient, name: str) -> None:
        await create_topic(admin, name)
        async with Producer(
            bootstrap_servers=transactional.address, transactional_id=name, linger_ms=60_000
        ) as producer:
            with pytest.raises(IllegalStateException):
                await producer.begin_transaction()
            await producer.init_transactions()
            with pytest.raises(IllegalStateException):
                await producer.send(name, "outside")
            await producer.begin_transaction()
            waiting = await producer.send(name, "a")
            await producer.abort_transaction()
            with pytest.raises(TransactionAbortedException):
                await waiting
            await producer.begin_transaction()
            stored = await producer.send(name, "b")
            await producer.commit_transaction()
            assert (await stored).offset == 0


async def test_a_plain_producer_has_no_transactions(target: Target) -> None:
    async with Producer(bootstrap_servers=target.address) as producer:
        with pytest.raises(IllegalStateException):
            await producer.init_transactions()


async def test_concurrent_senders(target: Target, admin: AdminClient, name: str) -> None:
    partitions = await create_topic(admin, name, 4)
    async with Producer(bootstrap_servers=target.address) as producer:

        async def send(number: int) -> None:
            for index in range(50):
                await producer.send_and_wait(name, f"{number}-{index}")

        await asyncio.gather(*(send(number) for number in range(10)))
    async with consumer_of(target.address) as consumer:
        consumer.assign(partitions)
        assert len(set(values(await read(consumer, 500)))) == 500
