# SPDX-License-Identifier: Apache-2.0
"""A broker process from its configuration to its end: data folder, broker, listeners, signals, orderly stop.

Everything that another process or a file can make fail is tried before the ready line, and ends as StartError with a
sentence for people.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from kcoord.config import BrokerConfig, Listener
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import BrokerRegistration
from kcoord.server.broker import WRITER_SECONDS, Broker, until
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.errors import StartError
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.metadata_service import LocalMetadataService
from kcoord.server.shards.shard_service import Clock
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.uuid import uuid_from_string

if TYPE_CHECKING:
    # The metrics library takes a tenth of a second to load: only who asked for it pays.
    from kcoord.server.disk.log_cleaner import LogCleaner
    from kcoord.server.observe.broker_metrics import BrokerMetrics

_logger = logging.getLogger(__name__)

NewListener: TypeAlias = Callable[[Listener, Broker, ConnectionLimits], SocketListener]

ANSWER_SECONDS = 2.5
"""How long a stop waits for answers under way; with what follows it stays below the 5 s that are promised."""
CLEANER_DELAY_SECONDS = 0.5
LOADED_SECONDS = 0.25
"""How long the ready line waits for shards that load. A client that comes right after it would have to retry."""
GC_THRESHOLDS = (50_000, 20, 100)
"""With Python's own, every few thousand new connections or members are a full collection, hundreds of milliseconds for
10,000 members. What a request makes is freed by its reference count; cycles are few, and the young generations find
them.
"""


@dataclass(slots=True)
class ReadyLine:
    """What the ready line tells."""

    addresses: list[str]
    node_id: int
    cluster_id: str
    nodes: int = 1
    """Workers, whose ids begin with `node_id`."""


async def run_process(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Runs a broker that is one process until a signal ends it. Raises StartError if it cannot start."""
    clock = Clock()
    environment = Environment(asyncio.get_running_loop(), clock.now_ms, clock_gain_ms=clock.gain_ms, owns_heap=True)
    folder = DataFolder(config, environment.now_ms(), uuids=environment.uuids)
    try:
        process = BrokerProcess(compose(config, environment, folder), environment, folder)
    except BaseException:
        folder.close(environment.now_ms(), clean=True)
        raise
    await process.run(on_ready)


