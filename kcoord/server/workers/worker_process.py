# SPDX-License-Identifier: Apache-2.0
"""One of several worker processes: a broker with its own id, port and event loop, and with its share of all partitions.

The first one is the controller: it has the metadata log, and the others follow it. They share the data folder, where
each opens what it leads, and reach each other over Unix sockets. A worker whose supervisor is gone ends as well.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvloop

from kcoord.server.clock import Clock
from kcoord.server.disk.data_folder import Storage, StorageNotUsable
from kcoord.server.net.listener import SocketListener
from kcoord.server.process import BrokerProcess, StartError, load_metadata
from kcoord.server.workers.metadata_follower import MetadataFollower
from kcoord.server.workers.metadata_followers import ControllerMetadataService
from kcoord.server.workers.peer_link import Peers
from kcoord.server.workers.peer_listener import PeerListener
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig, Listener
    from kcoord.metadata.image import MetadataImage
    from kcoord.metadata.machine import MetadataMachine
    from kcoord.metadata.records import BrokerRegistration
    from kcoord.runtime.coordinator_runtime import CoordinatorRuntime
    from kcoord.server.net.connection_limits import ConnectionLimits
    from kcoord.server.shards.metadata_operations import MetadataService

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
class Place:
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


def run_worker(place: Place, on_ready: Callable[[], None]) -> None:
    """Runs until a signal, or the end of the supervisor. Raises StartError where the worker cannot start."""
    _name_in_log(place.own.config.node_id)
    uvloop.run(_run(place, on_ready))


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


async def _run(place: Place, on_ready: Callable[[], None]) -> None:
    clock = Clock()
    config = place.own.config
    try:
        storage = Storage(
            config,
            clock.now_ms(),
            log_dir=lambda: WorkerLogDir.join(place.folder, place.number, is_restart=place.is_restart),
            owns_metadata=place.is_controller,
            settles_folder=place.is_controller and not place.is_restart,
        )
    except StorageNotUsable as error:
        raise StartError(str(error)) from None
    try:
        metadata = load_metadata(config, storage, clock.now_ms()) if place.is_controller else None
        process = WorkerProcess(place, clock, storage, metadata)
    except BaseException:
        storage.close(clock.now_ms(), clean=True)
        raise
    try:
        process.stop_on_signals()
        await process.start()
        on_ready()
        await process.until_signal()
    finally:
        await process.stop()


class WorkerProcess(BrokerProcess):
    """See the module's text."""

    def __init__(
        self, place: Place, clock: Clock, storage: Storage, metadata: CoordinatorRuntime[MetadataMachine] | None
    ) -> None:
        self._place = place
        others = {worker.config.node_id: worker.peer_path for worker in place.workers if worker is not place.own}
        self._peers = Peers(others, lambda coroutine: self._broker.spawn(coroutine))
        super().__init__(place.own.config, clock, storage, metadata)
        followers = self._metadata.followers if isinstance(self._metadata, ControllerMetadataService) else None
        self._peer_listener = PeerListener(place.own.peer_socket, self._broker, followers)

    @property
    def controller_id(self) -> int:
        return self._place.workers[CONTROLLER].config.node_id

    def _new_metadata_service(self, runtime: CoordinatorRuntime[MetadataMachine] | None) -> MetadataService:
        if runtime is not None:
            return ControllerMetadataService(runtime, self._storage.metadata_logs, self, self._group_times)
        controller = self._place.workers[CONTROLLER]
        return MetadataFollower(
            self._config,
            self._peers,
            controller.config.node_id,
            controller.peer_path,
            self.publish,
            self._give_up,
            self._group_times,
        )

    def _new_peers(self) -> Peers:
        return self._peers

    def _new_listener(self, address: Listener, limits: ConnectionLimits) -> SocketListener:
        return SocketListener(address, self._broker, limits, self._place.own.bound[address.name])

    def _give_up(self, error: BaseException) -> None:
        """The supervisor starts this worker again."""
        _logger.error("This worker cannot follow the metadata log any more: %s", error)
        self._failure = error
        self._stop_requested.set()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        super().stop_on_signals()
        self._loop.add_reader(self._place.lifeline, self._orphaned)

    def _orphaned(self) -> None:
        self._loop.remove_reader(self._place.lifeline)
        _logger.error("The supervisor is gone: this worker ends, too")
        shutil.rmtree(os.path.dirname(self._place.own.peer_path), ignore_errors=True)
        self._stop_requested.set()

    async def _join_cluster(self) -> None:
        if isinstance(self._metadata, MetadataFollower):
            await self._metadata.start()
        else:
            await super()._join_cluster()
        await self._peer_listener.start()

    # --- in and out of service ----------------------------------------------------------------------------------------

    def publish(self, image: MetadataImage) -> None:
        super().publish(image)
        if self._is_open is not None and self._is_open == self._is_fenced:
            self._follow_fencing()

    @property
    def _is_fenced(self) -> bool:
        """Also if the broker is unregistered: then it is out of service until the next start."""
        broker = self.image.brokers.get(self._broker.node_id)
        return broker is None or broker.fenced

    def _follow_fencing(self) -> None:
        """A broker out of service refuses clients, and leads nothing; its worker goes on, the controller's as such."""
        self._is_open = not self._is_fenced
        if self._is_open:
            _logger.info("In service again")
            for listener in self._listeners:
                self.spawn(listener.resume())
            return
        _logger.info("Out of service: clients are refused, other brokers lead the partitions")
        for listener in self._listeners:
            listener.suspend()

    async def _open_listeners(self) -> None:
        if self._is_fenced:
            # It was started again meanwhile.
            self._is_open = False
            for listener in self._listeners:
                listener.suspend()
            return
        self._is_open = True
        await super()._open_listeners()

    def _registrations(self) -> list[BrokerRegistration]:
        return [self._registration(worker.config, worker.endpoints) for worker in self._place.workers]

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

    _failure: BaseException | None = None
    _is_open: bool | None = None
    """Whether clients are taken; None before the first were."""


def take_place(place: Place, inherited: Sequence[int]) -> None:
    """Right after the fork: closes what belongs to the supervisor (`inherited` descriptors) and to other workers."""
    for descriptor in inherited:
        os.close(descriptor)
    for worker in place.workers:
        if worker is not place.own:
            worker.close()
