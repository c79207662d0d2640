# SPDX-License-Identifier: Apache-2.0
"""Reads logs over the wire while brokers restart, leaders move, records and topics vanish, and rights are missing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kcoord.client.admin.client import AdminClient
from kcoord.client.producer.client import Producer
from kcoord.client.types import TopicPartition
from kcoord.pipeline.errors import BrokerError, DataLossError, OtherTopicError
from kcoord.pipeline.log_files import NoLogError
from kcoord.pipeline.log_stream import TOPIC_ID, StreamOffset
from kcoord.pipeline.options import OptionError, SourceOptions
from kcoord.pipeline.stream import KcoordStreamReader
from kcoord.pipeline.wire.client import CLIENT_ID
from kcoord.testing import allow
from tests.integration.clients.test_tls import PASSWORD, SecuredBroker
from tests.integration.test_reassignment import NODES, leaders, reassign
from tests.integration.test_workers import addresses, settings
from tests.support.authorizing_process import authorizing_process
from tests.support.followed_log import batch_rows
from tests.support.kcoord_process import KcoordProcess
from tests.support.offsets_sample import Row
from tests.support.quotas import alter_quota
from tests.support.served_logs import TOPIC, create_topic, replace_logs
from tests.unit.logtools.support import commit_record
from tests.unit.pipeline.support import LogWriter, source_rows

T = TypeVar("T")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path).start()
    asyncio.run(create_topic(process.address, 1))
    yield process
    process.kill()


def with_admin(address: str, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    async def run() -> T:
        async with AdminClient(bootstrap_servers=address) as admin:
            return await work(admin)

    return asyncio.run(run())


def commit(address: str, *offsets: int, partition: int = 0) -> None:
    """Writes records of committed offsets, each in a batch of its own."""

    async def run() -> None:
        async with Producer(bootstrap_servers=address) as producer:
            for offset in offsets:
                record = commit_record("g", "t", 0, offset)
                await producer.send(TOPIC, key=record.key, value=record.value, partition=partition)

    asyncio.run(run())


def stream(broker: KcoordProcess, **options: str) -> KcoordStreamReader:
    given = {"kafka.bootstrap.servers": addresses(broker), "topic": TOPIC, "table": "commits", **options}
    parsed = SourceOptions.parse(given)
    return KcoordStreamReader(parsed, parsed.table.schema())


def next_rows(reader: KcoordStreamReader, start: StreamOffset) -> tuple[list[int], StreamOffset]:
    """Returns the committed offsets in the next micro-batch, and the offset of the stream after it."""
    end = reader.latestOffset(start, ReadAllAvailable())
    return committed(batch_rows(reader, start, end)), end


def committed(rows: list[Row]) -> list[int]:
    return [int(str(row["committed_offset"])) for row in rows]


def test_a_stream_continues_after_a_restart(broker: KcoordProcess) -> None:
    reader = stream(broker)
    commit(broker.address, 1, 2)
    rows, offset = next_rows(reader, {})
    assert rows == [1, 2] and offset["0"] == 2 and TOPIC_ID in offset
    broker.kill()
    broker.start()
    assert next_rows(reader, offset) == ([], offset)
    commit(broker.address, 3)
    assert next_rows(reader, offset)[0] == [3]
    # Offsets of an older release have no topic id.
    assert next_rows(stream(broker), {"0": 1})[0] == [2, 3]


def test_a_quota_slows_the_stream_down_and_loses_nothing(broker: KcoordProcess) -> None:
    """The throttle lasts longer than the timeout of a request, and fails nothing."""
    broker.stop()
    broker.overrides |= {"quota.window.num": "2", "quota.window.size.seconds": "5"}
    broker.start()
    for offset in range(16):
        commit(broker.address, offset)
    (log,) = broker.data.glob(f"{TOPIC}-0/*.log")
    reader = stream(broker, **{"kafka.default.api.timeout.ms": "3000"})
    end = reader.latestOffset({}, ReadAllAvailable())
    # Five seconds' worth of bytes are free.
    rate = log.stat().st_size // 9
    alter_quota(broker.address, {"client-id": CLIENT_ID}, consumer_byte_rate=rate)
    began = time.monotonic()
    assert committed(batch_rows(reader, {}, end)) == [*range(16)]
    assert time.monotonic() - began > 3


def test_deleted_records_fail_the_stream_unless_it_accepts_a_loss(broker: KcoordProcess) -> None:
    reader = stream(broker)
    commit(broker.address, 1)
    _, offset = next_rows(reader, {})
    commit(broker.address, 2, 3, 4)
    end = reader.latestOffset(offset, ReadAllAvailable())
    planned = reader.partitions(offset, end)
    with_admin(broker.address, lambda admin: admin.delete_records({TopicPartition(TOPIC, 0): 3}))
    with pytest.raises(DataLossError, match=f"{TOPIC}-0: the records 1 to 2 were deleted"):
        reader.latestOffset(offset, ReadAllAvailable())
    with pytest.raises(DataLossError, match=f"{TOPIC}-0: the records 1 to 2 were deleted"):
        [*reader.read(planned[0])]
    lenient = stream(broker, failOnDataLoss="false")
    assert next_rows(lenient, offset)[0] == [4]
    assert next_rows(stream(broker), {})[0] == [4], "a new stream begins with the log"


def test_a_truncated_log_fails_the_stream_unless_it_accepts_a_loss(broker: KcoordProcess) -> None:
    commit(broker.address, 1, 2, 3)
    reader = stream(broker)
    _, offset = next_rows(reader, {})
    broker.stop()

    def fill(folder: Path) -> None:
        writer = LogWriter(folder, 0)
        writer.close()
        writer.folder.rename(folder / f"{TOPIC}-0")

    replace_logs(broker.data, fill, broker.data.parent / "filled")
    broker.start()
    commit(broker.address, 7)
    with pytest.raises(DataLossError, match=f"{TOPIC}-0 ends at offset 0, and was read up to offset 2"):
        reader.latestOffset(offset, ReadAllAvailable())
    lenient = stream(broker, failOnDataLoss="false")
    assert next_rows(lenient, offset) == ([], offset)
    commit(broker.address, 8, 9, 10)
    assert next_rows(lenient, offset)[0] == [10], "the log has grown beyond the offset"


def test_a_deleted_topic_fails_the_stream_and_a_new_one_always_does(broker: KcoordProcess) -> None:
    commit(broker.address, 1)
    reader, lenient = stream(broker), stream(broker, failOnDataLoss="false")
    _, offset = next_rows(reader, {})
    with_admin(broker.address, lambda admin: admin.delete_topics([TOPIC]))
    with pytest.raises(DataLossError, match=f"{TOPIC}-0 does not exist any more, and was read up to offset 0"):
        reader.latestOffset(offset, ReadAllAvailable())
    assert next_rows(lenient, offset) == ([], offset)
    asyncio.run(create_topic(broker.address, 1))
    commit(broker.address, 2, 3)
    for each_reader in (reader, lenient):
        with pytest.raises(OtherTopicError, match=f"{TOPIC} has the topic id .*, but the stream has read"):
            each_reader.latestOffset(offset, ReadAllAvailable())
    folders = SourceOptions.parse({"path": str(broker.data), "topic": TOPIC})
    with pytest.raises(OtherTopicError, match="it was deleted and created again"):
        KcoordStreamReader(folders, folders.table.schema()).latestOffset(offset, ReadAllAvailable())
    assert next_rows(stream(broker), {})[0] == [2, 3]


def test_an_open_transaction_holds_the_stream_until_it_is_abandoned(broker: KcoordProcess) -> None:
    async def transaction() -> StreamOffset:
        async with Producer(bootstrap_servers=broker.address, transactional_id="open") as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            record = commit_record("g", "t", 1, 5)
            await producer.send_and_wait(TOPIC, record.value, record.key)
            await asyncio.to_thread(commit, broker.address, 6)
            held = await asyncio.to_thread(stream(broker).latestOffset, {}, ReadAllAvailable())
            assert held == {}, "the first offset is that of the transaction"
            uncommitted = stream(broker, isolationLevel="read_uncommitted")
            assert uncommitted.latestOffset({}, ReadAllAvailable())["0"] == 2
            await asyncio.sleep(0.3)
            abandoned = stream(broker, abandonedTransactionMs="250")
            offset = abandoned.latestOffset({}, ReadAllAvailable())
            assert offset["0"] == 2
            await producer.commit_transaction()
            return offset

    asyncio.run(transaction())
    assert next_rows(stream(broker), {})[0] == [5, 6]


def test_a_stream_follows_leaders_that_move(tmp_path: Path) -> None:
    process = KcoordProcess(tmp_path, settings()).start()
    try:
        asyncio.run(create_topic(addresses(process), 3))
        reader, offset, seen = stream(process), StreamOffset(), []
        for number in range(4):
            for partition in range(3):
                commit(addresses(process), 10 * number + partition, partition=partition)
            planned = reader.latestOffset(offset, ReadAllAvailable())
            ranges = reader.partitions(offset, planned)
            moves = {partition: [NODES[(partition + number) % len(NODES)]] for partition in range(3)}
            assert reassign(process.ports[0], TOPIC, moves) == {0: 0, 1: 0, 2: 0}
            seen += [row for work in ranges for batch in reader.read(work) for row in batch.to_pylist()]
            offset = planned
        assert len({leader for leader, _ in leaders(process.ports[0], TOPIC).values()}) == 3
        assert sorted(committed(seen)) == sorted(
            10 * number + partition for number in range(4) for partition in range(3)
        )
    finally:
        process.kill()


def rows_as(address: str, **more: str) -> list[int]:
    return committed(source_rows({"kafka.bootstrap.servers": address, "topic": TOPIC, "table": "commits", **more}))


def test_errors_name_the_missing_right_the_topic_or_the_address(tmp_path: Path) -> None:
    process = authorizing_process(
        tmp_path,
        listeners="PLAINTEXT://127.0.0.1:0,ALICE://127.0.0.1:0",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,ALICE:PLAINTEXT",
        kcoord_listener_principals="ALICE=User:alice",
    ).start()
    try:
        asyncio.run(create_topic(process.address, 1))
        commit(process.address, 1)
        alice = f"127.0.0.1:{process.ports[1]}"
        right = f"TOPIC_AUTHORIZATION_FAILED: the client needs an ACL that allows READ on the topic {TOPIC}"
        with pytest.raises(BrokerError, match=right):
            rows_as(alice)
        grant(process, "Describe")
        with pytest.raises(BrokerError, match=right):
            rows_as(alice)
        grant(process, "Read")
        assert rows_as(alice) == [1]
        with pytest.raises(NoLogError, match="topic: nothing does not exist"):
            source_rows({"kafka.bootstrap.servers": process.address, "topic": "nothing"})
    finally:
        process.kill()
    began = time.monotonic()
    with pytest.raises(BrokerError, match=f"{re.escape(alice)}: .*no connection to"):
        rows_as(alice, **{"kafka.default.api.timeout.ms": "300"})
    assert time.monotonic() - began < 10
    with pytest.raises(OptionError, match=r"kafka.bootstrap.servers: give the addresses"):
        SourceOptions.parse({"kafka.client.id": "x"})
    with pytest.raises(OptionError, match="path: '/data' cannot be read together"):
        SourceOptions.parse({"kafka.bootstrap.servers": alice, "path": "/data"})
    secret = SourceOptions.parse({"kafka.bootstrap.servers": alice, "kafka.sasl.jaas.config": "hidden"})
    assert "hidden" not in repr(secret)


def grant(process: KcoordProcess, operation: str) -> None:
    with_admin(process.address, lambda admin: admin.create_acls([allow("alice", operation, topic=TOPIC)]))


def test_logs_are_read_over_tls(tmp_path: Path) -> None:
    secured = SecuredBroker(tmp_path, ssl_client_auth="required")
    secured.start()
    try:
        plain = f"127.0.0.1:{secured.ports[1]}"
        asyncio.run(create_topic(plain, 1))
        commit(plain, 1, 2)
        keystore = tmp_path / "client.p12"
        secured.issue("client").write_pkcs12(keystore, PASSWORD)
        trust = {
            "kafka.security.protocol": "SSL",
            "kafka.ssl.truststore.type": "PEM",
            "kafka.ssl.truststore.location": secured.authority_file,
            "kafka.default.api.timeout.ms": "2000",
        }
        key = {
            "kafka.ssl.keystore.type": "PKCS12",
            "kafka.ssl.keystore.location": str(keystore),
            "kafka.ssl.keystore.password": PASSWORD,
        }
        assert rows_as(secured.address, **trust, **key) == [1, 2]
        with pytest.raises(BrokerError):
            rows_as(secured.address, **trust)
    finally:
        secured.kill()
