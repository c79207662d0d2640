# SPDX-License-Identifier: Apache-2.0
"""The consumer against scripted responses: its requests and their order for partitions that are new to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from kcoord.client import Consumer, NoOffsetForPartitionException, TopicPartition, UnsupportedVersionException
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.unit.client.fake_broker import Answer, FakeBroker

TOPIC, TOPIC_ID = "t", b"T" * 16
GROUP_MS = 1000
OLD, NEW = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
LATEST, EARLIEST = -1, -2


class GroupBroker(FakeBroker):
    """A broker with one topic, which assigns the partitions `assigned`. It has no committed offsets.

    The offset of a look-up is -timestamp, so that tests see the timestamp of the request.
    """

    def __init__(self, **versions: tuple[int, int]) -> None:
        super().__init__(
            {
                ApiKey.CONSUMER_GROUP_HEARTBEAT: self._heartbeat,
                ApiKey.OFFSET_FETCH: self._offset_fetch,
                ApiKey.LIST_OFFSETS: self._list_offsets,
                ApiKey.FETCH: self._fetch,
            },
            **versions,
        )
        self.assigned = [0]
        self.group_ms = GROUP_MS
        self.fetch_error = Errors.NONE
        self._epoch = 0
        self._told: list[int] | None = None

    def _heartbeat(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ConsumerGroupHeartbeatRequest)
        if request.member_epoch < 0:
            return ConsumerGroupHeartbeatResponse(member_epoch=request.member_epoch)
        response = ConsumerGroupHeartbeatResponse(member_epoch=self._epoch + 1, heartbeat_interval_ms=10)
        if version >= 2:
            response.group_creation_time_ms = self.group_ms
        if self._told != self.assigned or request.member_epoch == 0:
            self._told = list(self.assigned)
            topic = ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC_ID, partitions=self._told)
            response.assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=[topic])
        return response

    def _offset_fetch(self, request: Message, version: int) -> Answer:
        assert isinstance(request, OffsetFetchRequest)
        partition = OffsetFetchResponse.OffsetFetchResponsePartitions
        return OffsetFetchResponse(
            groups=[
                OffsetFetchResponse.OffsetFetchResponseGroup(
                    group_id=group.group_id,
                    topics=[
                        OffsetFetchResponse.OffsetFetchResponseTopics(
                            name=topic.name,
                            partitions=[
                                partition(partition_index=index, committed_offset=-1)
                                for index in topic.partition_indexes
                            ],
                        )
                        for topic in group.topics or ()
                    ],
                )
                for group in request.groups
            ]
        )

    def _list_offsets(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ListOffsetsRequest)
        return ListOffsetsResponse(
            topics=[
                ListOffsetsResponse.ListOffsetsTopicResponse(
                    name=topic.name,
                    partitions=[
                        ListOffsetsResponse.ListOffsetsPartitionResponse(
                            partition_index=partition.partition_index, offset=-partition.timestamp
                        )
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    async def _fetch(self, request: Message, version: int) -> FetchResponse:
        assert isinstance(request, FetchRequest)
        if self.fetch_error:
            error, self.fetch_error = self.fetch_error, Errors.NONE
            data = FetchResponse.PartitionData(partition_index=0, error_code=error, high_watermark=-1)
            topic = FetchResponse.FetchableTopicResponse(topic_id=TOPIC_ID, partitions=[data])
            return FetchResponse(responses=[topic])
        await asyncio.sleep(0.01)
        return FetchResponse()

    def looked_up(self) -> dict[TopicPartition, list[int]]:
        """Returns the timestamps of all look-ups, by partition."""
        timestamps: dict[TopicPartition, list[int]] = {}
        for request in self.requests_of(ApiKey.LIST_OFFSETS):
            assert isinstance(request, ListOffsetsRequest)
            for topic in request.topics:
                for partition in topic.partitions:
                    timestamps.setdefault(TopicPartition(topic.name, partition.partition_index), []).append(
                        partition.timestamp
                    )
        return timestamps

    def asked_by_id(self) -> int:
        """Returns the Metadata requests for the topic of an assignment."""
        requests = self.requests_of(ApiKey.METADATA)
        return sum(
            isinstance(request, MetadataRequest) and any(topic.name is None for topic in request.topics or ())
            for request in requests
        )


@asynccontextmanager
async def consumer_of(
    broker: FakeBroker, base: str = "latest", new: str | None = "earliest"
) -> AsyncIterator[Consumer]:
    async with Consumer(
        bootstrap_servers=broker.address,
        group_id="g",
        auto_offset_reset=base,
        auto_offset_reset_new_partitions=new,
        enable_auto_commit=False,
        retry_backoff_ms=1,
        retry_backoff_max_ms=5,
    ) as consumer:
        consumer.subscribe([TOPIC])
        yield consumer


async def poll_until(consumer: Consumer, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await consumer.poll(5)


@pytest.mark.parametrize(("new", "timestamp"), [("earliest", EARLIEST), (None, LATEST), ("latest", LATEST)])
async def test_a_new_partition(new: str | None, timestamp: int) -> None:
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS])
        async with consumer_of(broker, new=new) as consumer:
            await poll_until(consumer, lambda: OLD in broker.looked_up())
            assert consumer.group_creation_time_ms == GROUP_MS
            broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS, GROUP_MS + 1])
            broker.assigned = [0, 1]
            await poll_until(consumer, lambda: NEW in broker.looked_up())
            assert await consumer.position(NEW) == -timestamp
        assert broker.looked_up() == {OLD: [LATEST], NEW: [timestamp]}


async def test_the_decision_waits_for_metadata_that_has_the_partition() -> None:
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS])
        async with consumer_of(broker) as consumer:
            await poll_until(consumer, lambda: OLD in broker.looked_up())
            before = broker.asked_by_id()
            broker.assigned = [0, 1]
            await poll_until(consumer, lambda: broker.asked_by_id() >= before + 3)
            assert NEW in consumer.assignment
            assert NEW not in broker.looked_up()
            broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS, GROUP_MS + 1])
            await poll_until(consumer, lambda: NEW in broker.looked_up())
        assert broker.looked_up()[NEW] == [EARLIEST]


@pytest.mark.parametrize(("new", "is_forced"), [("earliest", True), (None, False)])
async def test_the_refresh_is_forced_only_with_the_option(new: str | None, is_forced: bool) -> None:
    """The metadata has the topic, but not the partition. Only with the option does the assignment refresh it."""
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS])
        async with consumer_of(broker, new=new) as consumer:
            await poll_until(consumer, lambda: OLD in broker.looked_up())
            before = broker.asked_by_id()
            broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS, GROUP_MS + 1])
            broker.assigned = [0, 1]
            await poll_until(consumer, lambda: NEW in broker.looked_up())
            assert (broker.asked_by_id() > before) is is_forced


@pytest.mark.parametrize(
    ("versions", "group_ms", "partition_ms"),
    [
        ({}, -1, GROUP_MS + 1),
        ({}, GROUP_MS, -1),
        ({"consumer_group_heartbeat": (0, 1)}, GROUP_MS, GROUP_MS + 1),
        ({"metadata": (0, 13)}, GROUP_MS, GROUP_MS + 1),
    ],
)
async def test_an_unknown_time_leads_to_the_base_policy(
    versions: dict[str, tuple[int, int]], group_ms: int, partition_ms: int
) -> None:
    async with GroupBroker(**versions) as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [partition_ms])
        broker.group_ms = group_ms
        async with consumer_of(broker) as consumer:
            await poll_until(consumer, lambda: OLD in broker.looked_up())
            assert await consumer.position(OLD) == -LATEST
        assert broker.looked_up() == {OLD: [LATEST]}


async def test_out_of_range_leads_to_the_base_policy() -> None:
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS + 1])
        broker.fetch_error = Errors.OFFSET_OUT_OF_RANGE
        async with consumer_of(broker) as consumer:
            await poll_until(consumer, lambda: len(broker.looked_up().get(OLD, ())) > 1)
        assert broker.looked_up() == {OLD: [EARLIEST, LATEST]}


async def test_none_applies_to_pre_existing_partitions_only() -> None:
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS, GROUP_MS + 1])
        broker.assigned = [0, 1]
        async with consumer_of(broker, base="none") as consumer:
            with pytest.raises(NoOffsetForPartitionException) as failure:
                await poll_until(consumer, lambda: False)
            assert failure.value.partitions == [OLD]
            assert await consumer.position(NEW) == -EARLIEST
            consumer.seek(OLD, 9)
            await consumer.poll(20)
        assert broker.looked_up() == {NEW: [EARLIEST]}


async def test_a_broker_without_the_consumer_protocol() -> None:
    async with GroupBroker(consumer_group_heartbeat=(0, 0)) as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [-1])
        async with consumer_of(broker) as consumer:
            with pytest.raises(UnsupportedVersionException, match="ConsumerGroupHeartbeat"):
                await poll_until(consumer, lambda: False)


async def test_close_sends_the_leave_epoch() -> None:
    async with GroupBroker() as broker:
        broker.add_topic(TOPIC, TOPIC_ID, [GROUP_MS])
        async with consumer_of(broker) as consumer:
            await poll_until(consumer, lambda: consumer.assignment)
        last = broker.requests_of(ApiKey.CONSUMER_GROUP_HEARTBEAT)[-1]
        assert isinstance(last, ConsumerGroupHeartbeatRequest)
        assert last.member_epoch == -1
