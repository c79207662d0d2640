# SPDX-License-Identifier: Apache-2.0
"""The event loop serves other requests while a large log is opened."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kcoord.server.api.handlers import list_offsets
from kcoord.topics import log_opening
from kcoord.topics.log_opening import Opening
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, FetchRequest, ListOffsetsRequest, ProduceRequest
from tests.unit.server.harness import TOPICS, Harness, topic_id
from tests.unit.topics.helpers import batch_of

PATIENCE_SECONDS = 30
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


def produce(topic: str, *values: str) -> ProduceRequest:
    partition = ProduceRequest.PartitionProduceData(index=0, records=batch_of(*values))
    data = ProduceRequest.TopicProduceData(name=topic, topic_id=topic_id(topic), partition_data=[partition])
    return ProduceRequest(acks=-1, timeout_ms=1_000, topic_data=[data])


async def error_of(harness: Harness, topic: str) -> int:
    answer = await harness.call(produce(topic, "more"), 12)
    return int(answer.responses[0].partition_responses[0].error_code)


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
