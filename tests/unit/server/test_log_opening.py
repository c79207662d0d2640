# SPDX-License-Identifier: Apache-2.0
"""The event loop serves other requests while a large log is opened."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kcoord.server.api.handlers import list_offsets
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord.topics import log_opening
from kcoord.topics.log_opening import Opening
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    FetchRequest,
    ListOffsetsRequest,
    ProduceRequest,
    ProduceResponse,
)
from tests.unit.server.harness import TOPICS, Harness, image_of, topic_id
from tests.unit.topics.helpers import batch_of

PATIENCE_SECONDS = 30
PRODUCER_ID = 7
VERSION = 12
TOPIC, OTHER = list(TOPICS)[:2]
LARGE = ["x" * 1_000] * 100


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only 50 us of reading in the event loop: enough for a small batch, and not for LARGE."""
    monkeypatch.setattr(log_opening, "AT_ONCE_US", 50)


def hold_openings(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds openings in another thread until the event is set."""
    may_end = threading.Event()
    loop_thread = threading.current_thread()
    check = Opening._check

    def slow_check(opening: Opening[object], size_bytes: int) -> None:
        assert threading.current_thread() is loop_thread or may_end.wait(PATIENCE_SECONDS)
        check(opening, size_bytes)

    monkeypatch.setattr(Opening, "_check", slow_check)
    return may_end


def produce(topic: str, *values: str, sequence: int | None = None, timeout_ms: int = 10) -> ProduceRequest:
    producer = (-1, -1, -1) if sequence is None else (PRODUCER_ID, 0, sequence)
    partition = ProduceRequest.PartitionProduceData(index=0, records=batch_of(*values, producer=producer))
    data = ProduceRequest.TopicProduceData(name=topic, topic_id=topic_id(topic), partition_data=[partition])
    return ProduceRequest(acks=-1, timeout_ms=timeout_ms, topic_data=[data])


async def error_of(harness: Harness, topic: str) -> int:
    answer = await harness.call(produce(topic, "more"), 12)
    return int(answer.responses[0].partition_responses[0].error_code)


async def restarted_with(*topics: str) -> Harness:
    """Returns a broker that was killed after an idempotent producer had written a large batch to each topic."""
    first = await Harness().open()
    first.broker.begin()
    for topic in topics:
        await first.call(produce(topic, *LARGE, sequence=0), VERSION)
    harness = await first.restarted().open()
    harness.broker.begin()
    return harness


class Pipeline:
    """The connection of an idempotent producer that sends requests before it has the responses to earlier ones."""

    def __init__(self, harness: Harness) -> None:
        self._answered = asyncio.Event()
        self.path = RequestPath(PathSettings.of(harness.broker, "PLAINTEXT"), self._answered.set)
        self._reader = FrameReader(1 << 20)

    def send(self, request: ProduceRequest) -> None:
        self.path.receive(encode_request(ApiKey.PRODUCE, VERSION, 1, "client", request.encode(VERSION)))

    async def responses(self, count: int) -> list[list[tuple[int, int]]]:
        """Returns (error, base offset) of the topics of each request, in the order of the requests."""
        frames = self._reader.feed(self.path.take_output())
        while len(frames) < count:
            await asyncio.wait_for(self._answered.wait(), PATIENCE_SECONDS)
            self._answered.clear()
            frames += self._reader.feed(self.path.take_output())
            self.path.process()
            frames += self._reader.feed(self.path.take_output())
        return [
            [
                (topic.partition_responses[0].error_code, topic.partition_responses[0].base_offset)
                for topic in ProduceResponse.decode(
                    frame[decode_response_header(frame, ApiKey.PRODUCE, VERSION)[1] :], VERSION
                ).responses
            ]
            for frame in frames
        ]


async def test_other_requests_are_served_while_a_log_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    first = await Harness().open()
    first.broker.begin()
    await first.call(produce(TOPIC, *LARGE), 12)
    harness = await first.restarted().open()
    harness.broker.begin()
    may_end = hold_openings(monkeypatch)
    try:
        assert await error_of(harness, TOPIC) == Errors.NOT_LEADER_OR_FOLLOWER
        fetched = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
        fetch = FetchRequest(
            max_wait_ms=PATIENCE_SECONDS * 1_000,
            min_bytes=1,
            max_bytes=1 << 20,
            topics=[FetchRequest.FetchTopic(topic=TOPIC, partitions=[fetched])],
        )
        parked = asyncio.ensure_future(harness.call(fetch, 12))
        latest = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)
        by_topic = ListOffsetsRequest.ListOffsetsTopic(name=TOPIC, partitions=[latest])
        offsets = ListOffsetsRequest(replica_id=-1, topics=[by_topic])
        listed = asyncio.ensure_future(harness.call(offsets, 7))
        join = ConsumerGroupHeartbeatRequest(
            group_id="group",
            member_id="member",
            rebalance_timeout_ms=60_000,
            subscribed_topic_names=[OTHER],
            topic_partitions=[],
        )
        joined = await harness.call(join, 1)
        assert joined.error_code == Errors.NONE
        assert await error_of(harness, OTHER) == Errors.NONE
        assert await error_of(harness, TOPIC) == Errors.NOT_LEADER_OR_FOLLOWER
        assert not parked.done()
        assert not listed.done()
    finally:
        may_end.set()
    answer = await asyncio.wait_for(parked, PATIENCE_SECONDS)
    assert answer.responses[0].partitions[0].error_code == Errors.NONE
    answer = await asyncio.wait_for(listed, PATIENCE_SECONDS)
    assert answer.topics[0].partitions[0].error_code == Errors.NONE
    assert answer.topics[0].partitions[0].offset == len(LARGE)
    assert await error_of(harness, TOPIC) == Errors.NONE
    harness.folder.close(harness.now, clean=True)


async def test_list_offsets_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    first = await Harness().open()
    first.broker.begin()
    await first.call(produce(TOPIC, *LARGE), 12)
    harness = await first.restarted().open()
    harness.broker.begin()
    monkeypatch.setattr(list_offsets, "LONGEST_WAIT_SECONDS", 0.01)
    may_end = hold_openings(monkeypatch)
    latest = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)
    request = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=TOPIC, partitions=[latest])]
    )
    try:
        answer = await harness.call(request, 7)
    finally:
        may_end.set()
    assert answer.topics[0].partitions[0].error_code == Errors.NOT_LEADER_OR_FOLLOWER
    harness.folder.close(harness.now, clean=True)


async def test_list_offsets_opens_many_logs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = 100
    harness = await Harness().open()
    harness.broker.on_metadata_update(image_of({TOPIC: partitions}))
    harness.broker.topics.on_metadata_update(image_of({TOPIC: partitions}), harness.now)
    monkeypatch.setattr(log_opening, "OPENED_AT_ONCE", 5)
    answers = 0
    answer = list_offsets._answer

    def counted(*arguments: object) -> object:
        nonlocal answers
        answers += 1
        return answer(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(list_offsets, "_answer", counted)
    latest = [ListOffsetsRequest.ListOffsetsPartition(partition_index=n, timestamp=-1) for n in range(partitions)]
    request = ListOffsetsRequest(
        replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=TOPIC, partitions=latest)]
    )
    listed = await harness.call(request, 7)
    assert [partition.error_code for partition in listed.topics[0].partitions] == [Errors.NONE] * partitions
    assert answers <= 3
    harness.folder.close(harness.now, clean=True)


async def test_pipelined_batches_wait_for_a_log_that_is_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is open before the second batch arrives, and the event loop does not know it yet."""
    harness = await restarted_with(TOPIC)
    may_end, has_ended = hold_openings(monkeypatch), threading.Event()
    run = Opening.run

    def observed_run(opening: Opening[object]) -> None:
        run(opening)
        if opening.has_ended:
            has_ended.set()

    monkeypatch.setattr(Opening, "run", observed_run)
    pipeline = Pipeline(harness)
    pipeline.send(produce(TOPIC, "first", sequence=100, timeout_ms=30_000))
    may_end.set()
    assert has_ended.wait(PATIENCE_SECONDS)
    pipeline.send(produce(TOPIC, "second", sequence=101, timeout_ms=30_000))
    assert await pipeline.responses(2) == [[(Errors.NONE, 100)], [(Errors.NONE, 101)]]
    harness.folder.close(harness.now, clean=True)


async def test_a_request_of_several_logs_is_appended_when_all_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await restarted_with(TOPIC, OTHER)
    may_end = hold_openings(monkeypatch)
    both = produce(TOPIC, "first", sequence=100, timeout_ms=30_000)
    both.topic_data += produce(OTHER, "first", sequence=100).topic_data
    pipeline = Pipeline(harness)
    pipeline.send(both)
    pipeline.send(produce(OTHER, "second", sequence=101, timeout_ms=30_000))
    may_end.set()
    assert await pipeline.responses(2) == [[(Errors.NONE, 100), (Errors.NONE, 100)], [(Errors.NONE, 101)]]
    harness.folder.close(harness.now, clean=True)


async def test_a_producer_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await restarted_with(TOPIC)
    may_end = hold_openings(monkeypatch)
    pipeline = Pipeline(harness)
    try:
        pipeline.send(produce(TOPIC, "first", sequence=100, timeout_ms=10))
        assert await pipeline.responses(1) == [[(Errors.NOT_LEADER_OR_FOLLOWER, -1)]]
    finally:
        may_end.set()
    harness.folder.close(harness.now, clean=True)


async def test_a_request_without_response_holds_the_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await restarted_with(TOPIC)
    may_end = hold_openings(monkeypatch)
    unanswered = produce(TOPIC, "first", sequence=100, timeout_ms=30_000)
    unanswered.acks = 0
    pipeline = Pipeline(harness)
    pipeline.send(unanswered)
    pipeline.send(produce(TOPIC, "second", sequence=101, timeout_ms=30_000))
    assert pipeline.path.queued == 1
    may_end.set()
    assert await pipeline.responses(1) == [[(Errors.NONE, 101)]]
    harness.folder.close(harness.now, clean=True)


async def test_the_producers_of_a_request_are_compared_again_after_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only topics that exist count. Else a topic that is created meanwhile would get another producer's batch."""
    harness = await restarted_with(TOPIC)
    may_end = hold_openings(monkeypatch)
    request = ProduceRequest(transactional_id="mine", acks=-1, timeout_ms=30_000)
    for name, producer_id in ((TOPIC, PRODUCER_ID), ("new", PRODUCER_ID + 1)):
        records = batch_of("x", producer=(producer_id, 0, 100), is_transactional=True)
        partition = ProduceRequest.PartitionProduceData(index=0, records=records)
        request.topic_data.append(ProduceRequest.TopicProduceData(name=name, partition_data=[partition]))
    waiting = asyncio.ensure_future(harness.call(request, VERSION))
    await asyncio.sleep(0)
    harness.broker.topics.on_metadata_update(image_of({**TOPICS, "new": 1}), harness.now)
    may_end.set()
    answer = await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    errors = {topic.name: topic.partition_responses[0].error_code for topic in answer.responses}
    assert errors == dict.fromkeys((TOPIC, "new"), Errors.INVALID_PRODUCER_ID_MAPPING)
    harness.folder.close(harness.now, clean=True)
