# SPDX-License-Identifier: Apache-2.0
"""A broker process from its configuration to its end: data folder, broker, listeners, signals, shutdown.

Theory of operation
-------------------
A start has these steps. Each step that a file or another process can make fail raises StartError, with a text for
people, before the ready line:

1. The data folder is locked, and the metadata log is replayed (`kcoord.server.disk.data_folder`).
2. The listeners bind their addresses, so the real ports are known. They do not accept connections yet.
3. The broker registers itself: its endpoints and its incarnation go into the metadata log, and the step waits until
   that is durable.
4. `Broker.begin` publishes the first image. The topic store and the coordinators learn which partitions the broker
   leads, and begin to load their shards.
5. The metrics page opens, and the listeners accept connections. Requests for a shard that is still loading fail with
   COORDINATOR_LOAD_IN_PROGRESS.
6. The ready line is printed when all shards are loaded, or `LOADED_SECONDS` after step 5.

The log cleaner starts `CLEANER_DELAY_SECONDS` later.

SIGTERM, SIGINT or SIGHUP requests a shutdown. A signal during the steps 2 to 6 of a start ends that step, since it may
wait for another process for ever. A shutdown has these steps:

1. Listeners close their sockets, and connections read no further requests.
2. Parked fetches fail with NOT_LEADER_OR_FOLLOWER. Other responses in flight have `answer_seconds` to leave. Each
   connection is closed when its last response has left, or then.
3. The coordinators close. The log writer has `WRITER_SECONDS` to finish. Then the last snapshots are saved.
4. The log cleaner ends between two slices of work.
5. The data folder is closed. It gets the clean-shutdown marker only if no write was left in flight.

A crash at any point leaves a folder that the next start repairs: see `kcoord.server.disk.log_writer` for the logs of
coordinators.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from kcoord.config import BrokerConfig, Listener
from kcoord.config.broker_settings import UPSTREAM_KEY
from kcoord.config.scram_users import BOOTSTRAP_SCRAM
from kcoord.metadata.bootstrap import credential_records
from kcoord.metadata.records import BrokerRegistration
from kcoord.metadata.upstream import has_upstream
from kcoord.runtime.result import CoordinatorRecord
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
from kcoord_protocol.scram_mechanisms import ScramMechanism, salt_of
from kcoord_protocol.uuid import uuid_from_string

if TYPE_CHECKING:
    # The metrics library takes a tenth of a second to import. A broker without metrics does not import it.
    from kcoord.server.disk.log_cleaner import LogCleaner
    from kcoord.server.observe.broker_metrics import BrokerMetrics

_logger = logging.getLogger(__name__)

NewListener: TypeAlias = Callable[[Listener, Broker, ConnectionLimits], SocketListener]

ANSWER_SECONDS = 2.5
"""The time that a shutdown waits for responses in flight. The whole shutdown stays below the documented 5 s."""
CLEANER_DELAY_SECONDS = 0.5
SCRAM_NAMES = frozenset(mechanism.mechanism_name for mechanism in ScramMechanism)
LOADED_SECONDS = 0.25
"""The longest time that the ready line waits for loading shards.

Clients that connect right after the ready line would otherwise have to retry.
"""
GC_THRESHOLDS = (4_000, 1, 2_500)
"""Thresholds of the garbage collector.

Every collection stops all threads. With Python's defaults, every few thousand new connections or members cause a full
collection, which takes hundreds of milliseconds for 10,000 members. Reference counts free the objects of a request.
Cycles are few, and collections of the two young generations find them. They look at 12,000 objects at most, which
takes 2 to 7 ms on a slow machine.
"""


def freeze_survivors(phase: str, info: dict[str, int]) -> None:
    """Freezes the objects that have survived collections of both young generations.

    So the oldest generation stays empty, and no collection grows with the broker's state. Reference counts still free
    these objects. A cycle that becomes garbage later than that stays in memory; the broker has no such cycles.
    """
    if phase == "stop" and info["generation"]:
        gc.freeze()


@dataclass(slots=True)
class ReadyLine:
    """The content of the ready line."""

    addresses: list[str]
    node_id: int
    cluster_id: str
    nodes: int = 1
    """The number of brokers. With several workers their ids are consecutive and begin with `node_id`."""


async def run_process(config: BrokerConfig, on_ready: Callable[[ReadyLine], None]) -> None:
    """Runs a broker that is one process until a signal ends it. Raises StartError if it cannot start."""
    environment = process_environment()
    folder = DataFolder(config, environment.now_ms(), uuids=environment.uuids)
    try:
        process = BrokerProcess(compose(config, environment, folder), environment, folder)
    except BaseException:
        folder.close(environment.now_ms(), clean=True)
        raise
    await process.run(on_ready)


def process_environment() -> Environment:
    """Returns the environment of a broker that has this process and its running event loop for itself."""
    clock = Clock()
    return Environment(asyncio.get_running_loop(), clock.now_ms, clock_gain_ms=clock.gain_ms, owns_heap=True)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that request a stop, as in Kafka: SIGHUP is one of them unless it is ignored (`nohup`)."""
    has_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if has_hangup else [])]


