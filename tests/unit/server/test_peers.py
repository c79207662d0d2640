# SPDX-License-Identifier: Apache-2.0
"""The links between workers: requests over their sockets, and followers of the metadata log."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.topics import auto_create_request
from kcoord.runtime.result import NO_CREATION_LIMIT, CoordinatorResult
from kcoord.server.api.auto_create import CREATE_TOPICS_VERSION
from kcoord.server.api.handlers.allocate_producer_ids import allocate
from kcoord.server.disk.shard_logs import LocalShardLog, ShardLogs
from kcoord.server.environment import RandomUuids
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards import metadata_service
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import METADATA_SHARD, MetadataService, new_metadata_shards
from kcoord.server.shards.remote_transactions import in_transaction
from kcoord.server.shards.shard_service import Pump
from kcoord.server.workers import controller_metadata
from kcoord.server.workers.controller_metadata import ControllerMetadataService
from kcoord.server.workers.metadata_follower import MetadataFollower, OutOfStep
from kcoord.server.workers.peer_frames import FrameKind, PeerRequest, decode_offset, encode_offset, kind_of
from kcoord.server.workers.peer_link import Peers
from kcoord.server.workers.peer_listener import PeerListener
from kcoord.storage.log import Log
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.segment import LogConfig
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AllocateProducerIdsRequest,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteAclsRequest,
    Message,
)
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of
from tests.unit.server.harness import Harness

CONTROLLER_ID = 1
NOW_MS = 1_700_000_000_000


def no_groups() -> GroupTimes:
    return GroupTimes(lambda: -1, lambda: False)


class Controller:
    """The worker that writes the metadata log, with files in memory, and its socket."""

    def __init__(self, path: Path, times: GroupTimes | None = None, worker_ids: Sequence[int] = ()) -> None:
        self.path = str(path / "controller")
        self.file_system = MemoryFileSystem()
        self.images: list[MetadataImage] = []
        config = BrokerConfig.from_properties({})
        shards = new_metadata_shards(config)
        shards.load(METADATA_SHARD, (), NOW_MS)
        self.pump = Pump(asyncio.get_running_loop(), self.now_ms, None)
        logs = ShardLogs("__cluster_metadata", self._open_log, lambda partition: True, self.file_system)
        log = LocalShardLog(
            shards,
            logs,
            submit=self.pump.submit,
            wake=self.pump.wake,
            now_ms=self.now_ms,
            tombstones_kept_ms=lambda: 0,
        )
        self.service = ControllerMetadataService(
            shards, log, self.pump.wake, self.now_ms, lambda: -1, times or no_groups(), worker_ids=worker_ids
        )
        self.service.publishers.append(self.images.append)
        self.pump.add(self.service)
        self.broker = broker_of(Cluster())
        self.broker.metadata = self.service
        self.listener = self.listen()

    def listen(self) -> PeerListener:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(self.path).unlink(missing_ok=True)
        bound.bind(self.path)
        bound.listen()
        return PeerListener(bound, self.broker, self.service.followers)

    async def start(self) -> Controller:
        await self.listener.start()
        return self

    def restart(self) -> None:
        """Ends all connections, as the end of the process does."""
        self.listener.stop_accepting()
        self.listener.close()
        self.listener = self.listen()

    async def close(self) -> None:
        self.listener.stop_accepting()
        self.listener.close()
        # The transports close their sockets in the next turn.
        await asyncio.sleep(0)

    def now_ms(self) -> int:
        return NOW_MS

    def _open_log(self, partition: int) -> Log:
        return Log.open(self.file_system, "data/__cluster_metadata-0", LogConfig(), NOW_MS)

    def add_mute_follower(self, process_id: int) -> metadata_service.Follower:
        """Adds a worker without groups that applies nothing."""
        followers = self.service.followers

        def write(data: bytes) -> None:
            if kind_of(data[4:]) is FrameKind.HOLD:
                asyncio.get_running_loop().call_soon(lambda: followers.held(added, decode_offset(data[4:])[0], -1))

        added = followers.add(2, 0, write, -1, process_id=process_id)
        return added

    def create(self, name: str) -> asyncio.Future[CreateTopicsResponse]:
        return create(self.service, name)

    def change_nothing(self, request: Message) -> asyncio.Future[None]:
        """Runs an operation without records. Its response waits for all workers, too."""
        return self.service.call(
            lambda machine, context, request: CoordinatorResult(None), request, internal_operation_context(NOW_MS)
        )


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    made = await Controller(tmp_path).start()
    yield made
    await made.close()


class Follower:
    """Another worker."""

    def __init__(self, controller: Controller, times: GroupTimes | None = None, broker_id: int = 2) -> None:
        self.images: list[MetadataImage] = []
        self.given_up: list[BaseException] = []
        self.peers = Peers({CONTROLLER_ID: controller.path}, self.spawn)
        self.metadata = MetadataFollower(
            BrokerConfig.from_properties({"node.id": str(broker_id)}),
            self.peers,
            CONTROLLER_ID,
            controller.path,
            self.given_up.append,
            times or no_groups(),
        )
        self.metadata.publishers.append(self.images.append)

    def spawn(self, coroutine: Coroutine[object, object, Message]) -> asyncio.Future[Message]:
        return asyncio.ensure_future(coroutine)

    async def start(self) -> Follower:
        await asyncio.wait_for(self.metadata.start(), 5)
        return self

    def create(self, name: str) -> asyncio.Future[CreateTopicsResponse]:
        return create(self.metadata, name)

    def close(self) -> None:
        self.metadata.close()
        self.peers.close()


def create(service: MetadataService, name: str) -> asyncio.Future[CreateTopicsResponse]:
    request = auto_create_request(BrokerConfig.from_properties({}), [name])
    topic_ids = RandomUuids().take_topic_ids(1)
    context = internal_operation_context(NOW_MS)
    context.api_version = CREATE_TOPICS_VERSION
    return service.call(
        lambda machine, context, request: machine.create_topics(context, request, topic_ids), request, context
    )


def test_frames() -> None:
    request = PeerRequest(7, 19, 7, "clïent", "/127.0.0.1", "User:älice", b"body")
    frame = request.encode()
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert kind_of(frame[4:]) is FrameKind.REQUEST
    assert PeerRequest.decode(frame[4:]) == request
    assert decode_offset(encode_offset(FrameKind.BATCHES, 5, b"data")[4:]) == (5, b"data")


async def test_a_response_comes_after_all_followers_have_published(controller: Controller) -> None:
    await asyncio.wait_for(controller.create("before"), 5)
    followers = [await Follower(controller).start() for _ in range(2)]
    assert all("before" in follower.metadata.image.topics for follower in followers)
    askers: list[Controller | Follower] = [controller, *followers]
    for number, asker in enumerate(askers):
        answer = await asyncio.wait_for(asker.create(f"t{number}"), 5)
        assert answer.topics[0].error_code == 0
        for images in (controller.images, *(follower.images for follower in followers)):
            assert f"t{number}" in images[-1].topics
            assert images[-1].topics[f"t{number}"].id == answer.topics[0].topic_id
    again = await asyncio.wait_for(followers[0].create("t0"), 5)
    assert again.topics[0].error_code == Errors.TOPIC_ALREADY_EXISTS
    for follower in followers:
        follower.close()


async def test_a_response_waits_for_a_follower_until_its_connection_ends(controller: Controller) -> None:
    slow = controller.add_mute_follower(os.getpid())
    waiting = controller.create("a")
    while not controller.images:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    controller.service.followers.applied(slow, slow.sent_offset)
    assert (await asyncio.wait_for(waiting, 5)).topics[0].error_code == 0
    waiting = controller.create("b")
    controller.service.followers.remove(slow)
    assert (await asyncio.wait_for(waiting, 5)).topics[0].error_code == 0


async def test_a_response_waits_at_most_apply_seconds(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_metadata, "APPLY_SECONDS", 0.01)
    controller.add_mute_follower(os.getpid())
    assert (await asyncio.wait_for(controller.create("a"), 5)).topics[0].error_code == 0


async def test_after_a_start_a_response_waits_for_workers_that_have_not_connected(controller: Controller) -> None:
    """They may run since an earlier controller, with ACLs that were removed since."""
    followers = [await Follower(controller, broker_id=2).start()]
    controller.service.followers.expect([2, 3])
    changing = controller.change_nothing(DeleteAclsRequest())
    await asyncio.wait([changing], timeout=0.05)
    assert not changing.done()
    followers.append(await Follower(controller, broker_id=3).start())
    await asyncio.wait_for(changing, 5)
    followers.pop().close()
    await asyncio.sleep(0.01)
    await asyncio.wait_for(controller.change_nothing(DeleteAclsRequest()), 5)
    followers.pop().close()


async def test_a_worker_that_does_not_connect_delays_responses_once(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller.service.followers.expect([2])
    monkeypatch.setattr(controller_metadata, "APPLY_SECONDS", 0.01)
    first = controller.change_nothing(DeleteAclsRequest())
    await asyncio.sleep(0)
    monkeypatch.setattr(controller_metadata, "APPLY_SECONDS", 600.0)
    second = controller.change_nothing(DeleteAclsRequest())
    await asyncio.wait_for(asyncio.gather(first, second), 5)
    await asyncio.wait_for(controller.change_nothing(DeleteAclsRequest()), 5)


@pytest.mark.parametrize("request_class", controller_metadata.SECURITY_CHANGES)
async def test_a_follower_that_misses_a_change_of_security_is_killed(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, request_class: type[Message]
) -> None:
    monkeypatch.setattr(controller_metadata, "APPLY_SECONDS", 0.01)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        controller.add_mute_follower(worker.pid)
        await asyncio.wait_for(controller.create("a"), 5)
        assert worker.poll() is None, "a worker may be late with topics"
        await asyncio.wait_for(controller.change_nothing(request_class()), 5)
        assert await asyncio.to_thread(worker.wait, 5) == -signal.SIGKILL


async def test_a_follower_continues_after_a_restart_of_the_controller(controller: Controller) -> None:
    follower = await Follower(controller).start()
    await asyncio.wait_for(follower.create("a"), 5)
    controller.restart()
    await asyncio.wait_for(controller.create("meanwhile"), 5)
    await controller.start()
    while "meanwhile" not in follower.metadata.image.topics:
        await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(follower.create("b"), 5)).topics[0].error_code == 0
    assert "a" in follower.images[-1].topics
    assert not follower.given_up
    follower.close()


async def test_requests_in_flight_fail_with_not_controller_if_the_controller_ends(controller: Controller) -> None:
    follower = await Follower(controller).start()
    await asyncio.wait_for(follower.create("a"), 5)
    controller.add_mute_follower(os.getpid())
    waiting = follower.create("b")
    while "b" not in controller.service.image.topics:
        await asyncio.sleep(0.001)
    controller.restart()
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(waiting, 5)
    assert caught.value.error is Errors.NOT_CONTROLLER
    follower.close()


async def test_a_follower_that_is_ahead_of_the_log_gives_up(controller: Controller) -> None:
    follower = await Follower(controller).start()
    await asyncio.wait_for(follower.create("a"), 5)
    controller.restart()
    controller.service.followers.log = Log.open(controller.file_system, "data/other-0", LogConfig(), NOW_MS)
    await controller.start()
    while not follower.given_up:
        await asyncio.sleep(0.01)
    assert isinstance(follower.given_up[0], OutOfStep)
    follower.close()


async def test_producer_ids_come_from_the_controller(controller: Controller) -> None:
    follower = await Follower(controller).start()
    blocks = [
        await asyncio.wait_for(
            follower.metadata.call(
                allocate, AllocateProducerIdsRequest(broker_id=broker_id), internal_operation_context(NOW_MS)
            ),
            5,
        )
        for broker_id in (2, 3)
    ]
    assert [(block.producer_id_start, block.producer_id_len) for block in blocks] == [(0, 1000), (1000, 1000)]
    follower.close()


async def test_a_worker_asks_another_coordinator_which_transactions_are_open(controller: Controller) -> None:
    controller.listener.broker = Harness().broker
    peers = Peers({CONTROLLER_ID: controller.path}, lambda coroutine: asyncio.ensure_future(coroutine))
    assert await asyncio.wait_for(in_transaction(peers, CONTROLLER_ID, frozenset({7})), 5) == set()
    peers.close()


async def test_a_worker_that_does_not_exist_is_not_available() -> None:
    peers = Peers({}, lambda coroutine: asyncio.ensure_future(coroutine))
    with pytest.raises(KafkaError) as caught:
        await asyncio.wait_for(peers.ask(9, CreateTopicsRequest(topics=[]), 7), 5)
    assert caught.value.error is Errors.BROKER_NOT_AVAILABLE
    peers.close()


class Times:
    """The creation times of a worker's groups."""

    def __init__(self, newest_ms: int) -> None:
        self.newest_ms = newest_ms
        self.is_loading = False
        self.of_process = GroupTimes(lambda: self.newest_ms, lambda: self.is_loading)

    @property
    def limit_ms(self) -> int:
        return self.of_process.limits.limit_ms


