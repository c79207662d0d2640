# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: a broker with its own id, port and event loop, and with its share of all partitions.

The first one is the controller: it has the metadata log, and the others follow it. They share the data folder, where
each opens what it leads, and reach each other over Unix sockets. A worker whose supervisor is gone ends as well.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from kcoord.config import BrokerConfig, Listener
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.records import BrokerRegistration
from kcoord.server.broker import Broker
from kcoord.server.composition import compose, local_metadata
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.process import BrokerProcess
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.shards.shard_service import Clock
from kcoord.server.workers.metadata_follower import MetadataFollower
from kcoord.server.workers.metadata_followers import ControllerMetadataService
from kcoord.server.workers.peer_link import Peers
from kcoord.server.workers.peer_listener import PeerListener
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir

_logger = logging.getLogger(__name__)

CONTROLLER = 0
"""The number of the worker that has the metadata log."""


@dataclass(slots=True)
class Worker:
    """A worker as all of them know it. `bound` are its sockets by listener, `endpoints` what clients are told."""

    number: int
    config: BrokerConfig
    bound: Mapping[str, Sequence[socket.socket]]
    endpoints: list[Listener]
    peer_socket: socket.socket
    peer_path: str

    def close(self) -> None:
        """Gives up this process's hold of the sockets."""
        self.peer_socket.close()
        for sockets in self.bound.values():
            for one in sockets:
                one.close()


@dataclass(slots=True)
class Launch:
    """What the supervisor gives to the process of one worker. `lifeline` ends when the supervisor does."""

    number: int
    workers: list[Worker]
    folder: SharedLogDir
    lifeline: int
    is_restart: bool

    @property
    def own(self) -> Worker:
        return self.workers[self.number]

    @property
    def is_controller(self) -> bool:
        return self.number == CONTROLLER


def run_worker(launch: Launch, on_ready: Callable[[], None]) -> None:
    """Runs until a signal, or the end of the supervisor. Raises StartError if the worker cannot start."""
    _name_in_log(launch.own.config.node_id)
    uvloop.run(_run(launch, on_ready))


def _name_in_log(node_id: int) -> None:
    """All workers write to one log: every line says whose it is."""
    make_record = logging.getLogRecordFactory()

    def named(*arguments: object, **more: object) -> logging.LogRecord:
        record = make_record(*arguments, **more)
        record.name = f"[broker {node_id}] {record.name}"
        return record

    logging.setLogRecordFactory(named)
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(f"kcoord-{node_id}")


async def _run(launch: Launch, on_ready: Callable[[], None]) -> None:
    clock = Clock()
    environment = Environment(asyncio.get_running_loop(), clock.now_ms, clock_gain_ms=clock.gain_ms, owns_heap=True)
    folder = DataFolder(
        launch.own.config,
        environment.now_ms(),
        log_dir=lambda: WorkerLogDir.join(launch.folder, launch.number, is_restart=launch.is_restart),
        owns_metadata=launch.is_controller,
        settles_folder=launch.is_controller and not launch.is_restart,
        uuids=environment.uuids,
    )
    try:
        process = WorkerProcess(launch, environment, folder)
    except BaseException:
        folder.close(environment.now_ms(), clean=True)
        raise
    await process.run(lambda _: on_ready())


class WorkerProcess(BrokerProcess):
    """See the module's text."""

    def __init__(self, launch: Launch, environment: Environment, folder: DataFolder) -> None:
        self._launch = launch
        own = launch.own
        self._failure: BaseException | None = None
        self._is_open: bool | None = None
        """Whether clients are taken; None before the first were."""
        self._peers = Peers(
            {worker.config.node_id: worker.peer_path for worker in launch.workers if worker is not own},
            environment.spawn,
        )

        def new_metadata(broker: Broker, group_times: GroupTimes) -> MetadataService:
            if launch.is_controller:
                return local_metadata(folder, broker, group_times, ControllerMetadataService)
            controller = launch.workers[CONTROLLER]
            return MetadataFollower(
                broker.config,
                self._peers,
                controller.config.node_id,
                controller.peer_path,
                self._give_up,
                group_times,
            )

        def new_listener(address: Listener, broker: Broker, limits: ConnectionLimits) -> SocketListener:
            return SocketListener(address, broker, limits, own.bound[address.name])

        broker = compose(
            own.config,
            environment,
            folder,
            new_metadata=new_metadata,
            peers=self._peers,
            controller_id=launch.workers[CONTROLLER].config.node_id,
        )
        super().__init__(broker, environment, folder, new_listener)
        broker.image_observers.append(self._follow_fencing)
        followers = broker.metadata.followers if isinstance(broker.metadata, ControllerMetadataService) else None
        self._peer_listener = PeerListener(own.peer_socket, broker, followers)

    def _give_up(self, error: BaseException) -> None:
        """The supervisor starts this worker again."""
        _logger.error("This worker cannot follow the metadata log any more: %s", error)
        self._failure = error
        self._stop_requested.set()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        super().stop_on_signals()
        self._loop.add_reader(self._launch.lifeline, self._orphaned)

    def _orphaned(self) -> None:
        self._loop.remove_reader(self._launch.lifeline)
        _logger.error("The supervisor is gone: this worker ends, too")
        shutil.rmtree(os.path.dirname(self._launch.own.peer_path), ignore_errors=True)
        self._stop_requested.set()

    async def _join_cluster(self) -> None:
        if isinstance(self.broker.metadata, MetadataFollower):
            await self.broker.metadata.start()
        else:
            await super()._join_cluster()
        await self._peer_listener.start()

    # --- in and out of service ----------------------------------------------------------------------------------------

    @property
    def _is_fenced(self) -> bool:
        """Also if the broker is unregistered: then it is out of service until the next start."""
        image = self.broker.image.brokers.get(self.broker.node_id)
        return image is None or image.fenced

    def _follow_fencing(self, image: MetadataImage) -> None:
        """A broker out of service refuses clients, and leads nothing; its worker goes on, the controller's as such."""
        if self._is_open is None or self._is_open != self._is_fenced:
            return
        self._is_open = not self._is_fenced
        if self._is_open:
            _logger.info("In service again")
            for listener in self.listeners:
                self.broker.spawn(listener.resume())
            return
        _logger.info("Out of service: clients are refused, other brokers lead the partitions")
        for listener in self.listeners:
            listener.suspend()

    async def _open_listeners(self) -> None:
        if self._is_fenced:
            # It was started again meanwhile.
            self._is_open = False
            for listener in self.listeners:
                listener.suspend()
            return
        self._is_open = True
        await super()._open_listeners()

    def _registrations(self) -> list[BrokerRegistration]:
        return [self._registration(worker.config, worker.endpoints) for worker in self._launch.workers]

    async def until_signal(self) -> None:
        await super().until_signal()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        self._peer_listener.stop_accepting()
        await super().stop()
        self._peer_listener.close()
        self._peers.close()

    @property
    def in_flight(self) -> int:
        return super().in_flight + self._peer_listener.in_flight


def close_inherited(launch: Launch, inherited: Sequence[int]) -> None:
    """Right after the fork: closes what belongs to the supervisor (`inherited` descriptors) and to other workers."""
    for descriptor in inherited:
        os.close(descriptor)
    for worker in launch.workers:
        if worker is not launch.own:
            worker.close()
