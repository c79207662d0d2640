# SPDX-License-Identifier: Apache-2.0
"""The consumer against a broker with records, compared with a model, on virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Unpack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.client import (
    Consumer,
    ConsumerRecord,
    Errors,
    IllegalStateException,
    KafkaError,
    NoOffsetForPartitionException,
    OffsetAndMetadata,
    OffsetOutOfRangeException,
    TimeoutException,
    TopicPartition,
)
from kcoord.client.config import ConsumerOptions
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.signal import Signal, wait_for
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import FetchRequest, MetadataRequest, MetadataResponse
from kcoord_protocol.record_batch import Record, encode_batch
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.client.fake_broker import Answer, FakeBroker
from tests.unit.client.records_broker import ONE, TOPIC, TOPIC_ID, ZERO, Log, RecordsBroker, numbers
from tests.unit.client.test_cluster import cluster_of
from tests.unit.client.virtual_loop import now_ms, quiet, run, running_loop, took_ms

pytestmark = pytest.mark.usefixtures("no_surprise")


@asynccontextmanager
async def consumer_of(
    broker: FakeBroker, *partitions: TopicPartition, **options: Unpack[ConsumerOptions]
) -> AsyncIterator[Consumer]:
    """Yields a consumer of these partitions. It reads from the beginning, unless the options set another policy."""
    settings: ConsumerOptions = {
        "bootstrap_servers": broker.address,
        "auto_offset_reset": "earliest",
        **options,
    }
    async with Consumer(**settings) as consumer:
        if partitions:
            consumer.assign(partitions)
        yield consumer


def offsets(records: Iterable[ConsumerRecord]) -> list[int]:
    return [record.offset for record in records]


def with_wrong_checksum(batch: bytes) -> bytes:
    return batch[:17] + bytes([batch[17] ^ 1]) + batch[18:]


class Model:
    """A model of the positions, by the rules of seek, pause and poll."""

    def __init__(self, broker: RecordsBroker, consumer: Consumer) -> None:
        self.broker = broker
        self.consumer = consumer
        self.positions = {ZERO: 0, ONE: 0}
        self.starts = {ZERO: {0}, ONE: {0}}
        """All first offsets that the logs have had. A position before the first offset is reset to it."""
        self.paused: set[TopicPartition] = set()

    def append(self, partition: TopicPartition, count: int) -> None:
        end = self.broker.logs[partition].end
        self.broker.append(partition, *numbers(end, end + count))

    def truncate(self, partition: TopicPartition) -> None:
        log = self.broker.logs[partition]
        if log.batches:
            log.start = log.batches.pop(0)[1]
            self.starts[partition].add(log.start)

    async def poll(self, count: int) -> None:
        records = await self.consumer.poll(20, max_records=count)
        assert len(records) <= count
        for record in records:
            partition = record.topic_partition
            assert partition not in self.paused
            self.move(partition, record.offset)
            assert (record.value or b"").decode() == str(record.offset)
            self.positions[partition] = record.offset + 1
        for partition in (ZERO, ONE):
            await self.check(partition)

    async def check(self, partition: TopicPartition) -> None:
        self.move(partition, await self.consumer.position(partition))

    def move(self, partition: TopicPartition, offset: int) -> None:
        before = self.positions[partition]
        assert offset == before or (offset > before and offset in self.starts[partition])
        self.positions[partition] = offset

    async def seek(self, partition: TopicPartition, share: int) -> None:
        log = self.broker.logs[partition]
        self.positions[partition] = log.start + (log.end - log.start) * share // 4
        self.consumer.seek(partition, self.positions[partition])
        await self.check(partition)

    async def seek_to(self, partition: TopicPartition, is_end: bool) -> None:
        log = self.broker.logs[partition]
        (self.consumer.seek_to_end if is_end else self.consumer.seek_to_beginning)([partition])
        self.positions[partition] = log.end if is_end else log.start
        await self.check(partition)

    def pause(self, partition: TopicPartition, is_paused: bool) -> None:
        if is_paused:
            self.consumer.pause([partition])
            self.paused.add(partition)
        else:
            self.consumer.resume([partition])
            self.paused.discard(partition)
        assert self.consumer.paused == self.paused

    async def finish(self) -> None:
        """Reads all remaining records."""
        for partition in (ZERO, ONE):
            self.pause(partition, False)
        for _ in range(100):
            if all(self.positions[partition] == self.broker.logs[partition].end for partition in (ZERO, ONE)):
                return
            await self.poll(50)
            await asyncio.sleep(1)
        raise AssertionError(f"the consumer stops at {self.positions}")


PARTITIONS = st.sampled_from([ZERO, ONE])
FETCH_ERRORS = (
    Errors.NOT_LEADER_OR_FOLLOWER,
    Errors.UNKNOWN_LEADER_EPOCH,
    Errors.OFFSET_NOT_AVAILABLE,
    Errors.KAFKA_STORAGE_ERROR,
)
OUTDATED = (
    *FETCH_ERRORS,
    Errors.FENCED_LEADER_EPOCH,
    Errors.UNKNOWN_TOPIC_OR_PARTITION,
    Errors.UNKNOWN_TOPIC_ID,
    Errors.INCONSISTENT_TOPIC_ID,
    Errors.REPLICA_NOT_AVAILABLE,
    Errors.LEADER_NOT_AVAILABLE,
)
STEPS = st.one_of(
    st.tuples(st.just("append"), PARTITIONS, st.integers(1, 4)),
    st.tuples(st.just("append"), PARTITIONS, st.integers(1, 4)),
    st.tuples(st.just("poll"), st.none(), st.integers(1, 5)),
    st.tuples(st.just("poll"), st.none(), st.integers(1, 5)),
    st.tuples(st.just("seek"), PARTITIONS, st.integers(0, 4)),
    st.tuples(st.just("seek_to"), PARTITIONS, st.booleans()),
    st.tuples(st.just("pause"), PARTITIONS, st.booleans()),
    st.tuples(st.just("truncate"), PARTITIONS, st.none()),
    st.tuples(st.just("error"), st.none(), st.sampled_from(FETCH_ERRORS)),
    st.tuples(st.just("session error"), st.none(), st.none()),
    st.tuples(st.just("hang up"), st.none(), st.none()),
    st.tuples(st.just("wait"), st.none(), st.integers(1, 300)),
)


@settings(max_examples=40)
@given(st.lists(STEPS, max_size=30), st.sampled_from([1, 150, 1 << 20]))
def test_every_record_from_the_position_on_once_and_in_order(
    steps: list[tuple[str, TopicPartition, int]], max_bytes: int
) -> None:
    """This holds for all failures of requests and all seeks of the application."""

    async def main() -> None:
        async with (
            RecordsBroker() as broker,
            consumer_of(broker, ZERO, ONE, max_partition_fetch_bytes=max_bytes) as consumer,
        ):
            model = Model(broker, consumer)
            for kind, partition, number in steps:
                match kind:
                    case "append":
                        model.append(partition, number)
                    case "poll":
                        await model.poll(number)
                    case "seek":
                        await model.seek(partition, number)
                    case "seek_to":
                        await model.seek_to(partition, bool(number))
                    case "pause":
                        model.pause(partition, bool(number))
                    case "truncate":
                        model.truncate(partition)
                    case "error":
                        broker.errors[ApiKey.FETCH] = [Errors(number)]
                    case "session error":
                        broker.sessions.sessions.clear()
                    case "hang up":
                        broker.hang_up()
                    case "wait":
                        await asyncio.sleep(number / 1000)
            await model.finish()

    run(main())


class TestFetch:
    async def test_fetch_requests(self) -> None:
        async with (
            RecordsBroker() as broker,
            consumer_of(
                broker,
                ONE,
                fetch_max_wait_ms=700,
                fetch_min_bytes=11,
                fetch_max_bytes=12,
                max_partition_fetch_bytes=13,
                isolation_level="read_committed",
            ) as consumer,
        ):
            broker.append(ONE, "0")
            assert offsets(await consumer.poll(1000)) == [0]
            partition = FetchRequest.FetchPartition(
                partition=1, current_leader_epoch=3, fetch_offset=0, partition_max_bytes=13
            )
            assert broker.fetches()[0] == FetchRequest(
                max_wait_ms=700,
                min_bytes=11,
                max_bytes=12,
                isolation_level=1,
                session_id=0,
                session_epoch=0,
                topics=[FetchRequest.FetchTopic(topic="", topic_id=TOPIC_ID, partitions=[partition])],
            )
        async with RecordsBroker() as broker, consumer_of(broker, ONE) as consumer:
            await consumer.poll(10)
            assert broker.fetches()[0].isolation_level == 0

    @pytest.mark.parametrize(
        ("highest", "topic_id", "version"),
        [(17, TOPIC_ID, 17), (17, ZERO_UUID, 12), (12, TOPIC_ID, 12), (5, TOPIC_ID, 5)],
    )
    async def test_topics_are_identified_by_id_if_it_is_known(
        self, highest: int, topic_id: bytes, version: int
    ) -> None:
        async with RecordsBroker(fetch=(4, highest)) as broker:
            broker.topics[0].topic_id = topic_id
            for partition in broker.topics[0].partitions:
                partition.leader_epoch = 3 if version >= 9 else -1
            broker.append(ZERO, "0", "1")
            async with consumer_of(broker, ZERO) as consumer:
                assert offsets(await consumer.poll(1000)) == [0, 1]
            assert broker.versions_of(ApiKey.FETCH)[0] == version

    async def test_a_topic_that_was_created_again_is_read_from_the_position_on(self) -> None:
        """As Java's consumer does. A position that the new topic does not have is reset."""
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            broker.append(ZERO, "0", "1")
            assert offsets(await consumer.poll(1000)) == [0, 1]
            broker.logs[ZERO] = Log()
            broker.topics[0].topic_id = bytes(15) + b"\x02"
            broker.append(ZERO, *numbers(0, 4))
            assert offsets(await consumer.poll(5000)) == [2, 3]
            broker.logs[ZERO] = Log()
            broker.topics[0].topic_id = bytes(15) + b"\x03"
            broker.append(ZERO, "0")
            assert offsets(await consumer.poll(5000)) == [0]

    async def test_two_responses_per_partition_are_buffered(self) -> None:
        """The consumer buffers two responses per partition. It fetches a third when the first has been returned."""
        async with RecordsBroker() as broker:
            for first in range(0, 10, 2):
                broker.append(ZERO, *numbers(first, first + 2))
            async with consumer_of(broker, ZERO, max_partition_fetch_bytes=1) as consumer:
                await quiet()
                assert [self.asked_offset(request) for request in broker.fetches()] == [0, 2]
                assert offsets(await consumer.poll(0, max_records=1)) == [0]
                await quiet()
                assert len(broker.fetches()) == 2
                assert offsets(await consumer.poll(0, max_records=1)) == [1]
                assert offsets(await consumer.poll(0, max_records=1)) == [2]
                await quiet()
                assert [self.asked_offset(request) for request in broker.fetches()] == [0, 2, 4]

    @staticmethod
    def asked_offset(request: FetchRequest) -> int:
        ((partition,),) = [topic.partitions for topic in request.topics]
        return partition.fetch_offset

    async def test_partitions_take_turns(self) -> None:
        async with RecordsBroker() as broker:
            for partition in (ZERO, ONE):
                for first in range(0, 6, 3):
                    broker.append(partition, *numbers(first, first + 3))
            async with consumer_of(broker, ZERO, ONE, max_partition_fetch_bytes=1) as consumer:
                await quiet()
                polled = [await consumer.poll(0, max_records=count) for count in (2, 2, 4, 3, 4)]
        seen = [[(record.partition, record.offset) for record in records] for records in polled]
        first, second = sorted({0, 1}, key=lambda partition: partition != seen[0][0][0])
        flat = [record for records in seen for record in records]
        assert [offset for partition, offset in flat if partition == first] == list(range(6))
        assert [offset for partition, offset in flat if partition == second] == list(range(6))
        assert [len(records) for records in seen] == [2, 2, 4, 3, 1]
        assert {partition for partition, _ in flat[:6]} == {first}
        assert {partition for partition, _ in flat[6:]} == {second}

    async def test_a_partition_without_records_does_not_delay_the_next(self) -> None:
        async with RecordsBroker() as broker:
            for partition in (ZERO, ONE):
                broker.append(partition, "0", "1")
            async with consumer_of(broker, ZERO, ONE) as consumer:
                await quiet()
                consumer.pause([ZERO])
                assert {record.partition for record in await consumer.poll(0)} == {1}
                broker.append(ONE, "2")
                assert offsets(await consumer.poll(1000)) == [2]
                asked = len(broker.fetches())
                consumer.resume([ZERO])
                assert offsets(await consumer.poll(0)) == [0, 1]
                assert len(broker.fetches()) == asked, "the buffered records are still there"

    async def test_a_response_from_before_a_seek_is_dropped(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, *numbers(0, 4))
            async with consumer_of(broker, ZERO) as consumer:
                await quiet()
                consumer.seek(ZERO, 2)
                assert await consumer.poll(0) == []
                assert offsets(await consumer.poll(1000)) == [2, 3]
                waiting = asyncio.create_task(consumer.poll(1000))
                await asyncio.sleep(0.1)
                consumer.seek(ZERO, 3)
                assert offsets(await waiting) == [3]

    async def test_a_response_for_an_unassigned_partition_is_dropped(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO, ONE) as consumer:
            await consumer.poll(100)
            consumer.assign([ONE])
            broker.append(ZERO, "0")
            assert await consumer.poll(2000) == []
            broker.append(ONE, "0")
            assert [record.topic_partition for record in await consumer.poll(1000)] == [ONE]
            consumer.assign([ZERO])
            assert [record.topic_partition for record in await consumer.poll(1000)] == [ZERO]

    async def test_the_timeout_of_a_fetch_includes_the_wait_of_the_broker(self) -> None:
        async with RecordsBroker() as broker:
            broker.handlers[ApiKey.FETCH] = lambda *_: None
            async with consumer_of(broker, ZERO, request_timeout_ms=2000, fetch_max_wait_ms=500):
                await quiet(10)
                first, second, *_ = broker.arrivals_of(ApiKey.FETCH)
                assert second - first == 2500 + 100

    @pytest.mark.parametrize("is_whole", [False, True])
    @pytest.mark.parametrize("error", OUTDATED)
    async def test_a_leader_that_may_have_moved_is_looked_up(self, error: Errors, is_whole: bool) -> None:
        asked = []
        for errors in ([], [error]):
            async with RecordsBroker() as broker:
                broker.append(ZERO, "0")
                if is_whole:
                    broker.fetch_errors = errors.copy()
                else:
                    broker.errors[ApiKey.FETCH] = errors.copy()
                async with consumer_of(broker, ZERO) as consumer:
                    before = now_ms()
                    assert offsets(await consumer.poll(10_000)) == [0]
                    assert now_ms() - before == (100 if errors else 0)
                    asked.append(len(broker.requests_of(ApiKey.METADATA)))
        assert asked[1] == asked[0] + 1

    @pytest.mark.parametrize("is_whole", [False, True])
    async def test_backoffs_grow_until_a_request_succeeds(self, is_whole: bool) -> None:
        async with RecordsBroker() as broker:
            errors = broker.fetch_errors if is_whole else broker.errors.setdefault(ApiKey.FETCH, [])
            for _ in range(2):
                errors += [Errors.NOT_LEADER_OR_FOLLOWER] * 3
                broker.append(ZERO, "x")
                async with consumer_of(broker, ZERO, fetch_max_wait_ms=10) as consumer:
                    before, count = now_ms(), len(broker.fetches())
                    await consumer.poll(10_000)
                    assert [time - before for time in broker.arrivals_of(ApiKey.FETCH)[count:]][:4] == [
                        0,
                        100,
                        300,
                        700,
                    ]
                    errors += [Errors.NOT_LEADER_OR_FOLLOWER] * 2
                    await asyncio.sleep(1)
                    assert errors == []
                    times = broker.arrivals_of(ApiKey.FETCH)[count + 4 :]
                    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
                    assert [wait for wait in waits if wait > 10] == [100, 200]

    @pytest.mark.parametrize(
        "error",
        [Errors.FETCH_SESSION_ID_NOT_FOUND, Errors.INVALID_FETCH_SESSION_EPOCH, Errors.FETCH_SESSION_TOPIC_ID_ERROR],
    )
    async def test_a_lost_session_is_opened_again_at_once(self, error: Errors) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            await consumer.poll(1200)
            count = len(broker.fetches())
            assert [request.session_epoch for request in broker.fetches()] == list(range(count))
            broker.fetch_errors = [error]
            await consumer.poll(600)
            refused, full, *_ = broker.fetches()[count:]
            assert (refused.session_epoch, refused.topics) == (count, [])
            assert (full.session_epoch, len(full.topics)) == (0, 1)
            assert full.session_id == (0 if error is Errors.FETCH_SESSION_ID_NOT_FOUND else refused.session_id)
            first, second, *_ = broker.arrivals_of(ApiKey.FETCH)[count:]
            assert first == second

    async def test_a_session_error_of_a_full_request_is_retried_after_a_backoff(self) -> None:
        async with RecordsBroker() as broker:
            broker.fetch_errors = [Errors.FETCH_SESSION_ID_NOT_FOUND]
            async with consumer_of(broker, ZERO) as consumer:
                await consumer.position(ZERO)
                await quiet()
                first, second, *_ = broker.arrivals_of(ApiKey.FETCH)
                assert second - first == 100

    @pytest.mark.parametrize("is_whole", [False, True])
    async def test_poll_raises_an_error_once(self, is_whole: bool) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            if is_whole:
                broker.fetch_errors = [Errors.CLUSTER_AUTHORIZATION_FAILED]
            else:
                broker.errors[ApiKey.FETCH] = [Errors.TOPIC_AUTHORIZATION_FAILED]
            async with consumer_of(broker, ZERO) as consumer:
                with pytest.raises(
                    KafkaError, match="AUTHORIZATION_FAILED: Fetch" + ("" if is_whole else " of t-0 at 0")
                ):
                    await consumer.poll()
                assert broker.arrivals_of(ApiKey.FETCH) == [now_ms()], "poll is woken"
                assert offsets(await consumer.poll(1000)) == [0]
                assert now_ms() == 100

    async def test_a_corrupt_batch_is_raised_and_fetched_again(self) -> None:
        """The consumer does not return records after the batch before it has fetched the batch again."""
        good = encode_batch([Record(value=b"0", timestamp_ms=1), Record(value=b"1", timestamp_ms=1)])
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", "1", data=with_wrong_checksum(good))
            broker.append(ZERO, "2", "3")
            async with consumer_of(broker, ZERO, max_partition_fetch_bytes=1) as consumer:
                await quiet()
                with pytest.raises(CorruptBatchError, match="t-0: wrong checksum"):
                    await consumer.poll()
                assert await consumer.position(ZERO) == 0
                broker.logs[ZERO].batches[0] = (0, 2, good, 1)
                assert offsets(await consumer.poll(1000, max_records=2)) == [0, 1]
                assert offsets(await consumer.poll(1000)) == [2, 3]

    @pytest.mark.parametrize("partition", [ZERO, ONE])
    @pytest.mark.parametrize("is_batch", [True, False])
    @pytest.mark.parametrize("max_bytes", [1, 1 << 20])
    async def test_records_before_a_corrupt_batch_are_returned(
        self, partition: TopicPartition, is_batch: bool, max_bytes: int
    ) -> None:
        """Their positions would be committed otherwise, though `poll` has not returned the records."""
        bad = with_wrong_checksum(encode_batch([Record(value=b"x", timestamp_ms=1)], base_offset=2))
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", "1")
            broker.append(ONE, "0", "1")
            broker.append(partition, "x", data=bad if is_batch else b"\xff" * 100)
            async with consumer_of(broker, ZERO, ONE, max_partition_fetch_bytes=max_bytes) as consumer:
                await quiet()
                records = sorted((record.partition, record.offset) for record in await consumer.poll())
                assert records == [(0, 0), (0, 1), (1, 0), (1, 1)]
                for _ in range(2):
                    with pytest.raises(CorruptBatchError):
                        await consumer.poll()
                assert (await consumer.position(ZERO), await consumer.position(ONE)) == (2, 2)

    async def test_check_crcs_can_be_disabled(self) -> None:
        good = encode_batch([Record(value=b"0", timestamp_ms=1)])
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", data=with_wrong_checksum(good))
            async with consumer_of(broker, ZERO, check_crcs=False) as consumer:
                assert len(await consumer.poll(1000)) == 1

    async def test_records_that_are_not_a_batch(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", data=b"\x00" * 100)
            async with consumer_of(broker, ZERO) as consumer:
                await quiet()
                assert len(broker.fetches()) == 2, "the buffer is full"
                with pytest.raises(CorruptBatchError):
                    await consumer.poll()

    @pytest.mark.parametrize(
        ("isolation", "expected"), [("read_committed", [2, 3]), ("read_uncommitted", [0, 1, 2, 3])]
    )
    async def test_aborted_transactions(self, isolation: str, expected: list[int]) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", "1", producer_id=5)
            broker.append(ZERO, "2", "3")
            broker.logs[ZERO].aborted = [(5, 0)]
            async with consumer_of(broker, ZERO, isolation_level=isolation) as consumer:  # type: ignore[arg-type]
                assert offsets(await consumer.poll(1000)) == expected
                assert await consumer.position(ZERO) == 4

    async def test_records_and_commits_have_the_leader_epoch(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                (record,) = await consumer.poll(1000)
                await consumer.commit()
                assert (record.leader_epoch, broker.committed) == (3, {ZERO: OffsetAndMetadata(1, "", 3)})

    @pytest.mark.parametrize(("epoch", "committed"), [(0, 0), (-1, 3)])
    async def test_an_unknown_leader_epoch_does_not_replace_a_known_one(self, epoch: int, committed: int) -> None:
        batch = encode_batch([Record(value=b"1", timestamp_ms=1)], base_offset=1, partition_leader_epoch=epoch)
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                await consumer.poll(1000)
                broker.append(ZERO, "1", data=batch)
                await consumer.poll(1000)
                await consumer.commit()
                assert broker.committed == {ZERO: OffsetAndMetadata(2, "", committed)}

    async def test_after_a_failure_the_next_request_is_a_full_one(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            await consumer.poll(600)
            count = len(broker.fetches())
            broker.fetch_errors = [Errors.NOT_LEADER_OR_FOLLOWER]
            await consumer.poll(2000)
            epochs = [request.session_epoch for request in broker.fetches()[count:]]
            assert epochs[:3] == [count, 0, 1]

    async def test_seek_and_resume_take_effect_at_once(self) -> None:
        async with RecordsBroker() as broker:
            broker.handlers[ApiKey.LIST_OFFSETS] = lambda *_: None
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO) as consumer:
                await asyncio.sleep(0.2)
                consumer.seek(ZERO, 0)
                assert offsets(await consumer.poll(0)) == []
                assert offsets(await consumer.poll(10)) == [0]
                assert now_ms() == 200
                consumer.pause([ZERO])
                await quiet()
                broker.append(ZERO, "1")
                await quiet()
                before = now_ms()
                consumer.resume([ZERO])
                assert offsets(await consumer.poll(10)) == [1]
                assert now_ms() == before

    async def test_an_unknown_leader_is_looked_up(self) -> None:
        async with RecordsBroker() as broker:
            broker.topics[0].partitions[0].leader_id = -1
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO) as consumer:
                consumer.seek(ZERO, 0)
                await quiet()
                broker.topics[0].partitions[0].leader_id = broker.node_id
                assert offsets(await consumer.poll(5000)) == [0]

    async def test_buffered_records_are_returned_before_the_position_is_reset(self) -> None:
        """The offset of the next fetch is out of range, but the position is not."""
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO, auto_offset_reset="latest") as consumer:
                consumer.seek(ZERO, 0)
                await asyncio.sleep(0.1)
                broker.logs[ZERO].end = 0
                await quiet()
                assert offsets(await consumer.poll(0)) == [0]
                assert broker.looked_up() == []
                broker.logs[ZERO].end = 7
                broker.logs[ZERO].start = 5
                await consumer.poll(2000)
                assert await consumer.position(ZERO) == 7
                assert broker.looked_up() == [(0, -1)]

    async def test_a_partition_without_a_leader_waits_for_one(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO) as consumer:
                await consumer.position(ZERO)
                leader, broker.topics[0].partitions[0].leader_id = broker.topics[0].partitions[0].leader_id, -1
                broker.hang_up()
                await quiet()
                broker.topics[0].partitions[0].leader_id = leader
                assert offsets(await consumer.poll(5000)) == [0]

    async def test_poll_raises_why_the_metadata_has_no_leader(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            consumer.seek(ZERO, 0)
            broker.topics = [
                MetadataResponse.MetadataResponseTopic(name=TOPIC, error_code=Errors.TOPIC_AUTHORIZATION_FAILED)
            ]
            for _ in range(2):
                with pytest.raises(KafkaError, match="TOPIC_AUTHORIZATION_FAILED: t"):
                    await consumer.poll(5000)

    async def test_each_leader_gets_a_fetch_for_its_partitions(self) -> None:
        first, second = RecordsBroker(), RecordsBroker()
        second.node_id = 2
        async with first, second:
            first.peers, second.peers = [second], [first]
            for broker in (first, second):
                broker.topics[0].partitions[1].leader_id = 2
                broker.topics[0].partitions[0].leader_id = 1
            first.append(ZERO, "0")
            second.append(ONE, "0")
            async with consumer_of(first, ZERO, ONE) as consumer:
                records = await consumer.poll(1000) + await consumer.poll(100)
                assert {record.topic_partition for record in records} == {ZERO, ONE}
            assert {self.partitions(request) for request in first.fetches()} <= {(0,), ()}
            assert {self.partitions(request) for request in second.fetches()} <= {(1,), ()}

    @staticmethod
    def partitions(request: FetchRequest) -> tuple[int, ...]:
        return tuple(partition.partition for topic in request.topics for partition in topic.partitions)


class TestPoll:
    async def test_poll_waits_up_to_its_timeout(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            for timeout_ms in (0, 70, 1234.5):
                assert await took_ms(consumer.poll(timeout_ms)) == timeout_ms
            waiting = asyncio.create_task(consumer.poll())
            await asyncio.sleep(60)
            broker.append(ZERO, "0")
            assert offsets(await waiting) == [0]

    async def test_poll_returns_at_most_max_records(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO, max_poll_records=3) as consumer:
            broker.append(ZERO, *numbers(0, 10))
            assert offsets(await consumer.poll(1000)) == [0, 1, 2]
            assert offsets(await consumer.poll(1000, max_records=4)) == [3, 4, 5, 6]
            assert [(await anext(consumer)).offset for _ in range(3)] == [7, 8, 9]
            assert await consumer.position(ZERO) == 10

    async def test_a_loop_of_polls_without_a_wait_reads(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            broker.append(ZERO, "0")
            seen = []
            for _ in range(100):
                seen += await consumer.poll(0)
            assert offsets(seen) == [0]

    async def test_one_poll_at_a_time(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO) as consumer:
            waiting = asyncio.create_task(consumer.poll())
            await asyncio.sleep(1)
            with pytest.raises(IllegalStateException, match="being polled already"):
                await consumer.poll()
            broker.append(ZERO, "0")
            await waiting
            await consumer.poll(0)

    async def test_close_ends_a_poll_and_everything_else(self) -> None:
        async with RecordsBroker() as broker:
            async with consumer_of(broker, ZERO) as consumer:
                waiting = asyncio.create_task(consumer.poll())
                await asyncio.sleep(1)
            with pytest.raises(IllegalStateException, match="not started, or closed"):
                await waiting
            assert running_loop().connections == set()
            requests = len(broker.requests)
            await quiet(500)
            assert len(broker.requests) == requests
            await consumer.close()
            calls: list[Callable[[], object]] = [
                lambda: consumer.subscribe(["t"]),
                lambda: consumer.assign([ZERO]),
                lambda: consumer.seek(ZERO, 0),
                lambda: consumer.seek_to_end(),
                lambda: consumer.pause([ZERO]),
                lambda: consumer.resume([ZERO]),
                lambda: consumer.commit_async(),
            ]
            for call in calls:
                with pytest.raises(IllegalStateException, match="not started, or closed"):
                    call()
            works: list[Awaitable[object]] = [
                consumer.unsubscribe(),
                consumer.poll(),
                consumer.commit(),
                consumer.committed([ZERO]),
                consumer.position(ZERO),
                consumer.end_offsets([ZERO]),
                consumer.partitions_for(TOPIC),
            ]
            for work in works:
                with pytest.raises(IllegalStateException, match="not started, or closed"):
                    await work

    async def test_close_ends_a_poll_of_nothing(self) -> None:
        async with RecordsBroker() as broker:
            async with consumer_of(broker) as consumer:
                waiting = asyncio.create_task(consumer.poll())
                await asyncio.sleep(1)
            with pytest.raises(IllegalStateException, match="not started, or closed"):
                await waiting

    async def test_metadata_is_kept_fresh(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, metadata_max_age_ms=1000):
            await asyncio.sleep(3.5)
            assert broker.arrivals_of(ApiKey.METADATA) == [0, 1000, 2000, 3000]

    async def test_start_times_out_without_a_cluster(self) -> None:
        consumer = Consumer(bootstrap_servers="nowhere:1", default_api_timeout_ms=500)
        with pytest.raises(TimeoutException, match="find the cluster"):
            async with consumer:
                raise AssertionError
        assert now_ms() == 500
        with pytest.raises(IllegalStateException, match="the client is closed"):
            await consumer.start()


class TestSubscription:
    async def test_invalid_calls(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker) as consumer:
            with pytest.raises(IllegalStateException, match="a group_id is needed to subscribe"):
                consumer.subscribe([TOPIC])
            with pytest.raises(IllegalStateException, match="a group_id is needed for committed offsets"):
                await consumer.commit()
            with pytest.raises(IllegalStateException, match="started already"):
                await consumer.start()
            assert (consumer.group_creation_time_ms, consumer.subscription) == (None, frozenset())
            with pytest.raises(IllegalStateException, match="t-0 is not assigned"):
                consumer.seek(ZERO, 0)
        async with RecordsBroker() as broker, consumer_of(broker, group_id="g") as consumer:
            with pytest.raises(TypeError, match="collection of names"):
                consumer.subscribe(TOPIC)
            for topics, pattern in (([], None), ([TOPIC], "x")):
                with pytest.raises(ValueError, match="either topics or a pattern"):
                    consumer.subscribe(topics, pattern=pattern)
            consumer.assign([ZERO])
            for subscription in ({"topics": [TOPIC]}, {"pattern": "x"}):
                with pytest.raises(IllegalStateException, match="assigned by the user"):
                    consumer.subscribe(**subscription)
            await consumer.unsubscribe()
            assert consumer.assignment == frozenset()
            for subscription in ({"pattern": "x"}, {"topics": [TOPIC]}):
                consumer.subscribe(**subscription)
                with pytest.raises(IllegalStateException, match="subscribed to topics"):
                    consumer.assign([ZERO])
            assert consumer.subscription == {TOPIC}

    @pytest.mark.parametrize("allowed", [True, False])
    async def test_topics_that_the_application_names_may_be_created(self, allowed: bool) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, allow_auto_create_topics=allowed) as consumer:
            consumer.assign([TopicPartition("new", 0)])
            await quiet(2)
            creating = [
                [topic.name for topic in request.topics or ()]
                for request in broker.requests_of(ApiKey.METADATA)
                if isinstance(request, MetadataRequest) and request.allow_auto_topic_creation
            ]
            assert creating == ([["new"]] if allowed else [])
            assert len(broker.requests_of(ApiKey.METADATA)) > 3, "the topic is requested repeatedly"

    async def test_failed_metadata_refreshes_are_retried_with_a_backoff(self) -> None:
        async with RecordsBroker() as broker, cluster_of(broker) as cluster:
            changed = Signal()
            updater = MetadataUpdater(cluster, changed, allow_auto_create_topics=True)
            updater.start()
            metadata = broker.handlers[ApiKey.METADATA]
            broker.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(error_code=Errors.UNKNOWN_SERVER_ERROR)
            updater.request()
            await quiet()
            assert len(broker.requests_of(ApiKey.METADATA)) == 1, "an empty request is not sent"
            before = now_ms()
            updater.request(names=["new"], topic_ids=[TOPIC_ID])
            updater.request(names=[TOPIC], may_create=True)
            await asyncio.sleep(0.75)
            assert [time - before for time in broker.arrivals_of(ApiKey.METADATA)[1:]] == [0, 100, 300, 700]
            broker.handlers[ApiKey.METADATA] = metadata
            ticket = changed.ticket()
            await wait_for(ticket, None)
            assert now_ms() - before == 1500
            asked = broker.requests_of(ApiKey.METADATA)[5:]
            topic = MetadataRequest.MetadataRequestTopic
            assert asked == [
                MetadataRequest(topics=[topic(name=TOPIC)], allow_auto_topic_creation=True),
                MetadataRequest(topics=[topic(name="new")], allow_auto_topic_creation=False),
                MetadataRequest(topics=[topic(name=None, topic_id=TOPIC_ID)], allow_auto_topic_creation=False),
            ]
            updater.request(names=[TOPIC])
            await quiet()
            last = broker.requests_of(ApiKey.METADATA)[-1]
            assert last == MetadataRequest(topics=[topic(name=TOPIC)], allow_auto_topic_creation=False)
            assert broker.arrivals_of(ApiKey.METADATA)[-1] - before == 1600
            updater.request(names=[TOPIC])
            assert await took_ms(wait_for(changed.ticket(), None)) == 0, "a refresh after a pause has no backoff"
            await updater.stop()

    async def test_partitions_of_a_topic(self) -> None:
        async with RecordsBroker(3) as broker, consumer_of(broker) as consumer:
            assert await consumer.partitions_for(TOPIC) == [0, 1, 2]
            with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION: x"):
                await consumer.partitions_for("x")
            broker.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse()
            with pytest.raises(KafkaError, match="UNKNOWN_TOPIC_OR_PARTITION: y"):
                await consumer.partitions_for("y")
            broker.handlers[ApiKey.METADATA] = lambda *_: None
            assert await took_ms(consumer.partitions_for("y", timeout_ms=300), TimeoutException) == 300


class TestPositions:
    async def test_the_committed_offset_comes_first(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, *numbers(0, 5))
            broker.committed = {ZERO: OffsetAndMetadata(3, "", 2)}
            async with consumer_of(broker, ZERO, ONE, group_id="g") as consumer:
                assert [await consumer.position(partition) for partition in (ZERO, ONE)] == [3, 0]
                assert broker.looked_up() == [(1, -2)]
                assert offsets(await consumer.poll(1000)) == [3, 4]

    @pytest.mark.parametrize(
        ("policy", "timestamps", "position"),
        [
            ("earliest", [-2], 2),
            ("latest", [-1], 6),
            ("by_duration:PT1S", [9_000], 4),
            ("by_duration:PT0.5S", [9_500, -1], 6),
            ("by_duration:PT1000S", [0], 2),
        ],
    )
    async def test_reset_policies(
        self, policy: str, timestamps: list[int], position: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("time.time", lambda: 10.0)
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", "1", timestamp_ms=5)
            broker.append(ZERO, "2", "3", timestamp_ms=8_000)
            broker.append(ZERO, "4", "5", timestamp_ms=9_000)
            broker.logs[ZERO].start = 2
            broker.logs[ZERO].batches.pop(0)
            async with consumer_of(broker, ZERO, auto_offset_reset=policy) as consumer:
                assert await consumer.position(ZERO) == position
                assert broker.looked_up() == [(0, timestamp) for timestamp in timestamps]

    async def test_a_log_without_records_begins_at_its_end(self) -> None:
        async with RecordsBroker() as broker:
            broker.logs[ZERO].start = broker.logs[ZERO].end = 5
            async with consumer_of(broker, ZERO, auto_offset_reset="by_duration:P40000D") as consumer:
                assert await consumer.position(ZERO) == 5
                assert broker.looked_up() == [(0, 0), (0, -1)]

    async def test_an_empty_log_begins_at_0(self) -> None:
        """Some brokers return -1 for a look-up of the end."""
        async with RecordsBroker() as broker:
            broker.logs[ZERO].end = -1
            async with consumer_of(broker, ZERO, auto_offset_reset="latest") as consumer:
                assert await consumer.position(ZERO) == 0
                assert len(broker.looked_up()) == 1

    @pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
    async def test_a_look_up_uses_the_isolation_level(self, isolation: str) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO, isolation_level=isolation) as consumer:  # type: ignore[arg-type]
            await consumer.position(ZERO)
            await consumer.end_offsets([ZERO])
            levels = [request.isolation_level for request in broker.requests_of(ApiKey.LIST_OFFSETS)]  # type: ignore[attr-defined]
            assert levels == [int(isolation == "read_committed")] * 2

    async def test_without_a_policy_poll_raises_until_the_application_seeks(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO, ONE, auto_offset_reset="none") as consumer:
                for _ in range(2):
                    with pytest.raises(NoOffsetForPartitionException, match="t-0, t-1"):
                        await consumer.poll()
                with pytest.raises(NoOffsetForPartitionException):
                    await consumer.position(ZERO)
                consumer.seek(ZERO, 0)
                consumer.seek_to_beginning([ONE])
                await quiet()
                await consumer.poll(0)
                assert await consumer.position(ONE) == 0
                assert await consumer.position(ZERO) in (0, 1)

    async def test_a_seek_before_poll_needs_no_policy(self) -> None:
        """The background task has found out before that there is no policy. Only the partition left is named."""
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0")
            async with consumer_of(broker, ZERO, ONE, auto_offset_reset="none") as consumer:
                await quiet()
                consumer.seek(ZERO, 0)
                with pytest.raises(NoOffsetForPartitionException) as failure:
                    await consumer.poll(100)
                assert failure.value.partitions == [ONE]
                await quiet()
                consumer.assign([ZERO])
                assert offsets(await consumer.poll(100)) == [0]

    async def test_a_seek_during_the_look_up_of_another_partition(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO, ONE, auto_offset_reset="none") as consumer:
            look_up = broker.handlers[ApiKey.LIST_OFFSETS]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(0.3)
                return look_up(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.LIST_OFFSETS] = slow
            consumer.seek_to_beginning([ONE])
            await asyncio.sleep(0.1)
            consumer.seek(ZERO, 0)
            assert await consumer.poll(1000) == []

    async def test_out_of_range_without_a_policy(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker, ZERO, auto_offset_reset="none") as consumer:
            consumer.seek(ZERO, 9)
            with pytest.raises(OffsetOutOfRangeException, match="t-0 at 9") as failure:
                await consumer.poll()
            assert failure.value.positions == {ZERO: 9}
            consumer.seek(ZERO, 0)
            broker.append(ZERO, "0")
            await quiet()
            assert await consumer.position(ZERO) == 0
            assert offsets(await consumer.poll(1000)) == [0]

    @pytest.mark.parametrize("key", [ApiKey.OFFSET_FETCH, ApiKey.LIST_OFFSETS])
    async def test_retriable_errors_are_retried(self, key: ApiKey) -> None:
        error = Errors.COORDINATOR_LOAD_IN_PROGRESS if key is ApiKey.OFFSET_FETCH else Errors.LEADER_NOT_AVAILABLE
        async with RecordsBroker() as broker:
            broker.errors[key] = [error] * 3
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                before = now_ms()
                assert await consumer.position(ZERO) == 0
                assert now_ms() - before == 700

    @pytest.mark.parametrize("key", [ApiKey.OFFSET_FETCH, ApiKey.LIST_OFFSETS])
    async def test_other_errors_are_raised_and_then_retried(self, key: ApiKey) -> None:
        async with RecordsBroker() as broker:
            broker.errors[key] = [Errors.GROUP_AUTHORIZATION_FAILED] * 2
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                for attempts in (2, 3):
                    with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                        await consumer.poll(5000)
                    assert len(broker.requests_of(key)) == attempts - 1
                    await quiet()
                    assert len(broker.requests_of(key)) == attempts
                assert await consumer.position(ZERO) == 0

    async def test_position_waits_up_to_its_timeout(self) -> None:
        async with RecordsBroker() as broker:
            broker.handlers[ApiKey.LIST_OFFSETS] = lambda *_: None
            async with consumer_of(broker, ZERO) as consumer:
                assert await took_ms(consumer.position(ZERO, timeout_ms=300), TimeoutException) == 300
                with pytest.raises(TimeoutException, match="no position of t-0 within 20 ms"):
                    await consumer.position(ZERO, timeout_ms=20)

    async def test_a_look_up_does_not_undo_a_seek(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, *numbers(0, 9))
            look_up = broker.handlers[ApiKey.LIST_OFFSETS]

            async def slow(*request: object) -> object:
                await asyncio.sleep(1)
                return look_up(*request)  # type: ignore[arg-type]

            broker.handlers[ApiKey.LIST_OFFSETS] = slow  # type: ignore[assignment]
            async with consumer_of(broker, ZERO, ONE) as consumer:
                await asyncio.sleep(0.5)
                consumer.seek(ZERO, 7)
                await quiet()
                assert await consumer.position(ZERO) == 7
                assert offsets(await consumer.poll(0)) == [7, 8]

    async def test_a_committed_offset_does_not_undo_a_seek(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, *numbers(0, 9))
            broker.committed = {ZERO: OffsetAndMetadata(3)}
            fetch = broker.handlers[ApiKey.OFFSET_FETCH]

            async def slow(*request: object) -> object:
                await asyncio.sleep(1)
                return fetch(*request)  # type: ignore[arg-type]

            broker.handlers[ApiKey.OFFSET_FETCH] = slow  # type: ignore[assignment]
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                await asyncio.sleep(0.5)
                consumer.seek(ZERO, 7)
                await quiet()
                assert await consumer.position(ZERO) == 7

    async def test_fetches_begin_as_soon_as_the_committed_offset_is_known(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, "0", "1")
            broker.committed = {ZERO: OffsetAndMetadata(1)}
            fetch = broker.handlers[ApiKey.OFFSET_FETCH]

            async def slow(*request: object) -> object:
                await asyncio.sleep(1)
                return fetch(*request)  # type: ignore[arg-type]

            broker.handlers[ApiKey.OFFSET_FETCH] = slow  # type: ignore[assignment]
            async with consumer_of(broker, ZERO, group_id="g") as consumer:
                assert offsets(await consumer.poll(1001)) == [1]
                assert now_ms() == 1000

    async def test_seeking(self) -> None:
        async with RecordsBroker() as broker:
            broker.append(ZERO, *numbers(0, 5))
            broker.append(ONE, *numbers(0, 3))
            async with consumer_of(broker, ZERO, ONE) as consumer:
                consumer.seek_to_end()
                assert [await consumer.position(partition) for partition in (ZERO, ONE)] == [5, 3]
                consumer.seek_to_beginning([ZERO])
                assert [await consumer.position(partition) for partition in (ZERO, ONE)] == [0, 3]
                consumer.seek(ONE, OffsetAndMetadata(2, "", 3))
                assert await consumer.position(ONE) == 2
                consumer.seek(ONE, 0)
                for offset in (-1, 1 << 63):
                    with pytest.raises(ValueError, match=f"offset: {offset} is not from 0 to {(1 << 63) - 1}"):
                        consumer.seek(ONE, offset)

    async def test_offsets_of_partitions(self) -> None:
        async with RecordsBroker() as broker, consumer_of(broker) as consumer:
            broker.append(ZERO, "0", "1", timestamp_ms=5)
            broker.append(ZERO, "2", timestamp_ms=9)
            assert await consumer.beginning_offsets([ZERO, ONE]) == {ZERO: 0, ONE: 0}
            assert await consumer.end_offsets([ZERO, ONE]) == {ZERO: 3, ONE: 0}
            offsets_by_partition = await consumer.offsets_for_times({ZERO: 0, ONE: 6})
            assert offsets_by_partition == {ZERO: (0, 5, 3), ONE: None}
            assert await consumer.offsets_for_times({ZERO: 6}) == {ZERO: (2, 9, 3)}
            with pytest.raises(ValueError, match="must not be negative"):
                await consumer.offsets_for_times({ZERO: 0, ONE: -1})
            broker.handlers[ApiKey.LIST_OFFSETS] = lambda *_: None
            assert await took_ms(consumer.end_offsets([ZERO], timeout_ms=300), KafkaError) == 300
