# SPDX-License-Identifier: Apache-2.0
"""The consumer as a member of a group: heartbeats, rebalances and commits, and their times, on virtual time."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Unpack

import pytest

from kcoord.client import (
    AdminClient,
    CommitFailedException,
    Consumer,
    ConsumerGroupMetadata,
    ConsumerRebalanceListener,
    Errors,
    IllegalStateException,
    KafkaError,
    OffsetAndMetadata,
    TimeoutException,
    TopicPartition,
    UnsupportedVersionException,
)
from kcoord.client.config import ConsumerOptions
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatNewPartitionsResponse,
    ConsumerGroupHeartbeatRequest,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from tests.unit.client.fake_broker import Answer
from tests.unit.client.records_broker import ONE, TOPIC, TOPIC_ID, ZERO, RecordsBroker, numbers
from tests.unit.client.test_consuming import offsets
from tests.unit.client.virtual_loop import cancel_after, now_ms, quiet, running_loop, took_ms

Partitions = frozenset[TopicPartition]
HEARTBEAT = ApiKey.CONSUMER_GROUP_HEARTBEAT


pytestmark = pytest.mark.usefixtures("no_surprise")


@asynccontextmanager
async def member_of(broker: RecordsBroker, **options: Unpack[ConsumerOptions]) -> AsyncIterator[Consumer]:
    settings: ConsumerOptions = {
        "bootstrap_servers": broker.address,
        "group_id": "g",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
        **options,
    }
    async with Consumer(**settings) as consumer:
        yield consumer


@asynccontextmanager
async def settled(
    broker: RecordsBroker,
    *assigned: int,
    listener: ConsumerRebalanceListener | None = None,
    **options: Unpack[ConsumerOptions],
) -> AsyncIterator[Consumer]:
    """Yields a member that has its partitions and has acknowledged them."""
    broker.assigned = list(assigned or (0, 1))
    async with broker, member_of(broker, **options) as consumer:
        consumer.subscribe([TOPIC], listener=listener)
        await poll_until(consumer, lambda: len(consumer.assignment) == len(broker.assigned or ()))
        yield consumer


async def poll_until(consumer: Consumer, condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await consumer.poll(10)


async def read_to(consumer: Consumer, partition: TopicPartition, position: int) -> None:
    """Polls until the position of the partition has reached `position`."""
    async with asyncio.timeout(60):
        while await consumer.position(partition) < position:
            await consumer.poll(10)


class Events(ConsumerRebalanceListener):
    """A listener that records its calls in `seen`. Each call takes `seconds` and raises `failure`, if it is set."""

    def __init__(self, broker: RecordsBroker) -> None:
        self.seen: list[tuple[str, Partitions]] = []
        self.seconds = 0.0
        self.failure: Exception | None = None
        self._broker = broker

    async def _note(self, what: str, partitions: Partitions) -> None:
        self.seen.append((what, partitions))
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure

    async def on_partitions_assigned(self, partitions: Partitions) -> None:
        await self._note("assigned", partitions)

    async def on_partitions_revoked(self, partitions: Partitions) -> None:
        await self._note("revoked", partitions)

    async def on_partitions_lost(self, partitions: Partitions) -> None:
        await self._note("lost", partitions)


class TestHeartbeats:
    async def test_poll_raises_the_error_of_a_heartbeat_that_cannot_be_encoded(self) -> None:
        async with RecordsBroker() as broker, member_of(broker, group_instance_id="i" * 40_000) as consumer:
            consumer.subscribe([TOPIC])
            with pytest.raises(KafkaError, match="INVALID_REQUEST: ConsumerGroupHeartbeatRequest: instance_id: 40000 "):
                await poll_until(consumer, lambda: False)

    async def test_heartbeats_keep_the_interval_of_the_group(self) -> None:
        broker = RecordsBroker()
        broker.heartbeat_interval_ms = 700
        async with settled(broker, 0) as consumer:
            joined, acknowledged = broker.arrivals_of(HEARTBEAT)
            await consumer.poll(3000)
            assert [time - acknowledged for time in broker.arrivals_of(HEARTBEAT)[2:]] == [700, 1400, 2100, 2800]
            assert acknowledged - joined < 20

    async def test_heartbeats_continue_while_the_application_is_busy(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0):
            _, acknowledged = broker.arrivals_of(HEARTBEAT)
            await asyncio.sleep(3.5)
            times = [time - acknowledged for time in broker.arrivals_of(HEARTBEAT)[2:]]
            assert times == pytest.approx([1000, 2000, 3000], abs=2)

    async def test_heartbeats_continue_between_buffered_records(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.append(ZERO, *numbers(0, 20))
            await anext(consumer)
            count = len(broker.heartbeats())
            for _ in range(19):
                running_loop().block(broker.heartbeat_interval_ms / 1000)
                await anext(consumer)
            assert len(broker.heartbeats()) - count >= 2

    async def test_changes_of_the_state_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG", logger="kcoord.client.consumer.session")
        async with settled(RecordsBroker(), 0) as consumer:
            await consumer.poll(3000)
        assert [record.getMessage() for record in caplog.records] == [
            "member member of g: joining -> reconciling, epoch 0 -> 1",
            "member member of g: acknowledging -> stable, epoch 1 -> 1",
            "member member of g: leaving -> unsubscribed, epoch -1 -> 0",
        ]

    async def test_a_member_that_subscribes_again_joins_at_once(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, max_poll_interval_ms=2000) as consumer:
            await asyncio.sleep(3)
            before = now_ms()
            count = len(broker.heartbeats())
            await consumer.poll(0)
            await consumer.poll(0)
            await asyncio.sleep(0.1)
            assert (broker.heartbeats()[count].member_epoch, broker.arrivals_of(HEARTBEAT)[count]) == (0, before)

    async def test_the_first_heartbeat(self) -> None:
        async with settled(
            RecordsBroker(), client_rack="r", group_remote_assignor="range", max_poll_interval_ms=77_000
        ) as consumer:
            assert consumer.group_metadata == ConsumerGroupMetadata("g", "member", 1, None)
            assert consumer.group_creation_time_ms is None
        broker = RecordsBroker()
        broker.creation_time_ms = 0
        async with settled(broker) as consumer:
            assert consumer.group_creation_time_ms == 0
        async with (
            RecordsBroker() as broker,
            member_of(
                broker,
                client_rack="r",
                group_remote_assignor="range",
                max_poll_interval_ms=77_000,
                group_instance_id="i",
            ) as consumer,
        ):
            assert consumer.group_metadata == ConsumerGroupMetadata("g", group_instance_id="i")
            consumer.subscribe([TOPIC])
            await consumer.poll(0)
            await asyncio.sleep(0.1)
            assert broker.heartbeats()[0] == ConsumerGroupHeartbeatRequest(
                group_id="g",
                member_id="member",
                member_epoch=0,
                instance_id="i",
                rack_id="r",
                server_assignor="range",
                rebalance_timeout_ms=77_000,
                subscribed_topic_names=[TOPIC],
                subscribed_topic_regex="",
                topic_partitions=[],
            )

    async def test_an_old_broker_without_client_side_member_ids_is_rejected(self) -> None:
        async with RecordsBroker(consumer_group_heartbeat=(0, 0)) as broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC])
            with pytest.raises(KafkaError, match="UNSUPPORTED_VERSION"):
                await consumer.poll()
            assert broker.heartbeats() == []

    @pytest.mark.parametrize("is_answer", [False, True])
    async def test_backoffs_grow_with_the_failures(self, is_answer: bool) -> None:
        broker = RecordsBroker()
        async with settled(broker, retry_backoff_max_ms=400) as consumer:
            await consumer.poll(500)
            before = len(broker.heartbeats())
            error = Errors.CONCURRENT_TRANSACTIONS if is_answer else Errors.COORDINATOR_LOAD_IN_PROGRESS
            broker.errors[HEARTBEAT] = [error] * 4
            await consumer.poll(4000)
            times = broker.arrivals_of(HEARTBEAT)[before:]
            assert [time - times[0] for time in times] == pytest.approx([0, 100, 300, 700, 1100, 2100, 3100], abs=2)

    async def test_a_new_subscription_is_sent_at_once(self) -> None:
        broker = RecordsBroker()
        async with settled(broker) as consumer:
            await consumer.poll(500)
            before = len(broker.heartbeats())
            consumer.subscribe([TOPIC, "u"])
            await asyncio.sleep(0.1)
            assert broker.heartbeats()[before].subscribed_topic_names == [TOPIC, "u"]
            assert consumer.subscription == {TOPIC, "u"}

    async def test_a_member_leaves_without_polls_and_joins_again(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, listener=events, max_poll_interval_ms=5000) as consumer:
            await consumer.poll(100)
            before = now_ms()
            await asyncio.sleep(4.9)
            assert broker.has_member()
            await asyncio.sleep(0.2)
            assert not broker.has_member()
            assert broker.arrivals_of(HEARTBEAT)[-1] - before == 5000
            assert broker.heartbeats()[-1].member_epoch == -1
            assert consumer.assignment == {ZERO, ONE}, "the partitions are lost at the next poll"
            await poll_until(consumer, lambda: broker.has_member() and consumer.assignment)
            assert [what for what, _ in events.seen] == ["assigned", "lost", "assigned"]
            await consumer.poll(12_000)
            assert broker.has_member(), "the interval does not count while poll waits"
            await asyncio.sleep(4.9)
            assert broker.has_member()

    async def test_a_fenced_member_loses_its_partitions_and_joins_again(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            await consumer.poll(100)
            broker.errors[HEARTBEAT] = [Errors.UNKNOWN_MEMBER_ID]
            await poll_until(consumer, lambda: len(events.seen) == 3)
            assert events.seen == [
                ("assigned", frozenset({ZERO})),
                ("lost", frozenset({ZERO})),
                ("assigned", frozenset({ZERO})),
            ]
            assert broker.member_epoch == 2

    async def test_each_poll_raises_a_fatal_error(self) -> None:
        broker = RecordsBroker()
        async with settled(broker) as consumer:
            broker.errors[HEARTBEAT] = [Errors.GROUP_AUTHORIZATION_FAILED]
            for _ in range(2):
                with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED: by script"):
                    await consumer.poll()
            count = len(broker.heartbeats())
            await quiet()
            assert len(broker.heartbeats()) == count
            await consumer.unsubscribe()
            consumer.subscribe([TOPIC])
            await poll_until(consumer, lambda: consumer.assignment)

    async def test_the_name_of_a_topic_that_cannot_exist_is_raised_once(self) -> None:
        broker = RecordsBroker()
        broker.assigned = [0]
        broker.topics.append(
            MetadataResponse.MetadataResponseTopic(name="a b", error_code=Errors.INVALID_TOPIC_EXCEPTION)
        )
        async with broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC, "a b"])
            with pytest.raises(KafkaError, match="INVALID_TOPIC_EXCEPTION: a b"):
                await consumer.poll(5000)
            await poll_until(consumer, lambda: consumer.assignment)

    async def test_an_unauthorized_topic_is_raised_once(self) -> None:
        broker = RecordsBroker()
        async with settled(broker) as consumer:
            broker.errors[HEARTBEAT] = [Errors.TOPIC_AUTHORIZATION_FAILED]
            with pytest.raises(KafkaError, match="TOPIC_AUTHORIZATION_FAILED"):
                await consumer.poll()
            await consumer.poll(5000)
            assert consumer.assignment == {ZERO, ONE}

    async def test_the_later_revision_of_kip_1327(self) -> None:
        """The coordinator lists new partitions, in a response with another layout."""

        def heartbeat(request: Message, version: int) -> Answer:
            assert isinstance(request, ConsumerGroupHeartbeatRequest) and version == 2
            if request.member_epoch < 0:
                return ConsumerGroupHeartbeatNewPartitionsResponse(member_epoch=request.member_epoch)
            response = ConsumerGroupHeartbeatNewPartitionsResponse(member_epoch=1, heartbeat_interval_ms=1000)
            if request.member_epoch == 0:
                topic = ConsumerGroupHeartbeatNewPartitionsResponse.TopicPartitions(
                    topic_id=TOPIC_ID, partitions=[0, 1], new_partitions=[1]
                )
                response.assignment = ConsumerGroupHeartbeatNewPartitionsResponse.Assignment(topic_partitions=[topic])
            return response

        async with RecordsBroker() as broker:
            broker.handlers[HEARTBEAT] = heartbeat
            for partition in (ZERO, ONE):
                broker.append(partition, "0")
            async with member_of(
                broker,
                auto_offset_reset="latest",
                auto_offset_reset_new_partitions="earliest",
                kip_1327_revision="new-partitions",
            ) as consumer:
                consumer.subscribe([TOPIC])
                await poll_until(consumer, lambda: consumer.assignment)
                await asyncio.gather(*(consumer.position(partition) for partition in (ZERO, ONE)))
                assert sorted(broker.looked_up()) == [(0, -1), (1, -2)]
                by_id = [
                    request
                    for request in broker.requests_of(ApiKey.METADATA)
                    if isinstance(request, MetadataRequest)
                    and any(topic.name is None for topic in request.topics or ())
                ]
                assert by_id == [], "creation times are not requested"


class TestRebalance:
    async def test_partitions_are_revoked_before_others_are_assigned(self) -> None:
        broker = RecordsBroker(3)
        events = Events(broker)
        async with settled(broker, 0, 1, listener=events) as consumer:
            broker.assigned = [1, 2]
            await poll_until(consumer, lambda: len(events.seen) == 3)
            two = TopicPartition(TOPIC, 2)
            assert events.seen[1:] == [("revoked", frozenset({ZERO})), ("assigned", frozenset({two}))]
            assert consumer.assignment == {ONE, two}
            await consumer.poll(100)
            owned = [
                sorted(heartbeat.topic_partitions[0].partitions)
                for heartbeat in broker.heartbeats()
                if heartbeat.topic_partitions
            ]
            assert owned[-1] == [1, 2]

    async def test_records_of_partitions_are_not_read_during_their_callbacks(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        broker.append(ZERO, "0")
        events.seconds = 2
        broker.assigned = [0]
        async with broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC], listener=events)
            before = now_ms()
            assert offsets(await consumer.poll(10_000)) == [0]
            assert broker.arrivals_of(ApiKey.FETCH)[0] - before >= 2000
            assert broker.arrivals_of(ApiKey.OFFSET_FETCH)[0] - before >= 2000
            await consumer.poll(100)
            broker.append(ZERO, "1")
            await asyncio.sleep(0.2)
            broker.assigned = []
            await asyncio.sleep(2)
            assert offsets(await consumer.poll(5000)) == []
            assert events.seen[1:] == [("revoked", frozenset({ZERO}))]

    @pytest.mark.parametrize("what", ["revoked", "lost"])
    async def test_revoked_and_lost_partitions_are_not_fetched(self, what: str) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            await consumer.position(ZERO)
            events.seconds = 4
            if what == "revoked":
                broker.assigned = []
            else:
                broker.errors[HEARTBEAT] = [Errors.UNKNOWN_MEMBER_ID]
            await poll_until(consumer, lambda: len(events.seen) == 2)
            assert events.seen[1][0] == what
            ended = now_ms()
        times = broker.arrivals_of(ApiKey.FETCH)
        assert [time for time in times if time < ended - 4000], "it did before"
        assert [time for time in times if ended - 4000 + 500 < time < ended] == []

    async def test_positions_are_committed_before_a_revocation(self) -> None:
        broker = RecordsBroker()
        broker.append(ZERO, *numbers(0, 3))
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await read_to(consumer, ZERO, 3)
            broker.assigned = []
            await poll_until(consumer, lambda: not consumer.assignment)
            assert [offsets for _, _, _, offsets in broker.commits] == [{ZERO: 3}]

    async def test_a_failed_commit_does_not_stop_a_revocation(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            broker.errors[ApiKey.OFFSET_COMMIT] = [Errors.GROUP_AUTHORIZATION_FAILED]
            broker.assigned = []
            await poll_until(consumer, lambda: not consumer.assignment)
            assert broker.commits == []

    async def test_a_poll_that_is_cancelled_before_the_listener_knows_revokes_later(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            commit, broker.handlers[ApiKey.OFFSET_COMMIT] = broker.handlers[ApiKey.OFFSET_COMMIT], lambda *_: None
            broker.assigned = [1]
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consumer.poll(), 4)
            assert consumer.assignment == {ZERO}
            assert len(events.seen) == 1
            broker.handlers[ApiKey.OFFSET_COMMIT] = commit
            await poll_until(consumer, lambda: consumer.assignment == {ONE})
            assert events.seen[1:] == [("revoked", frozenset({ZERO})), ("assigned", frozenset({ONE}))]
            assert ZERO in broker.committed

    async def test_an_error_of_a_listener_is_raised_and_the_step_is_done(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        events.failure = ValueError("by design")
        broker.assigned = [0]
        async with broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC], listener=events)
            with pytest.raises(ValueError, match="by design"):
                await consumer.poll()
            assert consumer.assignment == {ZERO}
            await consumer.poll(100)
            assert len(broker.heartbeats()) == 2, "the assignment is acknowledged"
            broker.append(ZERO, "0")
            assert offsets(await consumer.poll(5000)) == [0]

    async def test_a_listener_may_seek(self) -> None:
        """The consumer fetches from the chosen offset at once, without waiting for another event."""

        class Seeking(ConsumerRebalanceListener):
            def on_partitions_assigned(self, partitions: Partitions) -> None:
                consumer.seek(ZERO, 1)

        broker = RecordsBroker()
        broker.heartbeat_interval_ms = 60_000
        broker.append(ZERO, "0", "1")
        broker.assigned = [0]
        async with broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC], listener=Seeking())
            assert offsets(await consumer.poll(1000)) == [1]
            assert now_ms() < 10

    async def test_a_listener_may_be_synchronous_and_lost_calls_revoked(self) -> None:
        seen = []

        class Plain(ConsumerRebalanceListener):
            def on_partitions_revoked(self, partitions: Partitions) -> None:
                seen.append(partitions)

        broker = RecordsBroker()
        async with settled(broker, 0, listener=Plain()) as consumer:
            await consumer.poll(100)
            broker.errors[HEARTBEAT] = [Errors.FENCED_MEMBER_EPOCH]
            await poll_until(consumer, lambda: seen)
            assert seen == [frozenset({ZERO})]

    @pytest.mark.parametrize("policy", [None, "earliest"])
    async def test_an_assignment_requests_missing_metadata_without_a_poll(self, policy: str | None) -> None:
        """The metadata is that of topics without a name and, with the option of KIP-1327, of unknown partitions."""

        def asked_by_id() -> int:
            requests = broker.requests_of(ApiKey.METADATA)
            return sum(
                isinstance(request, MetadataRequest) and any(topic.name is None for topic in request.topics or ())
                for request in requests
            )

        async with (
            RecordsBroker(1) as broker,
            member_of(broker, auto_offset_reset_new_partitions=policy) as consumer,
        ):
            broker.assigned = [0]
            consumer.subscribe(pattern="t.*")
            await quiet(0.5)
            assert asked_by_id() == 1
            broker.assigned = [0, 1]
            await quiet(1)
            assert asked_by_id() == (2 if policy else 1)

    async def test_waiting_for_metadata_leaves_no_tasks(self) -> None:
        async with (
            RecordsBroker(1) as broker,
            member_of(broker, auto_offset_reset_new_partitions="earliest") as consumer,
        ):
            broker.creation_time_ms = 5
            broker.assigned = [0, 1]
            consumer.subscribe([TOPIC])
            await consumer.poll(3000)
            tasks = len(asyncio.all_tasks())
            await consumer.poll(10_000)
            assert len(asyncio.all_tasks()) <= tasks + 1

    async def test_the_name_of_an_assigned_topic_is_requested(self) -> None:
        async with RecordsBroker() as broker, member_of(broker) as consumer:
            broker.assigned = [0]
            broker.topics[0].topic_id = b"X" * 16
            consumer.subscribe(pattern="t.*")
            await consumer.poll(3000)
            assert consumer.assignment == frozenset()
            broker.topics[0].topic_id = TOPIC_ID
            await poll_until(consumer, lambda: consumer.assignment == {ZERO})
            assert broker.heartbeats()[0].subscribed_topic_regex == "t.*"


class TestToStartTime:
    """KIP-1282: a consumer begins at the creation time of the group."""

    async def test_the_creation_time_of_the_group_is_looked_up(self) -> None:
        broker = RecordsBroker()
        broker.creation_time_ms = 5000
        broker.append(ZERO, "0", timestamp_ms=4000)
        broker.append(ZERO, "1", timestamp_ms=5000)
        async with settled(broker, 0, auto_offset_reset="to_start_time") as consumer:
            await consumer.position(ZERO)
            assert broker.looked_up() == [(0, 5000)]
            await consumer.unsubscribe()
            consumer.assign([ZERO])
            with pytest.raises(UnsupportedVersionException, match="the group must assign t-0"):
                await consumer.poll()

    async def test_to_start_time_needs_the_creation_time_of_the_group(self) -> None:
        async with RecordsBroker() as broker, member_of(broker, auto_offset_reset="to_start_time") as consumer:
            broker.assigned = [0]
            consumer.subscribe([TOPIC])
            with pytest.raises(UnsupportedVersionException, match="the group must assign t-0"):
                await consumer.poll()


class TestLeaving:
    @pytest.mark.parametrize(
        ("instance_id", "leave_group", "epoch"),
        [(None, None, -1), (None, True, -1), (None, False, None), ("i", None, -2), ("i", False, -2), ("i", True, -1)],
    )
    async def test_close_sends_the_leave_epoch(
        self, instance_id: str | None, leave_group: bool | None, epoch: int | None
    ) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events, group_instance_id=instance_id) as consumer:
            await consumer.poll(100)
            before = now_ms()
            await consumer.close(leave_group=leave_group)
            assert now_ms() == before
            last = broker.heartbeats()[-1]
            assert last.member_epoch == (1 if epoch is None else epoch)
            assert [what for what, _ in events.seen[1:]] == ["revoked"]
        assert running_loop().connections == set()

    async def test_an_error_of_the_listener_in_close_leaves_nothing(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            events.failure = ValueError("by design")
            with pytest.raises(ValueError, match="by design"):
                await consumer.close()
            assert broker.heartbeats()[-1].member_epoch == -1
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            assert running_loop().connections == set()

    async def test_an_error_of_the_listener_in_unsubscribe_ends_the_subscription(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            events.failure = ValueError("by design")
            with pytest.raises(ValueError, match="by design"):
                await consumer.unsubscribe()
            assert consumer.subscription == frozenset()
            consumer.assign([ONE])

    async def test_the_last_commit_ends_at_the_timeout_of_close(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            broker.handlers[ApiKey.OFFSET_COMMIT] = lambda *_: None
            assert await took_ms(consumer.close(timeout_ms=300)) == 300

    @pytest.mark.parametrize("closes", [True, False])
    async def test_a_cancelled_close_ends_at_once(self, closes: bool) -> None:
        """It does not wait for its own timeout, although the coordinator does not respond."""
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            commit = broker.handlers[ApiKey.OFFSET_COMMIT]
            broker.handlers[ApiKey.OFFSET_COMMIT] = lambda *_: None

            async def leave() -> None:
                async with asyncio.timeout(0.2):
                    await (consumer.close() if closes else consumer.unsubscribe())

            assert await took_ms(leave(), TimeoutError) == 200
            assert consumer.subscription == frozenset() or closes
            if not closes:
                broker.handlers[ApiKey.OFFSET_COMMIT] = commit
                consumer.subscribe([TOPIC])
                await poll_until(consumer, lambda: consumer.assignment)

    @pytest.mark.parametrize("turns", range(1, 36))
    async def test_a_close_that_is_cancelled_while_it_stops_leaves_nothing(self, turns: int) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            await cancel_after(turns, consumer.close())
            assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("kcoord")]
            assert running_loop().connections == set()

    async def test_a_commit_behind_another_one_ends_at_its_timeout(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await consumer.position(ZERO)
            broker.handlers[ApiKey.OFFSET_COMMIT] = lambda *_: None
            consumer.commit_async({ZERO: 1})
            assert await took_ms(consumer.commit({ZERO: 2}, timeout_ms=200), TimeoutException) == 200
            assert await took_ms(consumer.close(timeout_ms=300)) == 300

    async def test_close_ends_at_its_timeout(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            await consumer.poll(100)
            broker.handlers[HEARTBEAT] = lambda *_: None
            assert await took_ms(consumer.close(timeout_ms=300)) == 300
            assert len(asyncio.all_tasks()) == 1 + len(broker.tasks)

    @pytest.mark.parametrize("leave_group", [True, False])
    async def test_close_commits_if_commits_are_automatic(self, leave_group: bool) -> None:
        broker = RecordsBroker()
        broker.append(ZERO, *numbers(0, 2))
        async with settled(broker, 0, enable_auto_commit=True) as consumer:
            await read_to(consumer, ZERO, 2)
            await consumer.close(leave_group=leave_group)
            assert broker.committed == {ZERO: OffsetAndMetadata(2, "", 3)}

    @pytest.mark.parametrize("leave_group", [None, False])
    async def test_a_member_that_has_left_loses_its_partitions_in_close(
        self, leave_group: bool | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events, enable_auto_commit=True, max_poll_interval_ms=2000) as consumer:
            await consumer.position(ZERO)
            await quiet(3)
            await consumer.close(leave_group=leave_group)
        assert events.seen[1:] == [("lost", frozenset({ZERO}))]
        assert broker.requests_of(ApiKey.OFFSET_COMMIT) == []
        assert [record.name for record in caplog.records] == ["kcoord.client.consumer.session"]

    async def test_unsubscribe_and_subscribe_again(self) -> None:
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            await consumer.poll(100)
            await consumer.unsubscribe()
            assert (consumer.assignment, consumer.subscription) == (frozenset(), frozenset())
            assert not broker.has_member()
            count = len(broker.heartbeats())
            await consumer.poll(3000)
            assert len(broker.heartbeats()) == count
            consumer.subscribe([TOPIC], listener=events)
            await poll_until(consumer, lambda: consumer.assignment)
            assert broker.heartbeats()[count].member_epoch == 0
            assert [what for what, _ in events.seen] == ["assigned", "revoked", "assigned"]

    async def test_a_subscription_has_its_own_listener(self) -> None:
        """As in Java's consumer: without a listener nothing is called, also if the subscription before had one."""
        broker = RecordsBroker()
        events = Events(broker)
        async with settled(broker, 0, listener=events) as consumer:
            await consumer.poll(100)
            consumer.subscribe([TOPIC])
            await consumer.unsubscribe()
            consumer.subscribe([TOPIC])
            await poll_until(consumer, lambda: consumer.assignment)
        assert [what for what, _ in events.seen] == ["assigned"]

    async def test_subscribe_before_the_member_has_left(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, request_timeout_ms=5000) as consumer:
            await consumer.poll(100)
            heartbeat, broker.handlers[HEARTBEAT] = broker.handlers[HEARTBEAT], lambda *_: None
            assert await took_ms(consumer.unsubscribe(timeout_ms=300)) == 300
            consumer.subscribe([TOPIC])
            broker.handlers[HEARTBEAT] = heartbeat
            await poll_until(consumer, lambda: consumer.assignment)
            epochs = [heartbeat.member_epoch for heartbeat in broker.heartbeats()]
            assert epochs[epochs.index(-1) :][:2] == [-1, 0]

    async def test_a_member_without_partitions_leaves_at_once(self) -> None:
        async with RecordsBroker() as broker, member_of(broker) as consumer:
            consumer.subscribe([TOPIC])
            await consumer.poll(100)
            before = now_ms()
            await consumer.unsubscribe()
            assert now_ms() == before
            assert broker.heartbeats()[-1].member_epoch == -1

    async def test_unsubscribe_commits_assigned_partitions(self) -> None:
        async with RecordsBroker() as broker, member_of(broker, enable_auto_commit=True) as consumer:
            consumer.assign([ZERO])
            broker.append(ZERO, "0")
            assert offsets(await consumer.poll(1000)) == [0]
            await consumer.unsubscribe()
            assert [(member, epoch, offsets) for _, member, epoch, offsets in broker.commits] == [("", -1, {ZERO: 1})]
            assert broker.heartbeats() == []