class TestCreationTimes:
    """KIP-1327: new partitions are newer than the groups of all workers, even if the workers' clocks differ."""

    @pytest.fixture
    async def controller(self, tmp_path: Path) -> AsyncIterator[Controller]:
        made = await Controller(tmp_path, Times(NOW_MS).of_process).start()
        yield made
        await made.close()

    async def created_ms(self, controller: Controller, name: str) -> int:
        await asyncio.wait_for(controller.create(name), 5)
        return self.time_of(controller, name)

    def time_of(self, controller: Controller, name: str) -> int:
        (time_ms,) = {partition.creation_time_ms for partition in controller.service.image.topics[name].partitions}
        return time_ms

    async def released(self, *workers: Times) -> None:
        async with asyncio.timeout(5):
            while any(times.limit_ms != NO_CREATION_LIMIT for times in workers):
                await asyncio.sleep(0.001)

    async def test_a_partition_is_newer_than_groups_of_a_worker_whose_clock_is_ahead(
        self, controller: Controller
    ) -> None:
        assert await self.created_ms(controller, "alone") == NOW_MS
        behind, ahead = Times(NOW_MS - 60_000), Times(NOW_MS + 60_000)
        followers = [await Follower(controller, times.of_process).start() for times in (behind, ahead)]
        assert await self.created_ms(controller, "a") == NOW_MS + 60_001
        # The controller's clock is still before that time.
        assert await self.created_ms(controller, "b") == NOW_MS + 60_002
        await self.released(behind, ahead)
        for follower in followers:
            follower.close()

    async def test_new_groups_stay_older_than_a_partition_until_their_worker_knows_it(
        self, controller: Controller
    ) -> None:
        times = Times(NOW_MS + 1_000)
        follower = await Follower(controller, times.of_process).start()
        seen: list[tuple[int, bool]] = []
        controller.service.publishers.append(
            lambda image: seen.append((times.limit_ms, "a" in follower.metadata.image.topics))
        )
        assert await self.created_ms(controller, "a") == NOW_MS + 1_001
        assert seen == [(NOW_MS + 1_000, False)]
        await self.released(times)
        assert "a" in follower.metadata.image.topics
        follower.close()

    async def test_a_new_partition_waits_for_groups_that_are_being_loaded(self, controller: Controller) -> None:
        times = Times(NOW_MS)
        times.is_loading = True
        follower = await Follower(controller, times.of_process).start()
        creating = controller.create("a")
        await asyncio.sleep(0.05)
        assert not creating.done()
        times.newest_ms = NOW_MS + 5_000
        times.is_loading = False
        await asyncio.wait_for(creating, 5)
        assert self.time_of(controller, "a") == NOW_MS + 5_001
        follower.close()

    async def test_a_new_partition_waits_for_a_worker_at_most_order_seconds(
        self, controller: Controller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metadata_service, "ORDER_SECONDS", 0.05)
        times = Times(NOW_MS + 5_000)
        times.is_loading = True
        follower = await Follower(controller, times.of_process).start()
        assert NOW_MS + 5_000 < await self.created_ms(controller, "a") < NOW_MS + 10_000
        times.is_loading = False
        await asyncio.sleep(0.05)
        await self.released(times)
        follower.close()

    async def test_groups_of_a_worker_that_has_ended_still_count(self, controller: Controller) -> None:
        follower = await Follower(controller, Times(NOW_MS + 5_000).of_process).start()
        follower.close()
        await asyncio.sleep(0.05)
        assert NOW_MS + 5_000 < await self.created_ms(controller, "a") < NOW_MS + 10_000

    @pytest.fixture
    async def restarted(self, tmp_path: Path) -> AsyncIterator[Controller]:
        """A controller that has just started, and whose workers 2 and 3 have not connected yet."""
        (tmp_path / "restarted").mkdir()
        made = await Controller(tmp_path / "restarted", Times(NOW_MS).of_process, worker_ids=(2, 3)).start()
        yield made
        await made.close()

    async def test_after_a_restart_a_new_partition_waits_for_workers_that_connect_late(
        self, restarted: Controller
    ) -> None:
        creating = restarted.create("a")
        behind, ahead = Times(NOW_MS - 60_000), Times(NOW_MS + 60_000)
        followers = [await Follower(restarted, behind.of_process, 2).start()]
        await asyncio.sleep(0.05)
        assert not creating.done()
        followers.append(await Follower(restarted, ahead.of_process, 3).start())
        await asyncio.wait_for(creating, 5)
        assert self.time_of(restarted, "a") == NOW_MS + 60_001
        await self.released(behind, ahead)
        for follower in followers:
            follower.close()

    async def test_after_a_restart_a_worker_that_does_not_connect_delays_partitions_once(
        self, restarted: Controller, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metadata_service, "ORDER_SECONDS", 0.05)
        times = Times(NOW_MS + 5_000)
        follower = await Follower(restarted, times.of_process, 3).start()
        first = restarted.create("a")
        await asyncio.sleep(0)
        monkeypatch.setattr(metadata_service, "ORDER_SECONDS", 600.0)
        second = restarted.create("b")
        await asyncio.wait_for(first, 5)
        # The second operation has not waited for its own 600 s.
        await asyncio.wait_for(second, 5)
        assert self.time_of(restarted, "a") == NOW_MS + 5_001
        await asyncio.wait_for(restarted.create("c"), 5)
        await self.released(times)
        follower.close()

    async def test_a_worker_that_connects_while_the_controllers_groups_are_loaded_is_asked_once(
        self, tmp_path: Path
    ) -> None:
        own = Times(NOW_MS)
        own.is_loading = True
        controller = await Controller(tmp_path, own.of_process).start()
        answers: list[int] = []
        held = controller.service.followers.held
        controller.service.followers.held = _noting(answers, held)  # type: ignore[method-assign]
        creating = controller.create("a")
        await asyncio.sleep(0)
        times = Times(NOW_MS + 1_000)
        follower = await Follower(controller, times.of_process).start()
        while not answers:
            await asyncio.sleep(0.001)
        # The worker's groups stay at the first answer, although its clock advances.
        times.newest_ms += 50
        own.is_loading = False
        await asyncio.wait_for(creating, 5)
        await self.released(times)
        assert answers == [NOW_MS + 1_000]
        assert self.time_of(controller, "a") == NOW_MS + 1_001
        follower.close()
        await controller.close()

    async def test_a_worker_releases_its_limit_after_a_restart_of_the_controller(self, controller: Controller) -> None:
        times = Times(NOW_MS)
        follower = await Follower(controller, times.of_process).start()
        times.of_process.limits.hold(4711, NOW_MS - 1)
        controller.restart()
        await asyncio.sleep(0.05)
        assert times.limit_ms == NOW_MS - 1
        await controller.start()
        await self.released(times)
        follower.close()

    async def test_an_operation_without_records_releases_the_limit_too(self, controller: Controller) -> None:
        times = Times(NOW_MS)
        follower = await Follower(controller, times.of_process).start()
        await asyncio.wait_for(controller.create("a"), 5)
        again = await asyncio.wait_for(controller.create("a"), 5)
        assert again.topics[0].error_code == Errors.TOPIC_ALREADY_EXISTS
        await self.released(times)
        follower.close()


def _noting(answers: list[int], held: Callable[[metadata_service.Follower, int, int], None]) -> Callable[..., None]:
    """Returns `held`, which then also notes the creation times that workers answer."""

    def note(follower: metadata_service.Follower, ticket: int, newest_ms: int) -> None:
        answers.append(newest_ms)
        held(follower, ticket, newest_ms)

    return note