class BrokerProcess:
    """A broker with its listeners."""

    answer_seconds: ClassVar[float] = ANSWER_SECONDS

    def __init__(
        self, broker: Broker, environment: Environment, folder: DataFolder, new_listener: NewListener = SocketListener
    ) -> None:
        self.broker = broker
        self._environment = environment
        self._folder = folder
        self._loop = environment.loop
        self._stop_requested = asyncio.Event()
        self._cleaner: LogCleaner | None = None
        self.bound: dict[str, Listener] = {}
        """The listeners by name, with the ports that they really have."""
        self._metrics: BrokerMetrics | None = None
        limits = ConnectionLimits(broker.config)
        self.listeners = [new_listener(address, broker, limits) for address in broker.config.open_listeners]

    def _open_metrics(self) -> BrokerMetrics | None:
        broker = self.broker
        config = broker.config
        if config.kcoord_metrics_port < 0:
            return None
        from kcoord.server.observe.broker_metrics import BrokerMetrics

        metrics = BrokerMetrics(self._loop, broker.groups, broker.transactions, self.listeners, broker.now_ms)
        host = config.kcoord_metrics_host
        try:
            port = metrics.open(host, config.kcoord_metrics_port)
        except OSError as error:
            where = f"kcoord.metrics.port={config.kcoord_metrics_port} on {host}"
            raise StartError(f"cannot serve metrics, {where}: {error.strerror or error}") from None
        _logger.info("Metrics are at http://%s:%d/metrics", host, port)
        broker.pump.measure_writes(metrics.measures.writes)
        for listener in self.listeners:
            if type(listener) is SocketListener:  # test mode looks at requests in its own way
                listener.connections.new_path = partial(metrics.new_path, listener.path_settings)
        return metrics

    async def run(self, on_ready: Callable[[ReadyLine], None]) -> None:
        """Serves until a signal. Raises StartError if the broker cannot start."""
        try:
            self.stop_on_signals()
            await self.start()
            await self._load_small_shards()
            on_ready(self.ready())
            await self.until_signal()
        finally:
            await self.stop()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_requested.set)

    async def start(self) -> None:
        """Joins the cluster, opens what the metadata log names, then the listeners."""
        for listener in self.listeners:
            self.bound[listener.address.name] = await _bind(listener)
        for advertised in self.broker.config.advertised(self.bound, socket.gethostname()):
            self.broker.endpoints[advertised.name] = advertised
        await self._join_cluster()
        self.broker.begin()
        self._metrics = self._open_metrics()
        await self._open_listeners()
        if self.broker.config.log_cleaner_enable:
            # Nobody waits for it, and it is not needed for the first answer.
            self._loop.call_later(CLEANER_DELAY_SECONDS, self._start_cleaner)
        if self._environment.owns_heap:
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)

    async def _load_small_shards(self) -> None:
        """Waits for the coordinators' shards, but not for long. Clients are served meanwhile."""
        loads = [self._loop.create_task(service.loaded()) for service in (self.broker.groups, self.broker.transactions)]
        _, unfinished = await asyncio.wait(loads, timeout=LOADED_SECONDS)
        for load in unfinished:
            load.cancel()

    async def _open_listeners(self) -> None:
        for listener in self.listeners:
            await listener.start_accepting()

    def _start_cleaner(self) -> None:
        if not self._stop_requested.is_set():
            self._cleaner = self._folder.cleaner(self.broker.config, lambda: self.broker.image, self.broker.now_ms)
            self._cleaner.start()

    async def _join_cluster(self) -> None:
        """Writes to the metadata log who and where the brokers are, before the first client can ask."""
        assert isinstance(self.broker.metadata, LocalMetadataService)
        try:
            await self.broker.metadata.call(
                MetadataMachine.register_brokers,
                self._registrations(),
                internal_operation_context(self.broker.now_ms()),
            )
        except KafkaError as error:
            raise StartError(f"{CLUSTER_METADATA_TOPIC} cannot be written: {error}") from None

    def _registrations(self) -> list[BrokerRegistration]:
        return [self._registration(self.broker.config, list(self.broker.endpoints.values()))]

    def _registration(self, config: BrokerConfig, endpoints: list[Listener]) -> BrokerRegistration:
        return BrokerRegistration(
            broker_id=config.node_id,
            incarnation_id=self.broker.uuids.take(),
            endpoints=[(one.name, one.host, one.port, int(one.security_protocol)) for one in endpoints],
            rack=config.broker_rack,
            log_dirs=[uuid_from_string(self._folder.directory_id)],
        )

    def ready(self) -> ReadyLine:
        addresses = [str(one) for one in self.broker.endpoints.values()]
        return ReadyLine(addresses, self.broker.node_id, self.broker.cluster_id)

    async def until_signal(self) -> None:
        await self._stop_requested.wait()

    async def stop(self) -> None:
        """Answers what is under way, then closes in the reverse order of the start."""
        if self._metrics is not None:
            self._metrics.close()
        for listener in self.listeners:
            listener.stop_accepting()
        self.broker.stop_waiting()
        await until(self._loop, lambda: not self.in_flight, self.answer_seconds)
        for listener in self.listeners:
            listener.connections.close()
        written = await self.broker.close()
        ended = self._cleaner is None or self._cleaner.close(WRITER_SECONDS)
        self._folder.close(self.broker.now_ms(), clean=written and ended)

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return sum(listener.connections.in_flight for listener in self.listeners)


async def _bind(listener: SocketListener) -> Listener:
    wanted = listener.address
    try:
        port = await listener.bind()
    except OSError as error:
        raise StartError(f"cannot listen on {wanted}: {error.strerror or error}") from None
    return Listener(wanted.name, wanted.host, port, wanted.security_protocol)
