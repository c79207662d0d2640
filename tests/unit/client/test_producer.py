# SPDX-License-Identifier: Apache-2.0
"""The producer against a broker that keeps logs by Kafka's rules and has faults, on virtual time."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Unpack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.client import (
    Errors,
    IllegalStateException,
    KafkaError,
    Producer,
    RecordTooLargeException,
    TimeoutException,
)
from kcoord.client.config import ProducerOptions
from kcoord.client.errors import DisconnectException
from kcoord.client.producer.partitioner import partition_for_key
from kcoord.client.types import RecordMetadata, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    InitProducerIdRequest,
    InitProducerIdResponse,
    MetadataRequest,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Compression, decode_records
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.client.fake_broker import NODE_ID, Answer, FakeBroker
from tests.unit.client.log_broker import LOST_ANSWER, LOST_REQUEST, STORED, TOPIC, TOPIC_ID, LogBroker
from tests.unit.client.virtual_loop import cancel_after, now_ms, run, running_loop, took_ms

Sent = list[tuple[TopicPartition, str, asyncio.Future[RecordMetadata]]]
ZERO, ONE = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
RECORD_OVERHEAD = 21
"""The estimated bytes of a record without key and headers in a batch, without its value."""


@asynccontextmanager
async def producer_of(broker: FakeBroker, **options: Unpack[ProducerOptions]) -> AsyncIterator[Producer]:
    settings: ProducerOptions = {"bootstrap_servers": broker.address, "linger_ms": 0, **options}
    async with Producer(**settings) as producer:
        yield producer


def batch_sizes(broker: LogBroker, index: int = 0) -> list[int]:
    return [len(records) for _, records in broker.logs[TopicPartition(TOPIC, index)].batches]


def parts_of(request: ProduceRequest) -> list[tuple[int, list[str]]]:
    """Returns (partition, values) of a request."""
    return [
        (data.index, [(record.value or b"").decode() for record in decode_records(data.records or b"")])
        for topic in request.topic_data
        for data in topic.partition_data
    ]


class TestExactlyOnce:
    """For all losses and errors, each record is stored once, in the order of `send`, and its future has the offset."""

    FATES = (
        "",
        LOST_REQUEST,
        LOST_ANSWER,
        "NOT_LEADER_OR_FOLLOWER",
        "REQUEST_TIMED_OUT",
        STORED + "REQUEST_TIMED_OUT",
        STORED + "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        "UNKNOWN_PRODUCER_ID",
        "INVALID_PRODUCER_EPOCH",
        "MESSAGE_TOO_LARGE",
        STORED + "DUPLICATE_SEQUENCE_NUMBER",
    )

    @settings(max_examples=60)
    @given(
        st.lists(st.sampled_from(FATES), max_size=12),
        st.lists(
            st.tuples(st.sampled_from([ZERO, ONE]), st.integers(0, 120), st.integers(0, 30)), min_size=1, max_size=25
        ),
    )
    def test_each_record_is_stored_once_and_in_order(
        self, fates: list[str], sends: list[tuple[TopicPartition, int, int]]
    ) -> None:
        async def main() -> None:
            broker = LogBroker(2, fates)
            sent: Sent = []
            async with broker, producer_of(broker, linger_ms=10, batch_size=300, max_request_size=500) as producer:
                for number, (partition, size, pause_ms) in enumerate(sends):
                    value = f"{number}:" + "x" * size
                    future = await producer.send(TOPIC, value, partition=partition.partition)
                    sent.append((partition, value, future))
                    await asyncio.sleep(pause_ms / 1000)
                await producer.flush()
            expected: dict[TopicPartition, list[str]] = defaultdict(list)
            for partition, value, future in sent:
                stored_at = future.result().offset
                # A response with DUPLICATE_SEQUENCE_NUMBER has no offset.
                if stored_at != -1 and stored_at is not None:
                    assert stored_at == len(expected[partition])
                assert future.result()[:2] == partition
                expected[partition].append(value)
            for partition in (ZERO, ONE):
                assert broker.values(partition.partition) == expected[partition]

        run(main())

    @pytest.mark.parametrize("acks", [1, -1])
    @pytest.mark.parametrize("fate", ["NOT_LEADER_OR_FOLLOWER", "LEADER_NOT_AVAILABLE", LOST_REQUEST])
    async def test_without_idempotence_a_rejected_batch_is_sent_again(self, acks: int, fate: str) -> None:
        async with (
            LogBroker(2, [fate, fate]) as broker,
            producer_of(broker, enable_idempotence=False, acks=acks) as producer,  # type: ignore[arg-type]
        ):
            for number in range(3):
                assert (await producer.send_and_wait(TOPIC, str(number), partition=0)).offset == number
            assert broker.values(0) == ["0", "1", "2"]
            assert broker.requests_of(ApiKey.INIT_PRODUCER_ID) == []
            header, _ = broker.logs[ZERO].batches[0]
            assert (header.producer_id, header.base_sequence) == (-1, -1)

    async def test_sequences_restart_after_a_lost_producer_id(self) -> None:
        async with LogBroker() as broker, producer_of(broker) as producer:
            for number in range(3):
                await producer.send_and_wait(TOPIC, str(number), partition=0)
            await producer.send_and_wait(TOPIC, "other", partition=1)
            broker.fates.append("UNKNOWN_PRODUCER_ID")
            await producer.send_and_wait(TOPIC, "3", partition=0)
            await producer.send_and_wait(TOPIC, "again", partition=1)
            headers = [header for header, _ in broker.logs[ZERO].batches]
            assert [(header.producer_id, header.base_sequence) for header in headers] == [
                (101, 0),
                (101, 1),
                (101, 2),
                (102, 0),
            ]
            headers = [header for header, _ in broker.logs[ONE].batches]
            assert [(header.producer_id, header.base_sequence) for header in headers] == [(101, 0), (102, 0)]

    async def test_a_batch_that_may_be_stored_is_not_renumbered(self) -> None:
        """OUT_OF_ORDER_SEQUENCE_NUMBER fails the batch, and later batches have a new producer id."""
        async with LogBroker(2, ["OUT_OF_ORDER_SEQUENCE_NUMBER"]) as broker, producer_of(broker) as producer:
            with pytest.raises(KafkaError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
                await producer.send_and_wait(TOPIC, "a", partition=0)
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert broker.values(0) == ["b"]
            assert broker.logs[ZERO].batches[0][0].producer_id == 102

    async def test_a_batch_that_timed_out_changes_the_producer_id(self) -> None:
        """The batch may be stored, so its sequence numbers must not be used for other records."""
        refusals = [STORED + "REQUEST_TIMED_OUT"] * 100
        async with (
            LogBroker(2, refusals) as broker,
            producer_of(broker, delivery_timeout_ms=1000, request_timeout_ms=1000) as producer,
        ):
            with pytest.raises(TimeoutException, match=r"t-0: 1 records not delivered within 1000 ms"):
                await producer.send_and_wait(TOPIC, "a", partition=0)
            broker.fates.clear()
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert broker.values(0) == ["a", "b"]
            assert [header.producer_id for header, _ in broker.logs[ZERO].batches] == [101, 102]

    async def test_a_rejected_retry_changes_the_producer_id(self) -> None:
        """The first attempt was stored. Without a new producer id the broker would drop `b` as a duplicate of `a`."""
        fates = [LOST_ANSWER, STORED + "TOPIC_AUTHORIZATION_FAILED"]
        async with LogBroker(2, fates) as broker, producer_of(broker) as producer:
            with pytest.raises(KafkaError, match="TOPIC_AUTHORIZATION_FAILED"):
                await producer.send_and_wait(TOPIC, "a", partition=0)
            assert (await producer.send_and_wait(TOPIC, "b", partition=0)).offset == 1
            assert broker.values(0) == ["a", "b"]

    async def test_a_rejected_batch_leaves_no_gap_in_the_sequence(self) -> None:
        async with LogBroker(2, ["", "INVALID_RECORD"]) as broker, producer_of(broker) as producer:
            await producer.send_and_wait(TOPIC, "a", partition=0)
            with pytest.raises(KafkaError, match="INVALID_RECORD"):
                await producer.send_and_wait(TOPIC, "b", partition=0)
            await producer.send_and_wait(TOPIC, "c", partition=0)
            assert broker.values(0) == ["a", "c"]
            assert [header.producer_id for header, _ in broker.logs[ZERO].batches] == [101, 101]


class TestTime:
    async def test_a_batch_without_a_response_fails_at_the_delivery_timeout(self) -> None:
        """The batch may be stored, so later batches have another producer id."""
        async with (
            LogBroker() as broker,
            producer_of(broker, delivery_timeout_ms=1000, request_timeout_ms=1000) as producer,
        ):
            produce, broker.handlers[ApiKey.PRODUCE] = broker.handlers[ApiKey.PRODUCE], lambda *_: None
            before = now_ms()
            with pytest.raises(TimeoutException, match=r"within 1000 ms: REQUEST_TIMED_OUT: .*did not answer Produce"):
                await producer.send_and_wait(TOPIC, "a", partition=0)
            assert now_ms() - before == 1000
            broker.handlers[ApiKey.PRODUCE] = produce
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert [header.producer_id for header, _ in broker.logs[ZERO].batches] == [102]

    async def test_a_batch_that_was_never_sent_uses_no_sequence(self) -> None:
        async with LogBroker() as broker:
            broker.topics[0].partitions[1].leader_id = -1
            async with producer_of(
                broker, delivery_timeout_ms=1000, request_timeout_ms=1000, buffer_memory=200
            ) as producer:
                await producer.send_and_wait(TOPIC, "a", partition=0)
                expiring = await producer.send(TOPIC, "x" * 150, partition=1)
                before = now_ms()
                # The buffer has room again when the record expires.
                await (await producer.send(TOPIC, "x" * 150, partition=0))
                assert 1000 <= now_ms() - before <= 2000
                with pytest.raises(TimeoutException, match="t-1: 1 records not delivered within 1000 ms"):
                    await expiring
            assert {header.producer_id for header, _ in broker.logs[ZERO].batches} == {101}

    async def test_records_linger_together(self) -> None:
        async with LogBroker() as broker, producer_of(broker, linger_ms=50) as producer:
            before = now_ms()
            first = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(0.04)
            await producer.send(TOPIC, "b", partition=0)
            await first
            assert now_ms() - before == 50
            assert batch_sizes(broker) == [2]

    async def test_lingering_resumes_after_a_flush(self) -> None:
        async with LogBroker() as broker, producer_of(broker, linger_ms=50) as producer:
            before = now_ms()
            future = await producer.send(TOPIC, "a", partition=0)
            await producer.flush()
            assert (future.done(), now_ms()) == (True, before)
            future = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(0.01)
            before = now_ms()
            await producer.flush()
            assert (future.done(), now_ms()) == (True, before)
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert now_ms() - before == 50

    async def test_backoffs_grow_with_the_retries(self) -> None:
        """The backoff is 100 ms, doubled with each failure up to 1 s, with 20 % of jitter to both sides (KIP-580)."""
        async with LogBroker(2, ["NOT_LEADER_OR_FOLLOWER"] * 6) as broker, producer_of(broker) as producer:
            await producer.send_and_wait(TOPIC, "a", partition=0)
            times = broker.arrivals_of(ApiKey.PRODUCE)
        waits = [later - earlier for earlier, later in itertools.pairwise(times)]
        expected = [100, 200, 400, 800, 1000, 1000]
        # The virtual clock also has the real time of a request.
        assert all(0.8 * usual <= wait <= 1.2 * usual + 20 for wait, usual in zip(waits, expected, strict=True)), waits
        assert len({wait / usual for wait, usual in zip(waits, expected, strict=True)}) > 1

    async def test_the_delivery_timeout_ends_retries(self) -> None:
        async with (
            LogBroker(2, ["NOT_LEADER_OR_FOLLOWER"] * 100) as broker,
            producer_of(
                broker, delivery_timeout_ms=2500, request_timeout_ms=2500, retry_backoff_max_ms=100
            ) as producer,
        ):
            before = now_ms()
            first = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(1)
            second = await producer.send(TOPIC, "b", partition=0)
            with pytest.raises(TimeoutException, match=r"t-0: 1 records not delivered within 2500 ms"):
                await first
            assert 2500 <= now_ms() - before <= 2620
            with pytest.raises(TimeoutException):
                await second
            assert 3500 <= now_ms() - before <= 3620
            requests = len(broker.produced())
            await asyncio.sleep(5)
            assert len(broker.produced()) == requests

    async def test_a_batch_that_expires_during_a_backoff_is_not_sent_again(self) -> None:
        """The expired batch may be stored, so later batches have another producer id."""
        async with (
            LogBroker(2, [STORED + "REQUEST_TIMED_OUT"]) as broker,
            producer_of(
                broker,
                delivery_timeout_ms=1000,
                request_timeout_ms=1000,
                retry_backoff_ms=2000,
                retry_backoff_max_ms=2000,
            ) as producer,
        ):
            future = await producer.send(TOPIC, "a", partition=0)
            with pytest.raises(TimeoutException, match="t-0: 1 records not delivered within 1000 ms"):
                await future
            assert len(broker.produced()) == 1
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert [header.producer_id for header, _ in broker.logs[ZERO].batches] == [101, 102]

    async def test_max_block_ms_bounds_the_wait_for_metadata_and_for_room(self) -> None:
        async with (
            LogBroker() as broker,
            producer_of(
                broker, max_block_ms=300, buffer_memory=2 * (RECORD_OVERHEAD + 100), linger_ms=1000
            ) as producer,
        ):
            before = now_ms()
            with pytest.raises(TimeoutException, match="metadata of missing: timed out after 300 ms: UNKNOWN_TOPIC"):
                await producer.send("missing", "a")
            assert now_ms() - before == 300
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            for _ in range(2):
                await producer.send(TOPIC, "x" * 100, partition=0)
            before = now_ms()
            with pytest.raises(TimeoutException, match="no room in the buffer within 300 ms"):
                await producer.send(TOPIC, "y", partition=0)
            assert now_ms() - before == 300

    async def test_send_continues_as_soon_as_the_buffer_has_room(self) -> None:
        size = RECORD_OVERHEAD + 100
        async with LogBroker() as broker, producer_of(broker, buffer_memory=2 * size, linger_ms=70) as producer:
            before = now_ms()
            for _ in range(2):
                await producer.send(TOPIC, "x" * 100, partition=0)
            assert now_ms() == before
            await producer.send(TOPIC, "x" * 100, partition=1)
            assert now_ms() - before == 70

    async def test_failed_batches_free_their_room(self) -> None:
        async with (
            LogBroker(2, ["INVALID_RECORD"] * 3) as broker,
            producer_of(broker, buffer_memory=200) as producer,
        ):
            for _ in range(3):
                with pytest.raises(KafkaError, match="INVALID_RECORD"):
                    await producer.send_and_wait(TOPIC, "x" * 150, partition=0)
            await producer.send_and_wait(TOPIC, "x" * 150, partition=0)

    async def test_flush_times_out(self) -> None:
        async with LogBroker() as broker:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            async with producer_of(broker) as producer:
                before = now_ms()
                for _ in range(2):
                    await producer.send(TOPIC, "a", partition=0)
                with pytest.raises(TimeoutException, match="flush: 2 records not sent within 300 ms"):
                    await producer.flush(timeout_ms=300)
                assert now_ms() - before == 300
                with pytest.raises(TimeoutException, match="within 60000 ms"):
                    await producer.flush()

    async def test_the_default_time_of_a_record_is_now(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("time.time", lambda: 12.3456)
        async with LogBroker() as broker, producer_of(broker) as producer:
            assert (await producer.send_and_wait(TOPIC, "a", partition=0)).timestamp_ms == 12345
            assert await producer.send_and_wait(TOPIC, "a", partition=0, timestamp_ms=0) == (TOPIC, 0, 1, 0)
            broker.log_append_time_ms = 0
            assert (await producer.send_and_wait(TOPIC, "a", partition=0)).timestamp_ms == 0
            broker.log_append_time_ms = 777
            assert (await producer.send_and_wait(TOPIC, "a", partition=0)).timestamp_ms == 777
            assert [record.timestamp_ms for _, (record,) in broker.logs[ZERO].batches] == [12345, 0, 12345, 12345]


class TestBatches:
    async def test_a_full_batch_goes_at_once(self) -> None:
        full = BATCH_OVERHEAD_BYTES + 3 * (RECORD_OVERHEAD + 10)
        async with LogBroker() as broker, producer_of(broker, linger_ms=1000, batch_size=full) as producer:
            before = now_ms()
            sent = [await producer.send(TOPIC, "x" * 10, partition=0) for _ in range(7)]
            await asyncio.gather(*sent[:6])
            assert now_ms() == before
            await sent[6]
            assert now_ms() - before == 1000
            assert batch_sizes(broker) == [3, 3, 1]

    async def test_one_request_per_leader_has_all_ready_batches(self) -> None:
        async with LogBroker(3) as broker, producer_of(broker, linger_ms=10) as producer:
            for index in (2, 0, 1, 0):
                await producer.send(TOPIC, str(index), partition=index)
            await producer.flush()
            (request,) = broker.produced()
            assert sorted(parts_of(request)) == [(0, ["0", "0"]), (1, ["1"]), (2, ["2"])]

    @pytest.mark.parametrize(("spare", "requests"), [(0, [[0, 1], [2]]), (-1, [[0], [1], [2]])])
    async def test_requests_are_at_most_max_request_size(self, spare: int, requests: list[list[int]]) -> None:
        batch = BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD + 10
        async with (
            LogBroker(3) as broker,
            producer_of(broker, linger_ms=10, max_request_size=2 * batch + spare) as producer,
        ):
            for index in range(3):
                await producer.send(TOPIC, "x" * 10, partition=index)
            await producer.flush()
            assert [[index for index, _ in parts_of(request)] for request in broker.produced()] == requests

    async def test_the_largest_record(self) -> None:
        largest = RECORD_OVERHEAD + 100
        for options in (
            ProducerOptions(max_request_size=BATCH_OVERHEAD_BYTES + largest),
            ProducerOptions(buffer_memory=largest),
        ):
            async with LogBroker() as broker, producer_of(broker, **options) as producer:
                await producer.send_and_wait(TOPIC, "x" * 100, partition=0)
                with pytest.raises(RecordTooLargeException, match="122 bytes exceeds"):
                    await producer.send(TOPIC, "x" * 101, partition=0)

    async def test_a_batch_that_is_too_large_for_the_topic_is_split(self) -> None:
        def produce(request: Message, version: int) -> Answer:
            assert isinstance(request, ProduceRequest)
            ((index, values),) = parts_of(request)
            if len(values) > 2:
                answer = ProduceResponse.PartitionProduceResponse(index=index, error_code=Errors.MESSAGE_TOO_LARGE)
                topic = ProduceResponse.TopicProduceResponse(
                    name=TOPIC, topic_id=TOPIC_ID, partition_responses=[answer]
                )
                return ProduceResponse(responses=[topic])
            return store(request, version)  # type: ignore[return-value]

        broker = LogBroker()
        store = broker.handlers[ApiKey.PRODUCE]
        broker.handlers[ApiKey.PRODUCE] = produce
        async with broker, producer_of(broker, linger_ms=10) as producer:
            before = now_ms()
            sent = [await producer.send(TOPIC, str(number), partition=0) for number in range(7)]
            assert [(await future).offset for future in sent] == list(range(7))
            assert now_ms() - before < 30, "halves do not wait for a backoff"
            tried = [values for request in broker.produced() for _, values in parts_of(request)]
            assert tried == [list("0123456"), list("012"), ["0"], list("12"), list("3456"), list("34"), list("56")]

    async def test_one_record_that_is_too_large_for_the_topic_fails(self) -> None:
        answer = ProduceResponse.PartitionProduceResponse(index=0, error_code=Errors.MESSAGE_TOO_LARGE)
        topic = ProduceResponse.TopicProduceResponse(name=TOPIC, topic_id=TOPIC_ID, partition_responses=[answer])
        async with LogBroker() as broker, producer_of(broker) as producer:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: ProduceResponse(responses=[topic])
            with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
                await producer.send_and_wait(TOPIC, "a", partition=0)

    async def test_errors_have_the_texts_of_the_response(self) -> None:
        error = ProduceResponse.BatchIndexAndErrorMessage
        answer = ProduceResponse.PartitionProduceResponse(
            index=0,
            error_code=Errors.INVALID_RECORD,
            error_message="whole",
            record_errors=[
                error(batch_index=0, batch_index_error_message="first"),
                error(batch_index=1, batch_index_error_message=None),
                error(batch_index=2, batch_index_error_message="third"),
            ],
        )
        topic = ProduceResponse.TopicProduceResponse(name=TOPIC, topic_id=TOPIC_ID, partition_responses=[answer])
        async with LogBroker() as broker, producer_of(broker) as producer:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: ProduceResponse(responses=[topic])
            with pytest.raises(KafkaError, match=r"INVALID_RECORD.*whole; first; third$"):
                await producer.send_and_wait(TOPIC, "a", partition=0)
            answer.error_message, answer.record_errors = None, []
            with pytest.raises(KafkaError, match="INVALID_RECORD") as failure:
                await producer.send_and_wait(TOPIC, "a", partition=0)
            assert failure.value.message is None
            topic.partition_responses = []
            with pytest.raises(KafkaError, match=r"UNKNOWN_SERVER_ERROR.*the response does not have t-0"):
                await producer.send_and_wait(TOPIC, "a", partition=0)

    @pytest.mark.parametrize(
        ("highest", "topic_id", "version"),
        [(13, TOPIC_ID, 13), (13, ZERO_UUID, 12), (9, TOPIC_ID, 9), (99, TOPIC_ID, 13)],
    )
    async def test_topics_are_identified_by_id_if_all_ids_are_known(
        self, highest: int, topic_id: bytes, version: int
    ) -> None:
        async with LogBroker(produce=(0, highest)) as broker:
            broker.add_topic(TOPIC, topic_id, [-1])
            async with producer_of(broker, acks="all") as producer:
                assert (await producer.send_and_wait(TOPIC, "a")).offset == 0
            assert broker.versions_of(ApiKey.PRODUCE) == [version]
            (request,) = broker.produced()
            assert (request.acks, request.timeout_ms, request.transactional_id) == (-1, 30_000, None)
            (topic,) = request.topic_data
            assert (topic.name, topic.topic_id) == (("", TOPIC_ID) if version == 13 else (TOPIC, ZERO_UUID))

    async def test_a_topic_without_an_id_requires_names(self) -> None:
        async with LogBroker() as broker:
            broker.add_topic("u", ZERO_UUID, [-1])
            async with producer_of(broker, linger_ms=10) as producer:
                broker.handlers[ApiKey.PRODUCE] = lambda *_: ProduceResponse()
                sent = [await producer.send(topic, "a") for topic in (TOPIC, "u")]
                await asyncio.gather(*sent, return_exceptions=True)
            assert broker.versions_of(ApiKey.PRODUCE) == [12]

    async def test_acks_0_has_no_response_and_no_offset(self) -> None:
        async with LogBroker() as broker, producer_of(broker, acks=0, enable_idempotence=False) as producer:
            stored = await producer.send_and_wait(TOPIC, "a", partition=1, timestamp_ms=5)
            assert stored == (TOPIC, 1, None, 5)
            await producer.send_and_wait(TOPIC, "b", partition=1)
            await producer.flush()
            await producer.partitions_for(TOPIC)
            await asyncio.sleep(0.1)
            assert broker.values(1) == ["a", "b"]

    @pytest.mark.parametrize("codec", ["none", "zstd", "gzip"])
    async def test_compression(self, codec: str) -> None:
        async with LogBroker() as broker, producer_of(broker, compression_type=codec) as producer:  # type: ignore[arg-type]
            await producer.send_and_wait(TOPIC, "a", "k", partition=0, headers=[("h", "1"), ("n", None)])
            ((header, (record,)),) = broker.logs[ZERO].batches
        assert header.compression is Compression[codec.upper()]
        assert not header.is_transactional
        assert (record.key, record.value, list(record.headers)) == (b"k", b"a", [("h", b"1"), ("n", None)])

    async def test_a_negative_partition_is_rejected(self) -> None:
        async with LogBroker() as broker, producer_of(broker) as producer:
            with pytest.raises(ValueError, match="partition: -1 must not be negative"):
                await producer.send(TOPIC, "a", partition=-1)

    @pytest.mark.parametrize("data", [{"a": 1}, [1, 2], ("a",), 5])
    async def test_an_object_that_is_not_bytes_is_rejected(self, data: Any) -> None:
        """It would fail only when its batch is sent, with all other records of that batch."""
        async with LogBroker(1) as broker, producer_of(broker) as producer:
            with pytest.raises(TypeError, match=f"value: must be bytes, text or None, not {type(data).__name__}"):
                await producer.send(TOPIC, data)
            with pytest.raises(TypeError, match="key: must be"):
                await producer.send(TOPIC, "a", data)
            with pytest.raises(TypeError, match=r"partition: 0\.0 is not a whole number"):
                await producer.send(TOPIC, "a", partition=0.0)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="header h: must be"):
                await producer.send(TOPIC, "a", headers=[("h", data)])
            buffer: Any = bytearray(b"b")
            future = await producer.send(TOPIC, buffer)
            buffer[:] = b"c"
            await future
            assert broker.values(0) == ["b"], "the record is the buffer's content at the time of the call"

    async def test_a_batch_that_cannot_be_encoded_fails(self) -> None:
        """The difference of the times does not fit in a record."""
        async with LogBroker(1) as broker, producer_of(broker, linger_ms=5) as producer:
            futures = [await producer.send(TOPIC, "a", timestamp_ms=time_ms) for time_ms in (-(1 << 63), (1 << 63) - 1)]
            for future in futures:
                with pytest.raises(KafkaError, match=r"INVALID_RECORD: t-0: the batch cannot be encoded: .*64-bit"):
                    await future
            await producer.send_and_wait(TOPIC, "b")
            assert broker.values(0) == ["b"]

    @pytest.mark.parametrize("timestamp_ms", [-(1 << 63) - 1, 1 << 63])
    async def test_a_timestamp_out_of_range_is_rejected(self, timestamp_ms: int) -> None:
        async with LogBroker() as broker, producer_of(broker) as producer:
            with pytest.raises(ValueError, match="timestamp_ms"):
                await producer.send(TOPIC, "a", timestamp_ms=timestamp_ms)
            with pytest.raises(TypeError, match=r"timestamp_ms: 1\.5 is not a whole number"):
                await producer.send(TOPIC, "a", timestamp_ms=1.5)  # type: ignore[arg-type]
            for timestamp in ((1 << 63) - 1, -(1 << 63)):
                stored = await producer.send_and_wait(TOPIC, "a", timestamp_ms=timestamp)
                assert stored.timestamp_ms == timestamp


class TestLeaders:
    async def test_a_batch_follows_its_leader(self) -> None:
        """The old leader returns an error, and the metadata has the new leader."""
        old, new = LogBroker(1), LogBroker(1)
        new.node_id = 2
        async with old, new:
            old.peers, new.peers = [new], [old]
            async with producer_of(old) as producer:
                await producer.send_and_wait(TOPIC, "a", partition=0)
                for broker in (old, new):
                    broker.topics[0].partitions[0].leader_id = 2
                old.fates.append("NOT_LEADER_OR_FOLLOWER")
                new.logs[ZERO] = old.logs[ZERO]
                assert (await producer.send_and_wait(TOPIC, "b", partition=0)).offset == 1
            assert (len(old.produced()), len(new.produced())) == (2, 1)

    async def test_a_timed_out_request_does_not_refresh_the_leader(self) -> None:
        async with LogBroker(2, ["REQUEST_TIMED_OUT"]) as broker, producer_of(broker) as producer:
            await producer.send_and_wait(TOPIC, "a", partition=0)
            asked = len(broker.requests_of(ApiKey.METADATA))
            broker.fates.append("NOT_LEADER_OR_FOLLOWER")
            await producer.send_and_wait(TOPIC, "b", partition=0)
            assert (asked, len(broker.requests_of(ApiKey.METADATA))) == (2, 3)

    async def test_an_error_of_a_request_does_not_affect_the_next_response(self) -> None:
        """The error drops the metadata of the topic. The other response identifies that topic by its id."""
        one_batch = BATCH_OVERHEAD_BYTES + RECORD_OVERHEAD + 100
        async with (
            LogBroker(2, ["NOT_LEADER_OR_FOLLOWER"]) as broker,
            producer_of(broker, linger_ms=5, max_request_size=one_batch) as producer,
        ):
            sent = [await producer.send(TOPIC, "x" * 100, partition=index) for index in (0, 1)]
            assert [(await future).offset for future in sent] == [0, 0]
            assert len(broker.produced()) == 3

    async def test_only_the_partition_without_a_leader_waits(self) -> None:
        async with LogBroker() as broker:
            broker.topics[0].partitions[1].leader_id = -1
            async with producer_of(broker) as producer:
                waiting = await producer.send(TOPIC, "b", partition=1)
                await producer.send_and_wait(TOPIC, "a", partition=0)
                assert not waiting.done()
                await asyncio.sleep(3)
                broker.topics[0].partitions[1].leader_id = NODE_ID
                assert (await waiting).offset == 0
                assert {index for request in broker.produced() for index, _ in parts_of(request)} == {0, 1}

    async def test_a_failed_lookup_of_leaders_is_retried(self) -> None:
        async with LogBroker() as broker, producer_of(broker) as producer:
            await producer.send_and_wait(TOPIC, "a", partition=0)
            broker.fates.append("NOT_LEADER_OR_FOLLOWER")
            metadata, failures = broker.handlers[ApiKey.METADATA], 2

            def unwilling(request: Message, version: int) -> Answer:
                nonlocal failures
                failures -= 1
                if failures >= 0:
                    broker.hang_up()
                    return None
                return metadata(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.METADATA] = unwilling
            assert (await producer.send_and_wait(TOPIC, "b", partition=0)).offset == 1

    async def test_a_producer_id_that_is_dropped_while_a_connection_opens_is_replaced(self) -> None:
        """Without an id the broker would not recognize a repetition of the batch."""
        first, second = LogBroker(), LogBroker()
        second.node_id = 2
        accepts, versions = asyncio.Event(), second.handlers[ApiKey.API_VERSIONS]

        async def slow(request: Message, version: int) -> Answer:
            await accepts.wait()
            return versions(request, version)  # type: ignore[return-value]

        second.handlers[ApiKey.API_VERSIONS] = slow
        async with first, second:
            first.peers, second.peers = [second], [first]
            first.topics[0].partitions[1].leader_id = 2
            async with producer_of(first) as producer:
                waiting = await producer.send(TOPIC, "b", partition=1)
                first.fates.append("OUT_OF_ORDER_SEQUENCE_NUMBER")
                with pytest.raises(KafkaError, match="OUT_OF_ORDER_SEQUENCE_NUMBER"):
                    await producer.send_and_wait(TOPIC, "a", partition=0)
                accepts.set()
                await waiting
                ((header, _),) = second.logs[ONE].batches
                assert (header.producer_id, header.base_sequence) == (102, 0)

    async def test_each_leader_gets_a_request(self) -> None:
        first, second = LogBroker(), LogBroker()
        second.node_id = 2
        async with first, second:
            first.peers, second.peers = [second], [first]
            first.topics[0].partitions[1].leader_id = 2
            async with producer_of(first, linger_ms=5) as producer:
                for index in (0, 1):
                    await producer.send(TOPIC, str(index), partition=index)
                await producer.flush()
        assert [parts_of(request) for request in first.produced()] == [[(0, ["0"])]]
        assert [parts_of(request) for request in second.produced()] == [[(1, ["1"])]]


class TestPartitions:
    async def test_keys_choose_the_partition_unless_they_are_ignored(self) -> None:
        keys = [f"key-{number}" for number in range(20)]
        async with LogBroker(3) as broker, producer_of(broker) as producer:
            for key in keys:
                stored = await producer.send_and_wait(TOPIC, "a", key)
                assert stored.partition == partition_for_key(key.encode(), 3)
        async with LogBroker(3) as broker:
            async with producer_of(broker, partitioner_ignore_keys=True, linger_ms=100) as producer:
                sent = [await producer.send(TOPIC, "a", key) for key in keys]
                assert len({stored.partition for stored in await asyncio.gather(*sent)}) == 1
            (request,) = broker.produced()
            assert [len(values) for _, values in parts_of(request)] == [20]

    async def test_without_a_key_each_batch_goes_to_another_partition(self) -> None:
        three = BATCH_OVERHEAD_BYTES + 3 * (RECORD_OVERHEAD + 1)
        used = []
        async with LogBroker(3) as broker:
            broker.topics[0].partitions[1].leader_id = -1
            async with producer_of(broker, linger_ms=50, batch_size=three) as producer:
                for _ in range(6):
                    sent = [await producer.send(TOPIC, "x") for _ in range(3)]
                    (partition,) = {stored.partition for stored in await asyncio.gather(*sent)}
                    used.append(partition)
        assert used in ([0, 2, 0, 2, 0, 2], [2, 0, 2, 0, 2, 0]), "a partition without a leader is not chosen"

    async def test_if_no_partition_has_a_leader_any_is_chosen(self) -> None:
        async with LogBroker(1) as broker:
            broker.topics[0].partitions[0].leader_id = -1
            async with producer_of(broker) as producer:
                waiting = await producer.send(TOPIC, "x")
                await asyncio.sleep(1)
                broker.topics[0].partitions[0].leader_id = NODE_ID
                assert (await waiting).partition == 0

    async def test_a_topic_may_be_created_by_the_first_record(self) -> None:
        async with LogBroker() as broker:
            del broker.topics[:]
            metadata = broker.handlers[ApiKey.METADATA]

            def create(request: Message, version: int) -> Answer:
                assert isinstance(request, MetadataRequest)
                if (
                    request.topics
                    and request.allow_auto_topic_creation
                    and len(broker.requests_of(ApiKey.METADATA)) > 3
                ):
                    broker.add_topic(TOPIC, TOPIC_ID, [-1, -1])
                return metadata(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.METADATA] = create
            async with producer_of(broker) as producer:
                await producer.send_and_wait(TOPIC, "a", partition=1)
                asked = len(broker.requests_of(ApiKey.METADATA))
                assert await producer.partitions_for(TOPIC) == [0, 1]
                assert len(broker.requests_of(ApiKey.METADATA)) == asked

    async def test_an_unknown_partition_refreshes_metadata(self) -> None:
        async with LogBroker(3) as broker:
            broker.add_topic(TOPIC, TOPIC_ID, [-1, -1])
            async with producer_of(broker, max_block_ms=500) as producer:
                await producer.send_and_wait(TOPIC, "a", partition=1)
                with pytest.raises(TimeoutException, match=r"UNKNOWN_TOPIC_OR_PARTITION.*t-2"):
                    await producer.send(TOPIC, "b", partition=2)
                broker.add_topic(TOPIC, TOPIC_ID, [-1, -1, -1])
                assert (await producer.send_and_wait(TOPIC, "b", partition=2)).partition == 2

    async def test_an_unauthorized_topic_fails_at_once(self) -> None:
        async with LogBroker() as broker:
            broker.add_topic("secret", TOPIC_ID, [])
            broker.topics[-1].error_code = Errors.TOPIC_AUTHORIZATION_FAILED
            async with producer_of(broker) as producer:
                before = now_ms()
                with pytest.raises(KafkaError, match=r"TOPIC_AUTHORIZATION_FAILED.*secret"):
                    await producer.send("secret", "a")
                assert now_ms() == before

    async def test_an_empty_name_of_a_topic_fails_at_once(self) -> None:
        async with LogBroker() as broker:
            broker.add_topic("", bytes(16), [])
            broker.topics[-1].error_code = Errors.INVALID_TOPIC_EXCEPTION
            async with producer_of(broker) as producer:
                with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION"):
                    await producer.send("", "a")


class TestProducerId:
    async def test_the_producer_id_is_requested_once(self) -> None:
        async with LogBroker() as broker, producer_of(broker, transaction_timeout_ms=77) as producer:
            for number in range(3):
                await producer.send_and_wait(TOPIC, str(number), partition=number % 2)
            (request,) = broker.requests_of(ApiKey.INIT_PRODUCER_ID)
        assert request == InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=77)

    async def test_a_failed_request_for_a_producer_id_is_retried(self) -> None:
        answers = [Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.NONE]
        async with LogBroker() as broker:
            broker.handlers[ApiKey.INIT_PRODUCER_ID] = lambda *_: InitProducerIdResponse(
                error_code=answers.pop(0), producer_id=0, producer_epoch=0
            )
            async with producer_of(broker) as producer:
                sent = [await producer.send(TOPIC, "a", partition=index) for index in (0, 1)]
                assert [(await future).offset for future in sent] == [0, 0]
            assert [header.producer_id for header, _ in broker.logs[ZERO].batches] == [0]
            assert answers == []

    async def test_a_rejected_request_for_a_producer_id_fails_the_records(self) -> None:
        async with LogBroker() as broker:
            broker.handlers[ApiKey.INIT_PRODUCER_ID] = lambda *_: InitProducerIdResponse(
                error_code=Errors.CLUSTER_AUTHORIZATION_FAILED
            )
            async with producer_of(broker) as producer:
                sent = [await producer.send(TOPIC, "a", partition=index) for index in (0, 1)]
                for future in sent:
                    with pytest.raises(KafkaError, match=r"CLUSTER_AUTHORIZATION_FAILED.*InitProducerId"):
                        await future
            assert broker.produced() == []


class TestLife:
    async def test_calls_before_start_and_after_close_fail(self) -> None:
        async with LogBroker() as broker:
            producer = Producer(bootstrap_servers=broker.address, transactional_id="x")
            for _ in range(2):
                for call in (
                    producer.send(TOPIC, "a"),
                    producer.flush(),
                    producer.partitions_for(TOPIC),
                    producer.init_transactions(),
                ):
                    with pytest.raises(IllegalStateException, match="not started, or closed"):
                        await call
                await producer.close()
            assert broker.requests == []
            with pytest.raises(IllegalStateException, match="the client is closed"):
                await producer.start()

    async def test_a_second_start_fails(self) -> None:
        async with LogBroker() as broker, producer_of(broker) as producer:
            with pytest.raises(IllegalStateException, match="started already"):
                await producer.start()

    async def test_send_fails_if_the_producer_is_closed_while_it_waits_for_room(self) -> None:
        async with LogBroker() as broker, producer_of(broker, linger_ms=10_000, buffer_memory=200) as producer:
            stored = await producer.send(TOPIC, "x" * 150, partition=0)
            late = asyncio.create_task(producer.send(TOPIC, "x" * 150, partition=0))
            await asyncio.sleep(1)
            await producer.close()
            assert stored.result().offset == 0
            with pytest.raises(IllegalStateException, match="not started, or closed"):
                await late

    async def test_close_sends_buffered_records(self) -> None:
        async with LogBroker() as broker:
            async with producer_of(broker, linger_ms=10_000) as producer:
                before = now_ms()
                future = await producer.send(TOPIC, "a", partition=0)
            assert (future.result().offset, now_ms()) == (0, before)

    async def test_close_ends_at_its_timeout(self) -> None:
        async with LogBroker() as broker:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            producer = Producer(bootstrap_servers=broker.address, linger_ms=0, buffer_memory=300)
            await producer.start()
            sent = [await producer.send(TOPIC, "a", partition=0)]
            await asyncio.sleep(0.1)
            sent.append(await producer.send(TOPIC, "b", partition=0))
            sent.append(await producer.send(TOPIC, "x" * 150, partition=1))
            late = asyncio.create_task(producer.send(TOPIC, "x" * 150, partition=1))
            await asyncio.sleep(0.1)
            before = now_ms()
            await producer.close(timeout_ms=200)
            assert now_ms() - before == 200
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            with pytest.raises(IllegalStateException, match="not started, or closed"):
                await late
            assert now_ms() - before == 200
            for future in sent:
                with pytest.raises(DisconnectException, match="closed before the record was sent"):
                    future.result()
            await asyncio.sleep(200)
            assert len(broker.produced()) == 2
            assert len(asyncio.all_tasks()) == 1 + len(broker.tasks)

    async def test_a_cancelled_close_leaves_nothing(self) -> None:
        async with LogBroker() as broker:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            producer = Producer(bootstrap_servers=broker.address)
            await producer.start()
            await producer.send(TOPIC, "a", partition=0)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(producer.close(), 0.2)
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            assert running_loop().connections == set()

    @pytest.mark.parametrize("turns", range(1, 16))
    async def test_a_close_that_is_cancelled_while_it_stops_leaves_nothing(self, turns: int) -> None:
        async with LogBroker() as broker:
            producer = Producer(bootstrap_servers=broker.address, linger_ms=0)
            await producer.start()
            await producer.send_and_wait(TOPIC, "a", partition=0)
            await cancel_after(turns, producer.close())
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            assert running_loop().connections == set()

    @pytest.mark.parametrize("turns", range(8))
    async def test_close_stops_a_sender_that_has_just_been_woken(self, turns: int) -> None:
        async with LogBroker() as broker:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            producer = Producer(bootstrap_servers=broker.address, linger_ms=10_000)
            await producer.start()
            await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(1)
            await producer.send(TOPIC, "b", partition=1)
            for _ in range(turns):
                await asyncio.sleep(0)
            before = now_ms()
            await producer.close(timeout_ms=0)
            assert now_ms() == before

    async def test_close_ends_a_wait_for_a_connection(self) -> None:
        async with LogBroker() as broker:
            producer = Producer(bootstrap_servers=broker.address, linger_ms=0)
            await producer.start()
            await producer.partitions_for(TOPIC)
            await producer.send_and_wait(TOPIC, "a", partition=0)
            broker.handlers[ApiKey.API_VERSIONS] = lambda *_: None
            broker.hang_up()
            await asyncio.sleep(1)
            future = await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(1)
            await producer.close(timeout_ms=200)
            assert isinstance(future.exception(), DisconnectException)
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            assert running_loop().connections == set()

    async def test_start_times_out_without_a_cluster(self) -> None:
        producer = Producer(bootstrap_servers="nowhere:1", default_api_timeout_ms=500)
        before = now_ms()
        with pytest.raises(TimeoutException, match="find the cluster"):
            async with producer:
                raise AssertionError
        assert now_ms() - before == 500
        with pytest.raises(IllegalStateException, match="the client is closed"):
            await producer.start()

    async def test_new_partitions_are_seen_after_a_refresh(self) -> None:
        async with LogBroker(3) as broker:
            broker.add_topic(TOPIC, TOPIC_ID, [-1])
            async with producer_of(broker, metadata_max_age_ms=60_000) as producer:
                assert await producer.partitions_for(TOPIC) == [0]
                broker.add_topic(TOPIC, TOPIC_ID, [-1, -1, -1])
                await asyncio.sleep(59.9)
                assert await producer.partitions_for(TOPIC) == [0]
                await asyncio.sleep(0.2)
                assert await producer.partitions_for(TOPIC) == [0, 1, 2]

    async def test_asyncio_does_not_warn_of_a_failed_record(self, caplog: pytest.LogCaptureFixture) -> None:
        # asyncio may have to warn of what earlier tests left.
        gc.collect()
        caplog.clear()
        async with LogBroker(2, ["INVALID_RECORD"]) as broker, producer_of(broker) as producer:
            await producer.send(TOPIC, "a", partition=0)
            await asyncio.sleep(1)
            gc.collect()
            assert [record.message for record in caplog.records if record.name == "asyncio"] == []

    @pytest.mark.parametrize("closes", [True, False])
    async def test_records_whose_futures_are_cancelled_are_flushed(self, closes: bool) -> None:
        """A timeout around asyncio.gather or send_and_wait cancels the futures, and the records are still buffered."""
        async with LogBroker(1, [LOST_ANSWER]) as broker, producer_of(broker, linger_ms=1000) as producer:
            future = await producer.send(TOPIC, "a")
            future.cancel()
            await (producer.close() if closes else producer.flush())
            assert broker.values(0) == ["a"]
            assert closes or await took_ms(producer.flush()) == 0

    async def test_a_flush_waits_for_the_records_before_it(self) -> None:
        """It waits for both halves of a batch that was too large, and not for records that another task sends later."""
        async with LogBroker(2, [Errors.MESSAGE_TOO_LARGE.name]) as broker:
            broker.topics[0].partitions[1].leader_id = -1
            async with producer_of(broker, linger_ms=1000) as producer:
                for value in ("a", "b"):
                    await producer.send(TOPIC, value, partition=0)
                flush = asyncio.create_task(producer.flush())
                await asyncio.sleep(0)
                later = await producer.send(TOPIC, "later", partition=1)
                await flush
                assert (batch_sizes(broker), later.done()) == ([1, 1], False)
                broker.topics[0].partitions[1].leader_id = broker.node_id

    async def test_a_flush_ends_with_the_producer(self) -> None:
        async with LogBroker(1) as broker, producer_of(broker, linger_ms=1000) as producer:
            broker.handlers[ApiKey.PRODUCE] = lambda *_: None
            await producer.send(TOPIC, "a")
            flush = asyncio.create_task(producer.flush())
            await asyncio.sleep(0.1)
            assert await took_ms(producer.close(timeout_ms=100)) == 100
            assert await took_ms(flush) == 0

    async def test_a_cancelled_future_is_left_alone(self) -> None:
        async with LogBroker() as broker, producer_of(broker, linger_ms=10) as producer:
            sent = [await producer.send(TOPIC, str(number), partition=0) for number in range(3)]
            sent[1].cancel()
            assert (await sent[2]).offset == 2
            broker.fates.append("INVALID_RECORD")
            sent = [await producer.send(TOPIC, str(number), partition=0) for number in range(3)]
            sent[0].cancel()
            with pytest.raises(KafkaError):
                await sent[2]
