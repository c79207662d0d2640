# SPDX-License-Identifier: Apache-2.0
"""One instance over all lives of its process: the product's own code, on simulated time, disk and network.

A process is composed as in `kcoord.upstream.process`, without listeners and without the metadata of the upstream: the
broker's groups, the log of their shards, the standbys, the membership of the instances' group, and the ownership of
shards. Its requests to the upstream pass through the product's client (`kcoord.client`).

A crash loses all that these classes hold. The disk and the messages that are under way survive it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, cast

from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.shared import SharedMetadata
from kcoord.runtime.result import CoordinatorRecord, OperationContext
from kcoord.runtime.shard_map import Instance
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.broker import Broker
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment, RandomUuids
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.process import Threads
from kcoord.simulation.trace import Trace
from kcoord.simulation.upstream.brokers import BROKERS, host_of
from kcoord.simulation.upstream.network import InstanceLoop, UpstreamNetwork
from kcoord.simulation.upstream.options import WRITE_TIMEOUT_MS, UpstreamOptions
from kcoord.storage.memory_file_system import MemoryFileSystem, keep_everything
from kcoord.upstream import shard_log
from kcoord.upstream.group_log import ATTEMPTS
from kcoord.upstream.group_requests import GroupRequests
from kcoord.upstream.instance_group import InstanceGroup
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord.upstream.ownership import Ownership
from kcoord.upstream.requests import PartitionRequests
from kcoord.upstream.shared_log import SharedLog
from kcoord.upstream.standby_files import StandbyFiles
from kcoord_protocol.errors import Errors, KafkaError

GROUP_ID: Final = "kcoord"
_FOLDER: Final = "data"
_LONGEST_DISK_MS: Final = 50
_START_TIMEOUT_MS: Final = 30_000


@dataclass(slots=True)
class Surroundings:
    """What all instances share. `failed` reports an error that the product has not handled."""

    clock: VirtualClock
    random: Random
    trace: Trace
    options: UpstreamOptions
    network: UpstreamNetwork
    uuids: RandomUuids
    failed: Callable[[str, BaseException | None], None]


class Announcements:
    """The log that all instances share, as a model: all see the same state at once, and announcements take a while."""

    def __init__(self, network: UpstreamNetwork) -> None:
        self.state = SharedMetadata()
        self._network = network
        self.processes: list[InstanceProcess] = []

    def pass_on(self, sender: int, node_id: int) -> None:
        """Passes an announcement on to all instances that are not cut off."""
        if self._network.is_cut(sender, is_request=True):
            return
        for process in self.processes:
            if not self._network.is_cut(process.node_id, is_request=False):
                self._network.clock.after(
                    2 * self._network.way_ms(),
                    lambda process=process: process.loop.enter(process.announced, node_id),  # type: ignore[misc]
                )


class InstanceProcess:
    """One life of an instance, from start to crash or orderly stop."""

    broker: Broker
    ownership: Ownership
    log: shard_log.UpstreamShardLog
    group: InstanceGroup

    def __init__(self, instance: SimulatedInstance, clock_rate: float) -> None:
        self.node_id = instance.node_id
        self.instance = instance
        self.owner = f"life {instance.lives} of instance {instance.node_id}"
        """The name in the claims of this process."""
        self.has_slow_clock = clock_rate != 1
        self.has_begun = False
        self.state = instance.announcements.state
        self.on_instance: Callable[[int], None] = lambda node_id: None
        """What the real log calls: `Ownership` sets it."""
        self.loop = InstanceLoop(  # type: ignore[abstract]
            instance.shared.clock, clock_rate, 0, self._begin_work, instance.shared.failed
        )
        self.loop.network = instance.shared.network
        self.loop.node_id = instance.node_id
        self._began_ms = instance.shared.clock.now_ms

    def _begin_work(self, executor: object) -> tuple[int, Exception | None]:
        return self.instance.shared.random.randint(1, _LONGEST_DISK_MS), None

    def now_ms(self) -> int:
        return self._began_ms + self.loop.elapsed_ms()

    async def begin(self) -> None:
        """Connects to the upstream, composes the broker, and joins the group of the instances."""
        config, options = self.instance.config, self.instance.shared.options
        settings = CommonConfig(
            bootstrap_servers=[f"{host_of(broker_id)}:9092" for broker_id in BROKERS],
            client_id=self.owner,
            request_timeout_ms=WRITE_TIMEOUT_MS // ATTEMPTS,
            socket_connection_setup_timeout_ms=WRITE_TIMEOUT_MS // ATTEMPTS,
        )
        requests = GroupRequests(settings, GROUP_ID, self.node_id, options.session_timeout_ms)
        self.group = InstanceGroup(config, requests)
        cluster = Cluster(settings)
        self._requests = PartitionRequests(cluster, OFFSETS_TOPIC, attempt_timeout_ms=WRITE_TIMEOUT_MS // ATTEMPTS)
        await cluster.start(cluster.deadline(_START_TIMEOUT_MS))
        await cluster.retry("look up leaders", cluster.deadline(_START_TIMEOUT_MS), self._requests.look_up_leaders)
        await requests.start()
        environment = Environment(
            self.loop,
            self.now_ms,
            uuids=self.instance.shared.uuids,
            new_pool=lambda size, name: cast("Any", Threads(self.loop, name)),
        )
        folder = DataFolder(config, self.now_ms(), MemoryFileSystem(), uuids=environment.uuids)
        self.broker = compose(config, environment, folder, new_group_log=self._new_log)
        self.ownership = Ownership(self.broker, self.group, self.log, cast("SharedLog", self))
        self.broker.begin()
        self.has_begun = True
        self.ownership.follow()
        self.ownership.join(Instance(self.node_id, f"instance-{self.node_id}", 9092))

    def _new_log(self, shards: ShardSet[GroupCoordinatorShard], broker: Broker) -> shard_log.UpstreamShardLog:
        config = broker.config
        self.log = shard_log.UpstreamShardLog(
            shards,
            self._requests,
            cluster_id="upstream",
            owner=self.owner,
            write_timeout_ms=WRITE_TIMEOUT_MS,
            foreign_id_wait_ms=config.kcoord_upstream_session_timeout_ms + WRITE_TIMEOUT_MS,
            wake=broker.pump.wake,
            now_ms=broker.now_ms,
            log_ms=broker.now_ms,
            may_act=self.group.holds_lease,
            on_fenced=self.group.fenced,
            files=StandbyFiles(
                self.instance.disk,
                _FOLDER,
                self._requests.topic_id,
                lambda size, name: cast("Any", Threads(self.loop, name)),
            ),
            tombstones_kept_ms=self.instance.shared.options.tombstones_kept_ms,
        )
        return self.log

    # The log that all instances share.

    async def append(self, records: Sequence[CoordinatorRecord]) -> None:
        for record in records:
            self.state.replay(record)

    async def announce(self, node_id: int) -> None:
        self.instance.announcements.pass_on(self.node_id, node_id)

    def announced(self, node_id: int) -> None:
        self.on_instance(node_id)

    # Requests of clients.

    def serve(self, request: ClientRequest) -> None:
        """Executes a request of a client. `on_answer` gets the response, or an error."""
        if not self.has_begun:
            request.on_answer(self, KafkaError(Errors.NOT_COORDINATOR))
            return
        self.ownership.check()
        context = OperationContext(self.now_ms(), api_version=request.version, token=request.number)
        try:
            reply = self.broker.groups.call(request.group_id, request.operation, request.message, context)
        except KafkaError as error:
            request.on_answer(self, error)
            return
        if not asyncio.isfuture(reply):
            request.on_answer(self, reply)
            return

        def done(future: asyncio.Future[Any]) -> None:
            if not future.cancelled():
                error = future.exception()
                request.on_answer(self, error if error is not None else future.result())

        reply.add_done_callback(done)

    # For the checks.

    def machine_of(self, shard_id: int) -> GroupCoordinatorShard | None:
        return self.broker.groups.shards.machine(shard_id) if self.has_begun else None


@dataclass(slots=True, eq=False)
class ClientRequest:
    """A request of a client, which `operation` of a shard of the group coordinator executes."""

    number: int
    group_id: str
    operation: Callable[..., Any]
    message: object
    version: int
    on_answer: Callable[[InstanceProcess, object], None]


class SimulatedInstance:
    """The machine of an instance, and the process that runs on it, if any."""

    def __init__(
        self,
        node_id: int,
        shared: Surroundings,
        announcements: Announcements,
    ) -> None:
        self.node_id = node_id
        self.shared = shared
        self.announcements = announcements
        self.disk = MemoryFileSystem()
        self.process: InstanceProcess | None = None
        self.lives = 0
        self._ended: list[InstanceProcess] = []
        """Kept so that Python collects them after the run, at a time that is the same in every run."""
        self.config = BrokerConfig.from_properties(
            {
                "node.id": str(node_id),
                "listeners": "PLAINTEXT://127.0.0.1:9092",
                "log.dirs": _FOLDER,
                "kcoord.log.flush.policy": "os",
                "log.cleaner.enable": "false",
                "offsets.topic.num.partitions": str(shared.options.shards),
                "kcoord.upstream.session.timeout.ms": str(shared.options.session_timeout_ms),
                "kcoord.upstream.heartbeat.interval.ms": str(shared.options.heartbeat_interval_ms),
                "kcoord.upstream.write.timeout.ms": str(WRITE_TIMEOUT_MS),
            }
        )

    def start(self, clock_rate: float = 1.0) -> None:
        """Starts a process, unless one runs."""
        if self.process is not None:
            return
        self.lives += 1
        process = self.process = InstanceProcess(self, clock_rate)
        self.announcements.processes.append(process)
        self.shared.trace.add("start" if clock_rate == 1 else "start-slow-clock", process.owner)
        process.loop.enter(self._begin, process)

    def _begin(self, process: InstanceProcess) -> None:
        def begun(task: asyncio.Task[None]) -> None:
            # As a supervisor does with a process that cannot start.
            if not task.cancelled() and task.exception() is not None and self.process is process:
                self.shared.trace.add("start-failed", f"{process.owner}: {task.exception()!r}")
                if not isinstance(task.exception(), KafkaError):
                    raise cast("Exception", task.exception())
                self._end()
                self.shared.clock.after(500, self.start)

        process.loop.create_task(process.begin()).add_done_callback(begun)

    def crash(self) -> None:
        if self.process is not None:
            self.shared.trace.add("crash", self.process.owner)
            self._end()
            self.disk.crash(keep_everything)

    def stop(self) -> None:
        """Stops the process in order (SIGTERM), if it has begun to serve."""
        process = self.process
        if process is None or not process.has_begun:
            return
        self.shared.trace.add("stop", process.owner)
        process.loop.enter(self._stop, process)

    def _stop(self, process: InstanceProcess) -> None:
        def left(task: asyncio.Task[None]) -> None:
            if self.process is process:
                self.shared.trace.add("stopped", process.owner)
                self._end()

        process.loop.create_task(process.ownership.leave()).add_done_callback(left)

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.loop.end()
            self.announcements.processes.remove(process)
            self._ended.append(process)

    def end(self) -> None:
        """Ends the process, if there is one, because the run is over."""
        self._end()
        for process in self._ended:
            process.loop.close_tasks()

    def pause(self, duration_ms: int) -> None:
        """Makes the process stand still (SIGSTOP). What becomes due meanwhile runs afterwards at once, in order."""
        if self.process is not None:
            self.shared.trace.add("pause", f"{self.process.owner} {duration_ms}")
            self.process.loop.paused_until_ms = self.shared.clock.now_ms + duration_ms