class BrokerProcess:
    """A broker with its listeners. The module text describes start and shutdown. All methods run in the event loop."""

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
        self.bound_listeners: dict[str, Listener] = {}
        """The listeners by name, with the ports that they are bound to."""
        self._metrics: BrokerMetrics | None = None
        if broker.config.kcoord_audit_log:
            # Most brokers have no audit log, and do not load what it needs.
            from kcoord.server.observe.audit_log import AuditLog

            broker.audit = AuditLog(broker.config, broker.topics.topic_name)
        limits = ConnectionLimits(broker.config, lambda: broker.quotas.connections if broker.quotas else None)
        self.listeners = [new_listener(address, broker, limits) for address in broker.config.open_listeners]

    def _open_metrics(self) -> BrokerMetrics | None:
        broker = self.broker
        config = broker.config
        if config.kcoord_metrics_port < 0:
            return None
        from kcoord.server.observe.broker_metrics import BrokerMetrics

        metrics = BrokerMetrics(self._loop, broker, self.listeners)
        host = config.kcoord_metrics_host
        try:
            port = metrics.open(host, config.kcoord_metrics_port)
        except OSError as error:
            where = f"kcoord.metrics.port={config.kcoord_metrics_port} on {host}"
            raise StartError(f"cannot serve metrics, {where}: {error.strerror or error}") from None
        _logger.info("Metrics are at http://%s:%d/metrics", host, port)
        broker.pump.measure_writes(metrics.measures.writes)
        for listener in self.listeners:
            # Test mode has listeners of its own, which observe requests themselves.
            if type(listener) is SocketListener:
                listener.connections.new_path = partial(metrics.new_path, listener.path_settings)
        return metrics

    async def run(self, on_ready: Callable[[ReadyLine], None]) -> None:
        """Serves until a signal. Raises StartError if the broker cannot start."""
        starting = self._loop.create_task(self._start_and_load())
        stopping = self._loop.create_task(self._stop_requested.wait())
        try:
            self.stop_on_signals()
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                on_ready(self.ready())
            await self.until_signal()
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.wait((starting, stopping))
            await self.stop()

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        """Requests a stop on each of the `stop_signals`."""
        for number in stop_signals():
            self._loop.add_signal_handler(number, self._stop_requested.set)

    async def start(self) -> None:
        """Takes the steps 2 to 5 of a start. Raises StartError if one fails."""
        for listener in self.listeners:
            self.bound_listeners[listener.address.name] = await _bind(listener)
        for advertised in self.broker.config.advertised(self.bound_listeners, socket.gethostname()):
            self.broker.endpoints[advertised.name] = advertised
        await self._join_cluster()
        self.broker.begin()
        self._metrics = self._open_metrics()
        await self._open_listeners()
        if self.broker.config.log_cleaner_enable:
            # The first responses do not need the cleaner, so the start does not wait for its import.
            self._loop.call_later(CLEANER_DELAY_SECONDS, self._start_cleaner)
        if self._environment.owns_heap:
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            gc.callbacks.append(freeze_survivors)

    async def _start_and_load(self) -> None:
        await self.start()
        await self._await_loads()

    async def _await_loads(self) -> None:
        """Waits for the coordinators' shards, at most `LOADED_SECONDS`. Clients are served meanwhile."""
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
        """Registers the brokers in the metadata log, before the first client can ask for them."""
        assert isinstance(self.broker.metadata, LocalMetadataService)
        if has_upstream(self.broker.image):
            raise StartError(
                f"log.dirs={self.broker.config.data_folders[0]} has the groups of another cluster; "
                f"set {UPSTREAM_KEY}, or use another folder"
            )
        credentials = self._bootstrap_credentials()
        if not credentials and not self.broker.image.scram_credentials:
            _check_that_clients_can_log_in(self._configs())
        try:
            await self.broker.metadata.call(
                lambda machine, context, request: machine.register_brokers(context, request, credentials),
                self._registrations(),
                internal_operation_context(self.broker.now_ms()),
            )
        except KafkaError as error:
            raise StartError(f"{CLUSTER_METADATA_TOPIC} cannot be written: {error}") from None

    def _bootstrap_credentials(self) -> list[CoordinatorRecord]:
        """Returns the credentials of kcoord.bootstrap.scram for a new cluster, none for an existing one."""
        users = self.broker.config.bootstrap_users
        if not users:
            return []
        if self.broker.image.features:
            _logger.info("%s has no effect: the cluster exists", BOOTSTRAP_SCRAM)
            return []
        _logger.info("The first users of the cluster come from %s: %d", BOOTSTRAP_SCRAM, len(users))
        uuids = self.broker.uuids
        return credential_records(users, lambda: salt_of(uuids.take() + uuids.take()))

    def _configs(self) -> list[BrokerConfig]:
        """Returns the configuration of each broker of the cluster."""
        return [self.broker.config]

    def _registrations(self) -> list[BrokerRegistration]:
        return [self._registration(self.broker.config, list(self.broker.endpoints.values()))]

    def _registration(self, config: BrokerConfig, endpoints: list[Listener]) -> BrokerRegistration:
        return BrokerRegistration(
            broker_id=config.node_id,
            incarnation_id=self.broker.uuids.take(),
            endpoints=[
                (endpoint.name, endpoint.host, endpoint.port, int(endpoint.security_protocol)) for endpoint in endpoints
            ],
            rack=config.broker_rack,
            log_dirs=[uuid_from_string(self._folder.directory_id)],
        )

    def ready(self) -> ReadyLine:
        """Returns the content of the ready line."""
        addresses = [str(endpoint) for endpoint in self.broker.endpoints.values()]
        return ReadyLine(addresses, self.broker.node_id, self.broker.cluster_id)

    async def until_signal(self) -> None:
        """Returns when a stop is requested."""
        await self._stop_requested.wait()

    async def stop(self) -> None:
        """Answers the requests in flight, then closes everything in the reverse order of the start."""
        if self._metrics is not None:
            self._metrics.close()
        for listener in self.listeners:
            listener.stop_accepting()
        await self._leave_cluster()
        self.broker.stop_waiting()
        await until(self._loop, self._close_answered, self.answer_seconds)
        for listener in self.listeners:
            listener.connections.close()
        written = await self.broker.close()
        if self.broker.audit is not None:
            self.broker.audit.file.close()
        ended = self._cleaner is None or self._cleaner.close(WRITER_SECONDS)
        self._folder.close(self.broker.now_ms(), clean=written and ended)

    async def _leave_cluster(self) -> None:
        """Called at a stop, when connections read no further requests. A cluster of workers needs no farewell."""

    def _close_answered(self) -> bool:
        """Closes the connections that have all their responses. Returns whether these are all connections."""
        for listener in self.listeners:
            listener.connections.close_answered()
        return not self.in_flight

    @property
    def in_flight(self) -> int:
        """The number of requests that are not answered yet."""
        return sum(listener.connections.in_flight for listener in self.listeners)


def _check_that_clients_can_log_in(configs: Iterable[BrokerConfig]) -> None:
    """Raises StartError if all listeners of all workers need a login with SCRAM.

    Called if no user has a credential for it.
    """
    listeners = [(config, listener) for config in configs for listener in config.open_listeners]
    for config, listener in listeners:
        if not listener.security_protocol.has_sasl or set(config.sasl_mechanisms(listener)) - SCRAM_NAMES:
            return
    addresses = ",".join(str(listener) for _, listener in listeners)
    raise StartError(
        f"no client can log in: all of listeners={addresses} need a login with SCRAM, and there is no "
        f"user. Set {BOOTSTRAP_SCRAM} or use kcoord storage format --add-scram for a new cluster; for an existing one, "
        "add a PLAINTEXT listener on 127.0.0.1 and create a user with kcoord users add"
    )


async def _bind(listener: SocketListener) -> Listener:
    address = listener.address
    try:
        port = await listener.bind()
    except OSError as error:
        raise StartError(f"cannot listen on {address}: {error.strerror or error}") from None
    return Listener(address.name, address.host, port, address.security_protocol)
