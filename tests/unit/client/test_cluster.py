# SPDX-License-Identifier: Apache-2.0
"""The cluster on virtual time: deadlines, backoffs, the choice of connections, and when caches are dropped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Unpack

import pytest

from kcoord.client.admin.topics import delete_topics
from kcoord.client.backoff import Backoff
from kcoord.client.cluster import Cluster, CoordinatorType, Deadline, Purpose
from kcoord.client.config import AdminConfig, CommonOptions
from kcoord.client.errors import (
    DisconnectException,
    IllegalStateException,
    NoOffsetForPartitionException,
    OffsetOutOfRangeException,
    StaleMemberEpochException,
    TimeoutException,
    UnknownTopicException,
    is_retriable,
)
from kcoord.client.leaders import ask_leaders, delete_records, list_offsets
from kcoord.client.metadata import ClusterMetadata
from kcoord.client.repeat import repeat
from kcoord.client.signal import Signal, wait_for
from kcoord.client.tasks import Tasks, spawn, stop
from kcoord.client.types import Node, TopicIdPartition, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.client.fake_broker import NODE_ID, Answer, FakeBroker
from tests.unit.client.virtual_loop import now_ms, running_loop, took_ms

TOPIC_ID, OTHER_ID = b"T" * 16, b"O" * 16
ZERO, ONE = TopicPartition("t", 0), TopicPartition("t", 1)


pytestmark = pytest.mark.usefixtures("no_surprise")


@asynccontextmanager
async def cluster_of(*brokers: FakeBroker, **options: Unpack[CommonOptions]) -> AsyncIterator[Cluster]:
    settings: CommonOptions = {"bootstrap_servers": [broker.address for broker in brokers], **options}
    cluster = Cluster(AdminConfig(**settings))
    try:
        await cluster.start(cluster.deadline())
        yield cluster
    finally:
        await cluster.close()


@asynccontextmanager
async def two_brokers() -> AsyncIterator[tuple[FakeBroker, FakeBroker]]:
    """Yields two brokers of one cluster, with node ids 1 and 2."""
    first, second = FakeBroker(), FakeBroker()
    second.node_id = 2
    async with first, second:
        first.peers, second.peers = [second], [first]
        yield first, second


class TestTime:
    @pytest.mark.parametrize(
        ("failures", "random", "expected"),
        [
            (0, 0.9, 0),
            (1, 0.0, 80),
            (1, 0.5, 100),
            (2, 0.75, 220),
            (3, 0.0, 320),
            (4, 0.5, 800),
            (5, 0.5, 1000),
            (5, 0.0, 800),
            (5, 0.75, 1100),
            (10_000, 0.5, 1000),
        ],
    )
    def test_backoff_doubles_up_to_the_maximum_with_jitter(self, failures: int, random: float, expected: float) -> None:
        """The backoff doubles with each failure, up to the maximum. Then jitter changes it by up to 20 % (KIP-580)."""
        assert Backoff(100, 1000).delay_ms(failures, random) == pytest.approx(expected)

    def test_the_backoff_after_many_failures_is_finite(self) -> None:
        assert Backoff(1, 1e30).delay_ms(34, 0.5) == Backoff(1, 1e30).delay_ms(33, 0.5) == 2.0**32
        assert Backoff(1, 1e30).delay_ms(32, 0.5) == 2.0**31

    async def test_a_deadline_is_over_when_no_time_is_left(self) -> None:
        deadline = Deadline(10)
        assert deadline.timeout_ms == 10
        assert deadline.left_ms() == pytest.approx(10)
        await asyncio.sleep(0.0095)
        assert deadline.left_ms() == pytest.approx(0.5)
        assert not deadline.is_over
        await asyncio.sleep(0.0005)
        assert deadline.is_over

    async def test_backoffs_grow_but_end_at_the_deadline(self) -> None:
        times = []

        async def attempt() -> None:
            times.append(now_ms())
            raise KafkaError(Errors.NOT_COORDINATOR, "moving")

        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            text = "it: timed out after 800 ms: NOT_COORDINATOR: moving"
            with pytest.raises(TimeoutException, match=text) as failure:
                await cluster.retry("it", cluster.deadline(800), attempt)
            assert times == [0, 100, 300, 700, 800]
            assert isinstance(failure.value.__cause__, KafkaError)
            assert await took_ms(cluster.sleep_backoff(2)) == 200
            assert await took_ms(cluster.sleep_backoff(2, cluster.deadline(150))) == 150
            assert await took_ms(cluster.sleep_backoff(2, cluster.deadline(-5))) == 0

    async def test_the_deadline_cancels_a_running_attempt(self) -> None:
        attempts = 0

        async def attempt() -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 1:
                raise DisconnectException("first")
            await asyncio.get_running_loop().create_future()

        async with FakeBroker() as broker, cluster_of(broker, default_api_timeout_ms=1500) as cluster:
            before = now_ms()
            with pytest.raises(TimeoutException, match="timed out after 1500 ms: NETWORK_EXCEPTION: first"):
                await cluster.retry("it", cluster.deadline(), attempt)
            assert (now_ms() - before, attempts) == (1500, 2)
            with pytest.raises(TimeoutException, match="timed out after 20 ms: REQUEST_TIMED_OUT: no response"):
                await cluster.retry("it", cluster.deadline(20), attempt)

    @pytest.mark.parametrize("error", [KafkaError(Errors.INVALID_REQUEST), UnknownTopicException("t")])
    async def test_an_error_that_is_not_retriable_is_raised_at_once(self, error: KafkaError) -> None:
        async def attempt() -> None:
            raise error

        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            with pytest.raises(KafkaError) as failure:
                await cluster.retry("it", cluster.deadline(), attempt)
            assert failure.value is error

    async def test_a_closed_client_does_not_retry(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: None}) as broker, cluster_of(broker) as cluster:

            async def attempt() -> HeartbeatResponse:
                return await cluster.call_any(HeartbeatRequest(), HeartbeatResponse)

            call = asyncio.create_task(cluster.retry("it", cluster.deadline(), attempt))
            await asyncio.sleep(1)
            await cluster.close()
            assert await took_ms(call, DisconnectException) == 0

    def test_retriable_errors(self) -> None:
        passing = [KafkaError(Errors.NOT_COORDINATOR), StaleMemberEpochException("m"), DisconnectException("d")]
        assert [is_retriable(error) for error in passing] == [True] * 3
        assert not is_retriable(KafkaError(Errors.STALE_MEMBER_EPOCH))
        assert is_retriable(KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION))
        unknown = UnknownTopicException("t")
        assert (unknown.error, is_retriable(unknown)) == (Errors.UNKNOWN_TOPIC_OR_PARTITION, False)
        assert StaleMemberEpochException("m").error is Errors.STALE_MEMBER_EPOCH

    def test_texts_of_errors(self) -> None:
        assert str(NoOffsetForPartitionException([ONE, ZERO])).endswith("no reset policy for t-0, t-1")
        assert str(OffsetOutOfRangeException({ONE: 5, ZERO: 7})).endswith("no reset policy: t-0 at 7, t-1 at 5")


class TestSignal:
    async def test_a_ticket_is_set_by_the_next_notification(self) -> None:
        signal = Signal()
        ticket = signal.ticket()
        assert signal.ticket() is ticket
        signal.notify()
        assert ticket.is_set() and not signal.ticket().is_set()
        assert await took_ms(wait_for(ticket, None)) == 0

    @pytest.mark.parametrize(("timeout_ms", "waited_ms"), [(250, 250), (0, 0), (-1, 0), (0.5, 0.5)])
    async def test_a_wait_ends_at_its_timeout(self, timeout_ms: float, waited_ms: float) -> None:
        before = now_ms()
        assert not await wait_for(Signal().ticket(), timeout_ms)
        assert now_ms() - before == waited_ms

    @pytest.mark.parametrize("timeout_ms", [None, 11, 0, -1])
    async def test_a_notification_ends_a_wait(self, timeout_ms: float | None) -> None:
        signal = Signal()
        loop = asyncio.get_running_loop()
        if timeout_ms is not None and timeout_ms <= 0:
            # Other tasks run even if the timeout is 0.
            loop.call_soon(signal.notify)
        else:
            loop.call_later(0.01, signal.notify)
        assert await wait_for(signal.ticket(), timeout_ms)


class TestTasks:
    async def test_only_failures_are_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        async def fails() -> None:
            raise ValueError("by design")

        async def ends() -> None:
            pass

        async def stays() -> None:
            await asyncio.sleep(1000)

        failing, ending, staying = (spawn(work(), work.__name__) for work in (fails, ends, stays))
        await asyncio.sleep(1)
        await stop([staying, None])
        assert staying.done() and ending.done()
        assert [record.getMessage() for record in caplog.records] == ["the task fails failed"]
        assert caplog.records[0].levelno == logging.ERROR
        with pytest.raises(ValueError, match="by design"):
            await failing

    async def test_ended_tasks_are_removed(self) -> None:
        tasks = Tasks()
        for seconds in (1, 3):
            tasks.add(spawn(asyncio.sleep(seconds), "sleep"))
        await asyncio.sleep(2)
        assert len(tasks) == 1
        assert await took_ms(tasks.stop()) == 0
        assert len(tasks) == 0

    async def test_stop_waits_until_the_tasks_have_ended(self) -> None:
        async def slow_to_end() -> None:
            try:
                await asyncio.sleep(1000)
            finally:
                await asyncio.sleep(0.2)

        task = spawn(slow_to_end(), "slow")
        await asyncio.sleep(0)
        assert await took_ms(stop([task])) == 200
        assert task.done()


class TestConnections:
    async def test_close_closes_all_connections_and_tasks(self) -> None:
        async with FakeBroker() as broker:
            async with cluster_of(broker, metadata_max_age_ms=1000) as cluster:
                cluster.keep_metadata_fresh()
                opened = [await cluster.any_connection(), await cluster.connection(1)]
                assert len(set(map(id, opened))) == 2
            assert all(connection.is_closed for connection in opened)
            assert running_loop().connections == set()
            asked = len(broker.requests)
            await asyncio.sleep(5)
            assert len(broker.requests) == asked
            for call in (cluster.connection(1), cluster.connection(99), cluster.any_connection()):
                with pytest.raises(IllegalStateException, match="the client is closed"):
                    await call
            assert await took_ms(cluster.start(cluster.deadline()), IllegalStateException) == 0

    async def test_a_connection_that_opens_during_close_is_closed(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            versions = broker.handlers[ApiKey.API_VERSIONS]

            async def slow(request: Message, version: int) -> Answer:
                await asyncio.sleep(1)
                return versions(request, version)  # type: ignore[return-value]

            broker.handlers[ApiKey.API_VERSIONS] = slow
            connecting = asyncio.create_task(cluster.connection(1))
            await asyncio.sleep(0.5)
            await cluster.close()
            with pytest.raises(IllegalStateException, match="the client is closed"):
                await connecting
            assert running_loop().connections == set()

    async def test_no_connection_is_opened_after_close_during_a_backoff(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, reconnect_backoff_ms=1000) as cluster:
            await broker.__aexit__()
            with pytest.raises(DisconnectException):
                await cluster.connection(1)
            await broker.open()
            connecting = asyncio.create_task(cluster.connection(1))
            await asyncio.sleep(0.5)
            await cluster.close()
            asked = len(broker.requests)
            with pytest.raises(IllegalStateException, match="the client is closed"):
                await connecting
            assert len(broker.requests) == asked

    async def test_connection_attempts_to_a_broker_that_is_down_back_off(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            await broker.__aexit__()
            waits = [await took_ms(cluster.connection(1), DisconnectException) for _ in range(7)]
            assert waits == [0, 50, 100, 200, 400, 800, 1000]
            await broker.open()
            assert await took_ms(cluster.connection(1)) == 1000
            broker.hang_up()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert await took_ms(cluster.connection(1)) == 0

    async def test_a_connection_to_an_unknown_broker_fails(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            with pytest.raises(DisconnectException, match="broker 7 is not in the metadata"):
                await cluster.connection(7)

    async def test_a_connection_setup_without_an_answer_times_out(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, socket_connection_setup_timeout_ms=3000) as cluster:
            running_loop().silent.add(("127.0.0.1", broker.port))
            assert await took_ms(cluster.connection(1), TimeoutException) == 3000

    async def test_requests_use_the_least_busy_connection(self) -> None:
        """Only connections for requests are used: those of other purposes may be busy for a long time."""
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            for broker in (first, second):
                broker.handlers[ApiKey.HEARTBEAT] = lambda *_: None
            await cluster.connection(1, Purpose.FETCHES)
            near, far = await cluster.connection(1), await cluster.connection(2)
            calls = [asyncio.create_task(near.call(HeartbeatRequest(), HeartbeatResponse)) for _ in range(2)]
            calls.append(asyncio.create_task(far.call(HeartbeatRequest(), HeartbeatResponse)))
            await asyncio.sleep(1)
            assert await cluster.any_connection() is far
            second.hang_up()
            await asyncio.sleep(1)
            assert await cluster.any_connection() is near
            for call in calls:
                call.cancel()

    async def test_requests_use_the_bootstrap_connection_until_there_is_another(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            bootstrap = await cluster.any_connection()
            await cluster.connection(1, Purpose.COORDINATOR)
            assert await cluster.any_connection() is bootstrap
            better = await cluster.connection(1)
            assert await cluster.any_connection() is better

    async def test_without_a_connection_a_known_broker_is_used(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            await first.__aexit__()
            await asyncio.sleep(1)
            connection = await cluster.any_connection()
            assert connection is await cluster.connection(2)
            assert second.requests

    async def test_known_brokers_are_tried_in_random_order(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            first.hang_up()
            await asyncio.sleep(1)
            # Middle.shuffle reverses the order.
            assert await cluster.any_connection() is await cluster.connection(2)
        async with two_brokers() as (first, second), cluster_of(first, second):
            assert (bool(first.requests), bool(second.requests)) == (False, True)

    async def test_an_error_of_a_known_broker_is_raised_at_once(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.hang_up()
            await asyncio.sleep(1)
            broker.handlers[ApiKey.API_VERSIONS] = lambda *_: ApiVersionsResponse(
                error_code=Errors.CLUSTER_AUTHORIZATION_FAILED
            )
            with pytest.raises(KafkaError, match=r"CLUSTER_AUTHORIZATION_FAILED.*rejected ApiVersions"):
                await cluster.any_connection()
            assert running_loop().connections == set()

    async def test_the_bootstrap_list_is_used_if_no_known_broker_can_be_reached(self) -> None:
        async with two_brokers() as (first, second), FakeBroker() as front:
            # The bootstrap address is not the address of a broker, for example because it is a load balancer.
            front.handlers[ApiKey.METADATA] = first.handlers[ApiKey.METADATA]
            async with cluster_of(front) as cluster:
                for broker in (first, second, front):
                    await broker.__aexit__()
                await front.open()
                await asyncio.sleep(1)
                asked = len(front.requests)
                await cluster.any_connection()
                assert len(front.requests) == asked + 1

    async def test_concurrent_calls_share_one_bootstrap_connection(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first, second) as cluster:
            for broker in (first, second):
                await broker.__aexit__()
            await asyncio.sleep(1)
            with pytest.raises(DisconnectException, match=f"127.0.0.1:{first.port}"):
                await cluster.any_connection()
            moved = FakeBroker()
            moved.port = first.port
            async with moved:
                cluster.metadata.brokers.clear()
                connections = await asyncio.gather(cluster.any_connection(), cluster.any_connection())
                assert connections[0] is connections[1]
                assert len(moved.requests) == 1

    async def test_a_rebootstrap_drops_brokers_connections_and_coordinators(self) -> None:
        async with two_brokers() as (first, _second), cluster_of(first) as cluster:
            bootstrap = await cluster.any_connection()
            await cluster.coordinator(CoordinatorType.GROUP, "g")
            opened = [bootstrap, await cluster.connection(1)]
            first.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(error_code=Errors.REBOOTSTRAP_REQUIRED)
            with pytest.raises(DisconnectException, match="bootstrap again"):
                await cluster.refresh_metadata(())
            assert all(connection.is_closed for connection in opened)
            assert (cluster.metadata.brokers, cluster.metadata.cluster_id) == ({}, None)
            assert cluster.metadata.controller_id == -1
            with pytest.raises(DisconnectException, match="broker 1 is not in the metadata"):
                await cluster.connection(1)
            assert len(first.requests_of(ApiKey.FIND_COORDINATOR)) == 1
            await cluster.find_coordinators(CoordinatorType.GROUP, ["g"])
            assert len(first.requests_of(ApiKey.FIND_COORDINATOR)) == 2

    async def test_a_rebootstrap_resets_the_backoffs_of_brokers(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, reconnect_backoff_ms=500) as cluster:
            changed = KafkaError(Errors.REBOOTSTRAP_REQUIRED)
            broker.handlers[ApiKey.API_VERSIONS] = lambda *_: ApiVersionsResponse(error_code=changed.error)
            with pytest.raises(DisconnectException, match="bootstrap again"):
                await cluster.connection(1)
            del broker.handlers[ApiKey.API_VERSIONS]
            fresh = FakeBroker()
            fresh.port = broker.port
            await broker.__aexit__()
            async with fresh:
                await cluster.refresh_metadata(())
                assert await took_ms(cluster.connection(1)) == 0

    async def test_requests_name_the_expected_broker_and_cluster(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(
                brokers=[MetadataResponse.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=broker.port)]
            )
            await cluster.refresh_metadata(())
            await cluster.connection(1)
            _first, second = broker.requests_of(ApiKey.API_VERSIONS)
            assert isinstance(second, ApiVersionsRequest)
            assert (second.cluster_id, second.node_id) == (None, -1), "a cluster without an id cannot be compared"


class TestController:
    REQUEST = DeleteTopicsRequest(topics=[])

    async def test_the_controller_is_looked_up_again_after_a_failure(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            second.handlers[ApiKey.DELETE_TOPICS] = first.handlers[ApiKey.DELETE_TOPICS] = lambda *_: (
                DeleteTopicsResponse()
            )
            await cluster.call_controller(self.REQUEST, DeleteTopicsResponse)
            asked = len(first.requests_of(ApiKey.METADATA))
            await cluster.call_controller(self.REQUEST, DeleteTopicsResponse)
            assert len(first.requests_of(ApiKey.METADATA)) == asked == 1
            second.handlers[ApiKey.METADATA] = first.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(
                brokers=[
                    MetadataResponse.MetadataResponseBroker(node_id=broker.node_id, host="127.0.0.1", port=broker.port)
                    for broker in (first, second)
                ],
                controller_id=2,
            )
            first.handlers[ApiKey.DELETE_TOPICS] = lambda *_: first.hang_up()
            with pytest.raises(DisconnectException):
                await cluster.call_controller(self.REQUEST, DeleteTopicsResponse)
            await cluster.call_controller(self.REQUEST, DeleteTopicsResponse)
            assert len(second.requests_of(ApiKey.DELETE_TOPICS)) == 1

    async def test_the_controller_is_looked_up_again_if_a_result_says_so(self) -> None:
        """Brokers with ZooKeeper return NOT_CONTROLLER for each topic, and not for the whole request."""
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            for broker, error in ((first, Errors.NOT_CONTROLLER), (second, Errors.NONE)):
                result = DeleteTopicsResponse.DeletableTopicResult(name="t", error_code=error)
                broker.handlers[ApiKey.DELETE_TOPICS] = lambda *_, result=result: DeleteTopicsResponse(
                    responses=[result]
                )
            await cluster.refresh_metadata(())
            first.handlers[ApiKey.METADATA] = second.handlers[ApiKey.METADATA]
            assert await delete_topics(cluster, cluster.deadline(1000), ["t"]) == {"t": None}
            assert len(first.requests_of(ApiKey.DELETE_TOPICS)) == 1

    async def test_a_call_without_a_controller_fails(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(controller_id=-1)
            cluster.forget_controller()
            with pytest.raises(KafkaError, match=r"NOT_CONTROLLER: the metadata names no controller"):
                await cluster.call_controller(self.REQUEST, DeleteTopicsResponse)


class TestCoordinators:
    async def test_coordinators_are_cached_and_looked_up_together(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            node = Node(NODE_ID, "127.0.0.1", broker.port)
            await cluster.find_coordinators(CoordinatorType.GROUP, ["a", "b"])
            coordinators = await cluster.find_coordinators(CoordinatorType.GROUP, ["c", "a"])
            await cluster.find_coordinators(CoordinatorType.TRANSACTION, ["a"])
            assert coordinators == {"a": node, "c": node}
            requests = broker.requests_of(ApiKey.FIND_COORDINATOR)
            asked = [(request.key_type, request.coordinator_keys) for request in requests]  # type: ignore[attr-defined]
            assert asked == [(0, ["a", "b"]), (0, ["c"]), (1, ["a"])]

    @pytest.mark.parametrize(("highest", "requests"), [(3, 2), (4, 1)])
    async def test_before_version_4_a_lookup_has_one_key(self, highest: int, requests: int) -> None:
        async with FakeBroker(find_coordinator=(0, highest)) as broker, cluster_of(broker) as cluster:
            coordinators = await cluster.find_coordinators(CoordinatorType.GROUP, ["a", "b"])
            assert [node.node_id for node in coordinators.values() if isinstance(node, Node)] == [1, 1]
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == requests

    @pytest.mark.parametrize("highest", [3, 4])
    async def test_a_lookup_can_fail_for_single_keys(self, highest: int) -> None:
        def find(request: Message, version: int) -> Answer:
            if version < 4:
                return FindCoordinatorResponse(error_code=Errors.COORDINATOR_NOT_AVAILABLE, error_message="later")
            coordinator = FindCoordinatorResponse.Coordinator
            return FindCoordinatorResponse(
                coordinators=[coordinator(key="a", error_code=Errors.COORDINATOR_NOT_AVAILABLE, error_message="later")]
            )

        broker = FakeBroker({ApiKey.FIND_COORDINATOR: find}, find_coordinator=(0, highest))
        async with broker, cluster_of(broker) as cluster:
            coordinators = await cluster.find_coordinators(CoordinatorType.GROUP, ["a", "b"])
            assert str(coordinators["a"]) == "COORDINATOR_NOT_AVAILABLE: later"
            assert (
                isinstance(coordinators["b"], KafkaError)
                and coordinators["b"].error is Errors.COORDINATOR_NOT_AVAILABLE
            )

    async def test_a_coordinator_that_cannot_be_reached_is_looked_up_again(self) -> None:
        async with two_brokers() as (first, _second), cluster_of(first) as cluster:
            node = FindCoordinatorResponse.Coordinator(key="g", node_id=9, host="127.0.0.1", port=1)
            usual = first.handlers[ApiKey.FIND_COORDINATOR]
            first.handlers[ApiKey.FIND_COORDINATOR] = lambda *_: FindCoordinatorResponse(coordinators=[node])
            with pytest.raises(DisconnectException, match=r"127\.0\.0\.1:1"):
                await cluster.coordinator(CoordinatorType.GROUP, "g")
            first.handlers[ApiKey.FIND_COORDINATOR] = usual
            await cluster.coordinator(CoordinatorType.GROUP, "g")

    async def test_a_coordinator_that_metadata_does_not_have_can_be_reached(self) -> None:
        async with two_brokers() as (first, second):
            second.peers = first.peers = []
            async with cluster_of(first) as cluster:
                nodes = {"g": (2, second.port), "h": (1, first.port)}
                first.handlers[ApiKey.FIND_COORDINATOR] = lambda request, _: FindCoordinatorResponse(
                    coordinators=[
                        FindCoordinatorResponse.Coordinator(
                            key=key, node_id=nodes[key][0], host="127.0.0.1", port=nodes[key][1]
                        )
                        for key in request.coordinator_keys  # type: ignore[attr-defined]
                    ]
                )
                await cluster.find_coordinators(CoordinatorType.GROUP, ["h", "g"])
                await cluster.coordinator(CoordinatorType.GROUP, "g")
                assert second.requests_of(ApiKey.API_VERSIONS)

    async def test_a_coordinator_that_has_moved_is_reached_before_the_next_metadata(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster, FakeBroker() as moved:
            cluster.metadata.brokers[2] = Node(2, "127.0.0.1", second.port, "rack")
            moved.node_id = 2
            first.handlers[ApiKey.FIND_COORDINATOR] = moved.handlers[ApiKey.FIND_COORDINATOR]
            await cluster.coordinator(CoordinatorType.GROUP, "g")
            assert moved.requests_of(ApiKey.API_VERSIONS)
            assert cluster.metadata.brokers[2] == Node(2, "127.0.0.1", moved.port, "rack")

    @pytest.mark.parametrize(
        ("answer", "lookups"),
        [
            (None, 2),
            (Errors.NOT_COORDINATOR, 2),
            (Errors.COORDINATOR_NOT_AVAILABLE, 2),
            (Errors.COORDINATOR_LOAD_IN_PROGRESS, 1),
        ],
    )
    async def test_failures_that_make_the_client_look_a_coordinator_up_again(
        self, answer: Errors | None, lookups: int
    ) -> None:
        def delete(request: Message, version: int) -> Answer:
            if answer is None:
                broker.hang_up()
                return None
            result = DeleteGroupsResponse.DeletableGroupResult
            return DeleteGroupsResponse(
                results=[result(group_id="f"), result(group_id="g", error_code=answer), result(group_id="h")]
            )

        async with FakeBroker({ApiKey.DELETE_GROUPS: delete}) as broker, cluster_of(broker) as cluster:
            with pytest.raises(KafkaError) as failure:
                await self.call(cluster)
            assert failure.value.error is (answer or Errors.NETWORK_EXCEPTION)
            await cluster.coordinator(CoordinatorType.GROUP, "g")
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == lookups

    async def test_other_errors_stay_in_the_response(self) -> None:
        result = DeleteGroupsResponse.DeletableGroupResult(group_id="g", error_code=Errors.NON_EMPTY_GROUP)
        handlers = {ApiKey.DELETE_GROUPS: lambda *_: DeleteGroupsResponse(results=[result])}
        async with FakeBroker(handlers) as broker, cluster_of(broker) as cluster:
            assert (await self.call(cluster)).results == [result]
            broker.versions = {ApiKey.DELETE_GROUPS: (9, 9)}
            broker.hang_up()
            await asyncio.sleep(1)
            with pytest.raises(KafkaError, match="UNSUPPORTED_VERSION"):
                await self.call(cluster)
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 1, "another coordinator has the same versions"

    @staticmethod
    async def call(cluster: Cluster) -> DeleteGroupsResponse:
        return await cluster.call_coordinator(
            CoordinatorType.GROUP,
            "g",
            DeleteGroupsRequest(groups_names=["g"]),
            DeleteGroupsResponse,
            lambda answer: [result.error_code for result in answer.results],
        )


class TestMetadata:
    async def test_metadata_is_refreshed_periodically(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, metadata_max_age_ms=700) as cluster:
            for name in ("t", "u"):
                broker.add_topic(name, name.encode() * 16, [-1])
            await cluster.refresh_metadata(["t"])
            before = now_ms()
            cluster.keep_metadata_fresh()
            metadata = broker.handlers[ApiKey.METADATA]
            broker.handlers[ApiKey.METADATA] = lambda *_: MetadataResponse(error_code=Errors.UNKNOWN_SERVER_ERROR)
            await asyncio.sleep(1)
            broker.handlers[ApiKey.METADATA] = metadata
            broker.add_topic("t", TOPIC_ID, [-1, -1])
            await asyncio.sleep(1.2)
            assert len(cluster.metadata.topics["t"].partitions) == 2
            assert "u" not in cluster.metadata.topics
            assert [time - before for time in broker.arrivals_of(ApiKey.METADATA)[2:]] == [700, 1400, 2100]

    async def test_an_age_of_0_leaves_time_for_other_tasks(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, metadata_max_age_ms=0) as cluster:
            cluster.keep_metadata_fresh()
            await asyncio.sleep(0.01)
            assert 9 <= len(broker.requests_of(ApiKey.METADATA)) <= 12

    async def test_metadata_requests(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            topic = MetadataRequest.MetadataRequestTopic
            await cluster.refresh_metadata(["b", "a", "b"], allow_auto_topic_creation=True)
            await cluster.refresh_metadata(None)
            await cluster.refresh_topic_ids([OTHER_ID, TOPIC_ID, OTHER_ID])
            assert broker.requests_of(ApiKey.METADATA) == [
                MetadataRequest(topics=[], allow_auto_topic_creation=False),
                MetadataRequest(topics=[topic(name="a"), topic(name="b")], allow_auto_topic_creation=True),
                MetadataRequest(topics=None, allow_auto_topic_creation=False),
                MetadataRequest(
                    topics=[topic(name=None, topic_id=OTHER_ID), topic(name=None, topic_id=TOPIC_ID)],
                    allow_auto_topic_creation=False,
                ),
            ]

    async def test_the_periodic_refresh_does_not_ask_for_deleted_topics_for_ever(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker, metadata_max_age_ms=700) as cluster:
            broker.add_topic("t", TOPIC_ID, [5])
            broker.add_topic("u", OTHER_ID, [5])
            await cluster.refresh_metadata(["t", "u"])
            cluster.keep_metadata_fresh()
            del broker.topics[0]
            await asyncio.sleep(1.5)
            asked = [
                [topic.name for topic in request.topics or ()]
                for request in broker.requests_of(ApiKey.METADATA)
                if isinstance(request, MetadataRequest)
            ]
            assert asked[-2:] == [["t", "u"], ["u"]]
            assert cluster.metadata.names_by_id == {OTHER_ID: "u"}

    async def test_a_response_about_other_topics_removes_no_topics(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.add_topic("t", TOPIC_ID, [5])
            broker.add_topic("u", OTHER_ID, [5])
            await cluster.refresh_metadata(["t", "u"])
            del broker.topics[0]
            await cluster.refresh_metadata(["u"])
            assert sorted(cluster.metadata.topics) == ["t", "u"]
            await cluster.refresh_metadata(None)
            assert sorted(cluster.metadata.topics) == ["u"]
            assert cluster.metadata.names_by_id == {OTHER_ID: "u"}

    def test_responses_are_merged(self) -> None:
        """The metadata has the last response about each topic, by name and by id."""
        topic, partition = MetadataResponse.MetadataResponseTopic, MetadataResponse.MetadataResponsePartition
        metadata = ClusterMetadata()
        node = MetadataResponse.MetadataResponseBroker(node_id=3, host="h", port=9, rack="r")
        first = partition(partition_index=1, leader_id=0, leader_epoch=7, creation_time_ms=77)
        none = partition(partition_index=0, leader_id=-1, leader_epoch=8, creation_time_ms=-1)
        metadata.merge(
            MetadataResponse(
                brokers=[node],
                controller_id=3,
                cluster_id="c",
                topics=[
                    topic(name="t", topic_id=TOPIC_ID, partitions=[first, none]),
                    topic(name="old", partitions=[first]),
                ],
            )
        )
        assert metadata.brokers == {3: Node(3, "h", 9, "r")}
        assert (metadata.cluster_id, metadata.controller_id) == ("c", 3)
        assert [metadata.leader(key) for key in (ONE, ZERO, TopicPartition("t", 2))] == [0, None, None]
        assert [metadata.leader_epoch(key) for key in (ONE, ZERO, TopicPartition("x", 0))] == [7, 8, -1]
        assert [metadata.topic_id(name) for name in ("t", "old", "x")] == [TOPIC_ID, ZERO_UUID, ZERO_UUID]
        times = [(TOPIC_ID, 1), (TOPIC_ID, 0), (TOPIC_ID, 2), (OTHER_ID, 0)]
        assert [metadata.creation_time_ms(TopicIdPartition(*key)) for key in times] == [77, -1, None, None]
        assert metadata.names_by_id == {TOPIC_ID: "t"}, "a topic without an id has none"

        # An error drops the metadata of a topic until the next response.
        dropped = metadata.topics.pop("t")
        assert metadata.creation_time_ms(TopicIdPartition(TOPIC_ID, 1)) is None
        metadata.topics["t"] = dropped

        # A response without brokers keeps the brokers. A topic that was deleted and created again has another id.
        metadata.merge(
            MetadataResponse(cluster_id="c", topics=[topic(name="t", topic_id=OTHER_ID, partitions=[first])])
        )
        assert metadata.brokers == {3: Node(3, "h", 9, "r")}
        assert metadata.names_by_id == {OTHER_ID: "t"}
        assert metadata.creation_time_ms(TopicIdPartition(TOPIC_ID, 1)) is None

        # If the request names a deleted topic by id, the response has no name for it.
        gone = topic(name=None, topic_id=OTHER_ID, error_code=Errors.UNKNOWN_TOPIC_ID)
        nobody = topic(name=None, topic_id=b"X" * 16, error_code=Errors.UNKNOWN_TOPIC_ID)
        metadata.merge(MetadataResponse(cluster_id="c", topics=[gone, nobody]))
        assert sorted(metadata.topics) == ["old"]
        assert metadata.names_by_id == {}
        assert metadata.topic_error("t") is Errors.UNKNOWN_TOPIC_OR_PARTITION


class TestLeaders:
    """`ask_leaders` makes one attempt. The next attempt uses the metadata of this one."""

    @staticmethod
    def offsets_by(broker: FakeBroker, codes: dict[int, Errors]) -> None:
        def answer(request: Message, version: int) -> Answer:
            assert isinstance(request, ListOffsetsRequest)
            result = ListOffsetsResponse.ListOffsetsPartitionResponse
            return ListOffsetsResponse(
                topics=[
                    ListOffsetsResponse.ListOffsetsTopicResponse(
                        name=topic.name,
                        partitions=[
                            result(
                                partition_index=partition.partition_index,
                                offset=broker.node_id,
                                error_code=codes.get(partition.partition_index, Errors.NONE),
                            )
                            for partition in topic.partitions
                        ],
                    )
                    for topic in request.topics
                ]
            )

        broker.handlers[ApiKey.LIST_OFFSETS] = answer

    async def test_each_leader_gets_a_request_for_its_partitions(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            first.add_topic("t", TOPIC_ID, [-1, -1, -1])
            first.topics[0].partitions[1].leader_id = 2
            for broker in (first, second):
                self.offsets_by(broker, {})
            two = TopicPartition("t", 2)
            attempt = list_offsets(cluster, cluster.deadline(), dict.fromkeys((ZERO, ONE, two), -1))
            outcomes = await attempt([ZERO, ONE, two])
            assert {
                key: outcome.offset for key, outcome in outcomes.items() if not isinstance(outcome, KafkaError)
            } == {
                ZERO: 1,
                ONE: 2,
                two: 1,
            }
            assert len(first.requests_of(ApiKey.METADATA)) == 2

    @pytest.mark.parametrize(
        ("error", "is_asked_again"), [(Errors.NOT_LEADER_OR_FOLLOWER, True), (Errors.TOPIC_AUTHORIZATION_FAILED, False)]
    )
    async def test_an_outdated_leader_is_looked_up_again(self, error: Errors, is_asked_again: bool) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.add_topic("t", TOPIC_ID, [-1, -1])
            self.offsets_by(broker, {1: error})
            attempt = list_offsets(cluster, cluster.deadline(), {ZERO: -1, ONE: -1})
            outcomes = await attempt([ZERO, ONE])
            assert [isinstance(outcomes[key], KafkaError) for key in (ZERO, ONE)] == [False, True]
            asked = len(broker.requests_of(ApiKey.METADATA))
            await attempt([ONE])
            assert (len(broker.requests_of(ApiKey.METADATA)) > asked) is is_asked_again

    async def test_a_leader_that_is_down_fails_only_its_partitions(self) -> None:
        async with two_brokers() as (first, second), cluster_of(first) as cluster:
            first.add_topic("t", TOPIC_ID, [-1, -1])
            first.topics[0].partitions[1].leader_id = 2
            self.offsets_by(first, {})
            await second.__aexit__()
            outcomes = await list_offsets(cluster, cluster.deadline(), {ZERO: -1, ONE: -1})([ZERO, ONE])
            assert not isinstance(outcomes[ZERO], KafkaError)
            assert isinstance(outcomes[ONE], DisconnectException)

    async def test_errors_of_partitions_without_a_leader(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.add_topic("t", TOPIC_ID, [-1])
            broker.topics[0].partitions[0].leader_id = -1
            broker.add_topic("u", OTHER_ID, [])
            broker.topics[1].error_code = Errors.INVALID_TOPIC_EXCEPTION
            broker.add_topic("v", b"V" * 16, [])

            async def nobody(*_: object) -> dict[TopicPartition, int]:
                raise AssertionError

            partitions = [ZERO, ONE, *(TopicPartition(name, 0) for name in "uvw")]
            outcomes = await ask_leaders(cluster, partitions, nobody)
            assert {key: outcome.error for key, outcome in outcomes.items() if isinstance(outcome, KafkaError)} == {
                ZERO: Errors.LEADER_NOT_AVAILABLE,
                ONE: Errors.UNKNOWN_TOPIC_OR_PARTITION,
                TopicPartition("u", 0): Errors.INVALID_TOPIC_EXCEPTION,
                TopicPartition("v", 0): Errors.UNKNOWN_TOPIC_OR_PARTITION,
                TopicPartition("w", 0): Errors.UNKNOWN_TOPIC_OR_PARTITION,
            }

    @pytest.mark.parametrize(("timeout_ms", "told_ms"), [(2500, 2500), (0, 1), (0.5, 1)])
    async def test_requests_have_the_time_left(self, timeout_ms: float, told_ms: int) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            broker.add_topic("t", TOPIC_ID, [-1])
            self.offsets_by(broker, {})
            broker.handlers[ApiKey.DELETE_RECORDS] = lambda *_: None
            await cluster.refresh_metadata(["t"])
            await list_offsets(cluster, cluster.deadline(timeout_ms), {ZERO: -1})([ZERO])
            asyncio.get_running_loop().call_later(1, broker.hang_up)
            await delete_records(cluster, cluster.deadline(timeout_ms), {ZERO: 1})([ZERO])
            for key in (ApiKey.LIST_OFFSETS, ApiKey.DELETE_RECORDS):
                assert [request.timeout_ms for request in broker.requests_of(key)] == [told_ms]  # type: ignore[attr-defined]

    async def test_special_timestamps_need_the_version_of_the_newest(self) -> None:
        async with FakeBroker(list_offsets=(0, 7)) as broker, cluster_of(broker) as cluster:
            broker.add_topic("t", TOPIC_ID, [-1, -1])
            self.offsets_by(broker, {})
            outcomes = await list_offsets(cluster, cluster.deadline(), {ZERO: -4, ONE: -1})([ZERO, ONE])
            assert all(isinstance(outcome, KafkaError) for outcome in outcomes.values())


class TestRepeat:
    async def test_keys_with_retriable_errors_are_repeated_after_a_backoff(self) -> None:
        asked: list[tuple[float, list[str]]] = []
        script: dict[str, list[object]] = {
            "a": [1],
            "b": [KafkaError(Errors.NOT_LEADER_OR_FOLLOWER)] * 3 + [2],
            "c": [KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)],
            "d": [KafkaError(Errors.UNSTABLE_OFFSET_COMMIT), 4],
        }

        async def attempt(keys: list[str]) -> dict[str, object]:
            asked.append((now_ms(), keys))
            return {key: script[key].pop(0) for key in reversed(keys)}

        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            outcomes = await repeat(cluster, cluster.deadline(), ["d", "c", "b", "a", "b"], attempt)
        assert asked == [(0, ["d", "c", "b", "a"]), (100, ["d", "b"]), (300, ["b"]), (700, ["b"])]
        assert list(outcomes) == ["d", "c", "b", "a"]
        assert [outcomes[key] for key in "abd"] == [1, 2, 4]
        assert isinstance(outcomes["c"], KafkaError)

    async def test_the_deadline_leaves_the_last_outcomes(self) -> None:
        async def attempt(keys: list[str]) -> dict[str, int | KafkaError]:
            return {"a": 1} | {"b": KafkaError(Errors.NOT_COORDINATOR, f"{now_ms():g}")}

        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            outcomes = await repeat(cluster, cluster.deadline(750), ["a", "b"], attempt)
            assert (now_ms(), outcomes["a"], str(outcomes["b"])) == (750, 1, "NOT_COORDINATOR: 700")