class TestCommits:
    async def test_commit_on_demand(self) -> None:
        broker = RecordsBroker()
        broker.append(ZERO, *numbers(0, 3))
        async with settled(broker, 0, 1) as consumer:
            await read_to(consumer, ZERO, 3)
            await consumer.position(ONE)
            await consumer.commit()
            assert broker.committed == {ZERO: OffsetAndMetadata(3, "", 3), ONE: OffsetAndMetadata(0, "", 3)}
            await consumer.commit({ZERO: 1, ONE: OffsetAndMetadata(2, "note", 1)})
            assert broker.committed == {ZERO: OffsetAndMetadata(1), ONE: OffsetAndMetadata(2, "note", 1)}
            assert await consumer.committed([ZERO, TopicPartition(TOPIC, 0), ONE]) == broker.committed
            sent = broker.requests_of(ApiKey.OFFSET_COMMIT)[-1]
            assert isinstance(sent, OffsetCommitRequest)
            assert (sent.group_id, sent.member_id, sent.generation_id_or_member_epoch) == ("g", "member", 1)
            await consumer.commit({})
            assert len(broker.commits) == 2
            asked = broker.requests_of(ApiKey.OFFSET_FETCH)[-1]
            assert isinstance(asked, OffsetFetchRequest) and asked.require_stable
            assert (asked.groups[0].member_id, asked.groups[0].member_epoch) == ("member", 1)

    @pytest.mark.parametrize("is_fenced", [True, False])
    async def test_a_former_member_is_named_to_a_transaction(self, is_fenced: bool) -> None:
        """A coordinator would accept its offsets without a member, after the members that took over have left."""
        nobody = ConsumerGroupMetadata("g", group_instance_id="i")
        broker = RecordsBroker()
        async with settled(broker, 0, max_poll_interval_ms=2000, group_instance_id="i") as consumer:
            member = consumer.group_metadata
            assert member == ConsumerGroupMetadata("g", "member", broker.member_epoch, "i")
            if is_fenced:
                broker.errors[HEARTBEAT] = [Errors.FENCED_MEMBER_EPOCH]
            await quiet(3)
            assert consumer.group_metadata == member
            with pytest.raises(CommitFailedException):
                await consumer.commit({ZERO: 1})
            await consumer.unsubscribe()
            assert consumer.group_metadata == nobody
            consumer.assign([ZERO])
            assert consumer.group_metadata == nobody

    @pytest.mark.parametrize("offset", [-1, 1 << 63])
    async def test_a_number_that_is_no_offset_is_not_committed(self, offset: int) -> None:
        """The group would have no committed offset after it, and its next owner would begin somewhere else."""
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer, AdminClient(bootstrap_servers=broker.address) as admin:
            for committed in (offset, OffsetAndMetadata(offset)):
                with pytest.raises(ValueError, match=f"offset of t-0: {offset} is not from 0 to "):
                    await consumer.commit({ZERO: committed})
                with pytest.raises(ValueError, match="offset of t-0"):
                    consumer.commit_async({ZERO: committed})
                with pytest.raises(ValueError, match="offset of t-0"):
                    await admin.alter_consumer_group_offsets("g", {ZERO: committed})
        assert broker.requests_of(ApiKey.OFFSET_COMMIT) == []

    async def test_a_static_member_commits_with_its_instance_id(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, group_instance_id="i") as consumer:
            await consumer.commit({ZERO: 1})
            assert broker.requests_of(ApiKey.OFFSET_COMMIT)[0].group_instance_id == "i"  # type: ignore[attr-defined]
        async with RecordsBroker() as broker, member_of(broker, group_instance_id="i") as consumer:
            consumer.assign([ZERO])
            await consumer.commit({ZERO: 1})
            sent = broker.requests_of(ApiKey.OFFSET_COMMIT)[0]
            assert isinstance(sent, OffsetCommitRequest)
            assert (sent.group_instance_id, sent.member_id, sent.generation_id_or_member_epoch) == (None, "", -1)
            asked = await consumer.committed([ZERO])
            assert asked == {ZERO: OffsetAndMetadata(1)}
            group = broker.requests_of(ApiKey.OFFSET_FETCH)[-1].groups[0]  # type: ignore[attr-defined]
            assert (group.member_id, group.member_epoch) == (None, -1)

    @pytest.mark.parametrize(("highest", "works"), [(8, False), (9, True)])
    async def test_a_member_commits_in_a_version_that_knows_its_epoch(self, highest: int, works: bool) -> None:
        broker = RecordsBroker(offset_commit=(2, highest))
        async with settled(broker, 0) as consumer:
            if works:
                await consumer.commit({ZERO: 1})
            else:
                with pytest.raises(KafkaError, match="UNSUPPORTED_VERSION"):
                    await consumer.commit({ZERO: 1})
        async with RecordsBroker(offset_commit=(2, highest)) as broker, member_of(broker) as consumer:
            consumer.assign([ZERO])
            await consumer.commit({ZERO: 1})

    async def test_a_commit_of_a_former_member_fails(self) -> None:
        async with RecordsBroker() as broker, member_of(broker) as consumer:
            broker.handlers[HEARTBEAT] = lambda *_: None
            consumer.subscribe([TOPIC])
            with pytest.raises(CommitFailedException, match="not a member of group g any more"):
                await consumer.commit({ZERO: 1})
            assert broker.requests_of(ApiKey.OFFSET_COMMIT) == []

    @pytest.mark.parametrize(
        ("error", "failure"),
        [
            (Errors.UNKNOWN_MEMBER_ID, CommitFailedException),
            (Errors.FENCED_INSTANCE_ID, CommitFailedException),
            (Errors.ILLEGAL_GENERATION, CommitFailedException),
            (Errors.FENCED_MEMBER_EPOCH, CommitFailedException),
            (Errors.UNKNOWN_TOPIC_OR_PARTITION, KafkaError),
            (Errors.GROUP_AUTHORIZATION_FAILED, KafkaError),
            (Errors.OFFSET_METADATA_TOO_LARGE, KafkaError),
        ],
    )
    async def test_errors_of_commits(self, error: Errors, failure: type[Exception]) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.errors[ApiKey.OFFSET_COMMIT] = [error]
            with pytest.raises(failure, match=f"{error.name}|cannot commit t-0"):
                await consumer.commit({ZERO: 1})
            assert len(broker.requests_of(ApiKey.OFFSET_COMMIT)) == 1
            await consumer.commit({ZERO: 1})

    @pytest.mark.parametrize(
        "error", [Errors.STALE_MEMBER_EPOCH, Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.NOT_COORDINATOR]
    )
    async def test_retriable_errors_are_retried(self, error: Errors) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.errors[ApiKey.OFFSET_COMMIT] = [error] * 2
            assert await took_ms(consumer.commit({ZERO: 1})) == 300
            assert [epoch for _, _, epoch, _ in broker.commits] == [1]
            broker.errors[ApiKey.OFFSET_FETCH] = [error] * 2
            assert await took_ms(consumer.committed([ZERO])) == 300

    async def test_a_fetch_of_an_unknown_member_is_retried_after_a_heartbeat(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.errors[ApiKey.OFFSET_FETCH] = [Errors.UNKNOWN_MEMBER_ID]
            assert await took_ms(consumer.committed([ZERO])) == 100
            broker.errors[ApiKey.OFFSET_FETCH] = [Errors.GROUP_AUTHORIZATION_FAILED]
            with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                await consumer.committed([ZERO])

    async def test_timeouts(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, default_api_timeout_ms=700) as consumer:
            for key in (ApiKey.OFFSET_COMMIT, ApiKey.OFFSET_FETCH):
                broker.handlers[key] = lambda *_: None
            for timeout_ms, expected in ((None, 700), (300, 300)):
                assert await took_ms(consumer.commit({ZERO: 1}, timeout_ms=timeout_ms), TimeoutException) == expected
                assert await took_ms(consumer.committed([ZERO], timeout_ms=timeout_ms), TimeoutException) == expected

    async def test_background_commits_keep_the_order_of_the_calls(self, caplog: pytest.LogCaptureFixture) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.errors[ApiKey.OFFSET_COMMIT] = [Errors.COORDINATOR_LOAD_IN_PROGRESS] * 3
            tasks = [consumer.commit_async({ZERO: number}) for number in range(3)]
            await asyncio.gather(*tasks)
            assert [offsets for _, _, _, offsets in broker.commits] == [{ZERO: number} for number in range(3)]
            broker.errors[ApiKey.OFFSET_COMMIT] = [Errors.GROUP_AUTHORIZATION_FAILED]
            failing = consumer.commit_async({ZERO: 5})
            await consumer.commit({ZERO: 6})
            assert "group g: the commit failed: GROUP_AUTHORIZATION_FAILED" in caplog.text
            with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                await failing
            consumer.commit_async({ZERO: 7})
            await consumer.commit({ZERO: 8})
            assert [offsets for _, _, _, offsets in broker.commits[-3:]] == [{ZERO: 6}, {ZERO: 7}, {ZERO: 8}]

    async def test_asyncio_does_not_warn_of_a_failed_commit(self, caplog: pytest.LogCaptureFixture) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.errors[ApiKey.OFFSET_COMMIT] = [Errors.GROUP_AUTHORIZATION_FAILED]
            consumer.commit_async({ZERO: 5})
            await quiet(1)
            gc.collect()
        assert [record.name for record in caplog.records] == ["kcoord.client.consumer.commits"]

    async def test_an_interval_of_0_leaves_time_for_other_tasks(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True, auto_commit_interval_ms=0) as consumer:
            await consumer.position(ZERO)
            count = len(broker.commits)
            await consumer.poll(10)
            assert 8 <= len(broker.commits) - count <= 12

    @pytest.mark.parametrize("closes", [True, False])
    async def test_a_member_leaves_after_its_background_commits(self, closes: bool) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            tasks = [consumer.commit_async({ZERO: number}) for number in (1, 2)]
            await (consumer.close() if closes else consumer.unsubscribe())
            assert broker.committed == {ZERO: OffsetAndMetadata(2)}
            assert [task.result() for task in tasks] == [None, None]

    async def test_close_cancels_background_commits_at_its_timeout(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0) as consumer:
            broker.handlers[ApiKey.OFFSET_COMMIT] = lambda *_: None
            task = consumer.commit_async({ZERO: 1})
            assert await took_ms(consumer.close(timeout_ms=300)) == 300
            assert task.cancelled()

    async def test_automatic_commits_keep_their_interval(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True, auto_commit_interval_ms=700) as consumer:
            started = now_ms()
            await consumer.poll(3000)
            times = [time for time, _, _, _ in broker.commits]
            assert [later - earlier for earlier, later in itertools.pairwise(times)] == [700, 700, 700]
            assert 690 <= times[0] - started <= 700
            await asyncio.sleep(2)
            assert len(broker.commits) == 4, "only a poll means that records are processed"
            await consumer.poll(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            assert len(broker.commits) == 5

    async def test_one_automatic_commit_is_in_flight(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True, auto_commit_interval_ms=100) as consumer:
            commit = broker.handlers[ApiKey.OFFSET_COMMIT]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(0.75)
                return commit(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.OFFSET_COMMIT] = slow
            await consumer.poll(3000)
            times = broker.arrivals_of(ApiKey.OFFSET_COMMIT)
            assert {later - earlier for earlier, later in itertools.pairwise(times)} <= {800, 801}

    async def test_automatic_commits_wait_for_a_member_epoch(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, enable_auto_commit=True, auto_commit_interval_ms=100) as consumer:
            await consumer.poll(250)
            usual = broker.handlers[HEARTBEAT]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(1)
                return usual(request, version)  # type: ignore[return-value]

            broker.errors[HEARTBEAT] = [Errors.FENCED_MEMBER_EPOCH]
            await poll_until(consumer, lambda: not broker.errors[HEARTBEAT])
            broker.handlers[HEARTBEAT] = slow
            count = len(broker.requests_of(ApiKey.OFFSET_COMMIT))
            await consumer.poll(900)
            assert len(broker.requests_of(ApiKey.OFFSET_COMMIT)) == count

    async def test_assigned_partitions_are_committed_too(self) -> None:
        async with (
            RecordsBroker() as broker,
            member_of(broker, enable_auto_commit=True, auto_commit_interval_ms=300) as consumer,
        ):
            consumer.assign([ZERO])
            await consumer.position(ZERO)
            await consumer.poll(1000)
            assert [(time, epoch) for time, _, epoch, _ in broker.commits] == [(300, -1), (600, -1), (900, -1)]

    async def test_nothing_is_committed_without_automatic_commits(self) -> None:
        broker = RecordsBroker()
        async with settled(broker, 0, auto_commit_interval_ms=100) as consumer:
            await consumer.poll(1000)
            broker.assigned = []
            await poll_until(consumer, lambda: not consumer.assignment)
        assert broker.commits == []

    async def test_commits_without_a_group_fail(self) -> None:
        async with (
            RecordsBroker() as broker,
            Consumer(
                bootstrap_servers=broker.address, enable_auto_commit=True, auto_commit_interval_ms=100
            ) as consumer,
        ):
            consumer.assign([ZERO])
            await consumer.poll(1000)
            with pytest.raises(IllegalStateException, match="a group_id is needed"):
                consumer.commit_async()
            with pytest.raises(IllegalStateException, match="a group_id is needed"):
                consumer.group_metadata  # noqa: B018
            assert broker.requests_of(ApiKey.OFFSET_COMMIT) == broker.requests_of(ApiKey.OFFSET_FETCH) == []
