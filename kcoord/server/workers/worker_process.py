# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: a broker with its own id, ports and event loop, that leads some of the partitions.

Worker 0 is the controller. It writes the metadata log, and the other workers follow that log
(`kcoord.server.workers.controller_metadata`). All workers share the data folder, and each opens the logs of the
partitions that it leads. Workers reach each other over Unix sockets (`kcoord.server.workers.peer_frames`).

The start of a worker has the steps of `kcoord.server.process`, with two differences. The sockets are those of the
supervisor. Instead of registering its broker, a worker that is not the controller reads the metadata log up to its
current end. The worker is ready when its listeners accept connections.

A worker stops on SIGTERM or SIGINT, if its supervisor is gone, and if it cannot follow the metadata log any more. In
the last case it fails, and the supervisor restarts it. If a broker is fenced or unregistered (`kcoord workers`), its
worker keeps running, but its listeners refuse clients. A fenced controller still writes the metadata log.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

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
from kcoord.server.process import BrokerProcess, process_environment
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.time_slice import shorten_time_slice
from kcoord.server.workers.controller_metadata import ControllerMetadataService
from kcoord.server.workers.metadata_follower import MetadataFollower
from kcoord.server.workers.peer_link import Peers
from kcoord.server.workers.peer_listener import PeerListener
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir

_logger = logging.getLogger(__name__)

CONTROLLER = 0
"""The number of the worker that writes the metadata log."""


@dataclass(slots=True)
class Worker:
    """A worker as all workers know it: its sockets by listener name, and the endpoints that it advertises."""

    number: int
    config: BrokerConfig
    sockets: Mapping[str, Sequence[socket.socket]]
    endpoints: list[Listener]
    peer_socket: socket.socket
    peer_path: str

    def close(self) -> None:
        """Closes the sockets in this process. Other processes that inherited them keep theirs."""
        self.peer_socket.close()
        for listening_sockets in self.sockets.values():
            for listening_socket in listening_sockets:
                listening_socket.close()


@dataclass(slots=True)
class Launch:
    """The parameters of one worker process. `lifeline` is a pipe that ends when the supervisor ends."""

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
    """Runs a worker until a signal or the end of the supervisor. Raises StartError if the worker cannot start."""
    _name_in_log(launch.own.config.node_id)
    shorten_time_slice()
    uvloop.run(_run(launch, on_ready))


def _name_in_log(node_id: int) -> None:
    """Puts the broker id into the name of each logger, since all workers write to one log."""
    make_record = logging.getLogRecordFactory()

    def named(*arguments: object, **more: object) -> logging.LogRecord:
        record = make_record(*arguments, **more)
        record.name = f"[broker {node_id}] {record.name}"
        return record

    logging.setLogRecordFactory(named)
    with suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write(f"kcoord-{node_id}")


async def _run(launch: Launch, on_ready: Callable[[], None]) -> None:
    environment = process_environment()
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
    """The broker process of one worker; the module text describes its start and its end."""

    def __init__(self, launch: Launch, environment: Environment, folder: DataFolder) -> None:
        self._launch = launch
        own = launch.own
        self._failure: BaseException | None = None
        self._is_open: bool | None = None
        """True if the listeners accept clients; None until they are opened for the first time."""
        self._peers = Peers(
            {worker.config.node_id: worker.peer_path for worker in launch.workers if worker is not own},
            environment.spawn,
        )

        def new_metadata(broker: Broker, group_times: GroupTimes) -> MetadataService:
            if launch.is_controller:
                worker_ids = [worker.config.node_id for worker in launch.workers if worker is not own]
                new_service = partial(ControllerMetadataService, worker_ids=worker_ids)
                return local_metadata(folder, broker, group_times, new_service)
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
            return SocketListener(address, broker, limits, own.sockets[address.name])

        broker = compose(
            own.config,
            environment,
            folder,
            new_metadata=new_metadata,
            peers=self._peers,
            metadata_broker_id=launch.workers[CONTROLLER].config.node_id,
        )
        super().__init__(broker, environment, folder, new_listener)
        broker.image_observers.append(self._follow_fencing)
        followers = broker.metadata.followers if isinstance(broker.metadata, ControllerMetadataService) else None
        self._peer_listener = PeerListener(own.peer_socket, broker, followers)

    def _give_up(self, error: BaseException) -> None:
        """Ends this worker with `error`, so that the supervisor restarts it."""
        _logger.error("This worker cannot follow the metadata log any more, it will be restarted: %s", error)
        self._failure = error
        self._stop_requested.set()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        super().stop_on_signals()
        self._loop.add_reader(self._launch.lifeline, self._orphaned)

    def _orphaned(self) -> None:
        self._loop.remove_reader(self._launch.lifeline)
        _logger.error("The supervisor has ended: this worker stops, too")
        shutil.rmtree(os.path.dirname(self._launch.own.peer_path), ignore_errors=True)
        self._stop_requested.set()

    async def _join_cluster(self) -> None:
        if isinstance(self.broker.metadata, MetadataFollower):
            await self.broker.metadata.start()
        else:
            await super()._join_cluster()
        if isinstance(self.broker.metadata, ControllerMetadataService):
            # The registrations cannot wait for workers, which connect only now.
            self.broker.metadata.followers.expect(
                worker.config.node_id for worker in self._launch.workers if worker is not self._launch.own
            )
        await self._peer_listener.start()

    # --- in and out of service ----------------------------------------------------------------------------------------

    @property
    def _is_fenced(self) -> bool:
        """True also if the broker is unregistered: then it is out of service until the next start."""
        image = self.broker.image.brokers.get(self.broker.node_id)
        return image is None or image.fenced

    def _follow_fencing(self, image: MetadataImage) -> None:
        """Closes the listeners when the broker is fenced, and opens them when it is unfenced."""
        if self._is_open is None or self._is_open != self._is_fenced:
            return
        self._is_open = not self._is_fenced
        if self._is_open:
            _logger.info("The broker is in service again: it accepts clients")
            for listener in self.listeners:
                self.broker.spawn(listener.resume())
            return
        _logger.info("The broker is out of service: it refuses clients, and other brokers lead its partitions")
        for listener in self.listeners:
            listener.suspend()

    async def _open_listeners(self) -> None:
        if self._is_fenced:
            # The broker was fenced before this start of its worker.
            self._is_open = False
            for listener in self.listeners:
                listener.suspend()
            return
        self._is_open = True
        await super()._open_listeners()

    def _configs(self) -> list[BrokerConfig]:
        return [worker.config for worker in self._launch.workers]

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
    """Closes the descriptors of the supervisor (`inherited`) and the sockets of other workers, right after the fork."""
    for descriptor in inherited:
        os.close(descriptor)
    for worker in launch.workers:
        if worker is not launch.own:
            worker.close()
