# SPDX-License-Identifier: Apache-2.0
"""A broker process from its configuration to its end: storage, metadata, groups, topics, listeners, signals, orderly
stop.

Everything that another process or a file can make fail is tried before the ready line, and ends as StartError with a
sentence for people.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import uvloop

from kcoord.config import BrokerConfig, Listener, TopicConfig
from kcoord.config.keys import is_without_effect
from kcoord.config.workers import worker_count, worker_properties
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import BrokerRegistration
from kcoord.runtime.coordinator_runtime import CoordinatorRuntime, LoadError
from kcoord.runtime.serde import TRANSACTION_RECORDS, CoordinatorSerde, MetadataSerde
from kcoord.server.api.api_table import build_api_table
from kcoord.server.api.request_context import internal_operation_context
from kcoord.server.broker import Broker
from kcoord.server.clock import Clock
from kcoord.server.disk.data_folder import Storage, StorageNotUsable
from kcoord.server.net.connection import KafkaConnection
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.random_uuids import RandomUuids
from kcoord.server.shards.fetch_service import FetchService
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import METADATA_SHARD, LocalMetadataService
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.server.workers.peer_calls import NoPeers, PeerCalls
from kcoord.server.workers.worker import Worker
from kcoord.storage.errors import StorageError
from kcoord.storage.segment import LogConfig
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.uuid import uuid_from_string

if TYPE_CHECKING:
    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
    from kcoord.metadata.image import MetadataImage
    from kcoord.server.disk.log_cleaner import LogCleaner
    from kcoord.server.observe.broker_metrics import BrokerMetrics
    from kcoord.server.shards.metadata_operations import MetadataService

_logger = logging.getLogger(__name__)


ANSWER_SECONDS = 2.5
"""How long a stop waits for answers under way; with what follows it stays below the 5 s that are promised."""
WRITER_SECONDS = 1.5
TICK_SECONDS = 1.0
CLEANER_DELAY_SECONDS = 0.5
GC_THRESHOLDS = (50_000, 20, 100)
"""With Python's own, every few thousand new connections or members are a full collection, hundreds of milliseconds for
10,000 members. What a request makes is freed by its reference count; cycles are few, and the young generations find
them.
"""
_STOP_CHECK_SECONDS = 0.01


class StartError(Exception):
    """Why the broker cannot start, in one sentence."""


@dataclass(slots=True)
class Ready:
    """What the ready line tells."""

    addresses: list[str]
    node_id: int
    cluster_id: str
    nodes: int = 1
    """Workers, whose ids begin with `node_id`."""


def run(config: BrokerConfig, on_ready: Callable[[Ready], None]) -> None:
    """Runs a broker until a signal ends it. Raises StartError where it cannot start."""
    if worker_count(config) > 1:
        from kcoord.server.workers.supervisor import Supervisor

        Supervisor(config).run(on_ready)
        return
    if config.kcoord_worker_ports or config.of_workers:
        config = BrokerConfig.from_properties(worker_properties(config, 0))
    uvloop.run(_run(config, on_ready))


async def _run(config: BrokerConfig, on_ready: Callable[[Ready], None]) -> None:
    clock = Clock()
    try:
        storage = Storage(config, clock.now_ms())
    except StorageNotUsable as error:
        raise StartError(str(error)) from None
    try:
        process = BrokerProcess(config, clock, storage, load_metadata(config, storage, clock.now_ms()))
    except BaseException:
        storage.close(clock.now_ms(), clean=True)
        raise
    try:
        process.stop_on_signals()
        await process.start()
        on_ready(process.ready())
        await process.until_signal()
    finally:
        await process.stop()


def load_metadata(config: BrokerConfig, storage: Storage, now_ms: int) -> CoordinatorRuntime[MetadataMachine]:
    """Replays the metadata log: nothing can be served before it is known which topics exist."""
    runtime = CoordinatorRuntime(lambda _: MetadataMachine(config), MetadataSerde())
    log = storage.metadata_logs.open(METADATA_SHARD)
    try:
        runtime.load(METADATA_SHARD, log.batches(log.start_offset), now_ms, log.end_offset)
    except (OSError, StorageError, LoadError) as error:
        raise StartError(f"{CLUSTER_METADATA_TOPIC} cannot be read: {error}") from None
    return runtime


class BrokerProcess:
    """The parts of a running broker, and how they know of each other."""

    owns_heap: ClassVar[bool] = True
    """Whether the collector of this process is ours to tune: not where other programs live in it too."""
    answer_seconds: ClassVar[float] = ANSWER_SECONDS

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        storage: Storage,
        metadata: CoordinatorRuntime[MetadataMachine] | None,
    ) -> None:
        self._config = config
        self._has_joined = False
        self._storage = storage
        self._loop = asyncio.get_running_loop()
        self._stop_requested = asyncio.Event()
        self._tick_timer: asyncio.TimerHandle | None = None
        self._dynamic_configs: Mapping[str, str] = {}
        self._clock = clock
        self.now_ms = clock.now_ms
        self._worker = Worker(
            self._loop, clock.now_ms, storage.journal, gathers=config.group_coordinator_append_linger_ms != 0
        )
        self.wake = self._worker.wake
        self._group_times = GroupTimes(self._newest_creation_time_ms, self._is_loading_groups)
        self._metadata = self._new_metadata_service(metadata)
        runtime = CoordinatorRuntime(
            self._new_group_shard,
            CoordinatorSerde(),
            compression=Compression(config.offsets_topic_compression_codec),
            linger_ms=config.group_coordinator_append_linger_ms,
        )
        log_config = LogConfig(segment_bytes=config.offsets_topic_segment_bytes)
        self._groups = GroupService(
            runtime,
            storage.shard_logs(GROUP_METADATA_TOPIC, log_config, clock.now_ms),
            self,
            configured_shards=config.offsets_topic_num_partitions,
            background_threads=config.group_coordinator_background_threads,
            write_timeout_ms=config.offsets_commit_timeout_ms,
            creation_limits=self._group_times.limits,
        )
        self._transactions = self._transaction_service()
        if isinstance(self._metadata, LocalMetadataService):
            self._worker.add(self._metadata.driver)
        self._worker.add(self._groups.driver)
        self._worker.add(self._transactions.driver)
        uuids = RandomUuids()
        self._broker = Broker(
            config=config,
            cluster_id=storage.cluster_id,
            apis=build_api_table(config),
            image=self._metadata.image,
            topics=storage.topics,
            fetches=FetchService(storage.topics.fetches, clock.now_ms, uuids),
            metadata=self._metadata,
            groups=self._groups,
            transactions=self._transactions,
            now_ms=clock.now_ms,
            controller_id=self.controller_id,
            uuids=uuids,
        )
        self._cleaner: LogCleaner | None = None
        self.bound: dict[str, Listener] = {}
        """The listeners by name, with the ports that they really have."""
        self._metrics: BrokerMetrics | None = None
        limits = ConnectionLimits(config)
        self._listeners = [self._new_listener(one, limits) for one in config.open_listeners]

    @property
    def controller_id(self) -> int:
        return self._config.node_id

    def _new_metadata_service(self, runtime: CoordinatorRuntime[MetadataMachine] | None) -> MetadataService:
        assert runtime is not None, "the metadata log is here"
        return LocalMetadataService(runtime, self._storage.metadata_logs, self, self._group_times)

    def _new_peers(self) -> PeerCalls:
        return NoPeers()

    def _new_listener(self, address: Listener, limits: ConnectionLimits) -> SocketListener:
        return SocketListener(address, self._broker, limits)

    def _transaction_service(self) -> TransactionService:
        config = self._config
        log_config = LogConfig(segment_bytes=config.transaction_state_log_segment_bytes)
        return TransactionService(
            CoordinatorRuntime(self._new_transaction_shard, CoordinatorSerde(TRANSACTION_RECORDS)),
            self._storage.shard_logs(TRANSACTION_STATE_TOPIC, log_config, self.now_ms),
            self,
            self._storage.topics,
            self._groups,
            configured_shards=config.transaction_state_log_num_partitions,
            node_id=config.node_id,
            peers=self._new_peers(),
        )

    # --- what the services ask ----------------------------------------------------------------------------------------

    @property
    def image(self) -> MetadataImage:
        return self._broker.image

    def spawn(self, coroutine: Coroutine[object, object, None]) -> object:
        return self._broker.spawn(coroutine)

    def tombstones_kept_ms(self) -> int:
        configs = self.image.topic_configs(GROUP_METADATA_TOPIC)
        return TopicConfig.resolve(self._config, configs).delete_retention_ms

    def on_shards_given_up(self) -> None:
        self._publish_to_groups(self.image)
        self._publish_to_transactions(self.image)

    def on_coordinator_append(self, shard_id: int, size_bytes: int) -> None:
        self._storage.topics.on_internal_append(GROUP_METADATA_TOPIC, shard_id, size_bytes)

    def latest_group_creation_time_ms(self) -> int:
        return self._groups.latest_creation_time_ms()

    def _newest_creation_time_ms(self) -> int:
        """The latest creation time that a group of this process has, or could get now."""
        image_ms = self._metadata.image.last_creation_time_ms
        return max(self.now_ms(), self.latest_group_creation_time_ms(), image_ms)

    def _is_loading_groups(self) -> bool:
        return not self._has_joined or self._groups.is_loading

    def publish(self, image: MetadataImage) -> None:
        """A new image is durable: everybody sees it before the replies that waited for it leave. The first one is that
        with all brokers of today.
        """
        if not self._has_joined:
            return
        self._broker.image = image
        dynamic = image.effective_broker_configs(self._broker.node_id)
        if dynamic != self._dynamic_configs:
            self._apply_dynamic(dynamic)
        self._storage.topics.on_metadata_update(image, self.now_ms())
        self._publish_to_groups(image)
        self._publish_to_transactions(image)

    def _apply_dynamic(self, dynamic: Mapping[str, str]) -> None:
        """Most keys are read whenever they are needed. What is made of them once is made anew."""
        changed = [name for name, value in dynamic.items() if self._dynamic_configs.get(name) != value]
        ignored = sorted(filter(is_without_effect, changed))
        if ignored:
            _logger.info("Dynamic configs that were accepted, but are without effect: %s", ", ".join(ignored))
        self._dynamic_configs = dynamic
        self._config.apply_dynamic(dynamic)
        left_out = sorted(dynamic.keys() - self._config.dynamic.keys())
        if left_out:
            _logger.warning("Dynamic configs that cannot be used here were left out: %s", ", ".join(left_out))
        # For new connections: whether clients may push metrics.
        self._broker.apis = build_api_table(self._config)

    def _publish_to_groups(self, image: MetadataImage) -> None:
        to_load = self._groups.follow(image.topics.get(GROUP_METADATA_TOPIC), self._broker.node_id)
        if to_load:
            self.spawn(self._load_groups(to_load))
        self._groups.publish(image)

    def _publish_to_transactions(self, image: MetadataImage) -> None:
        to_load = self._transactions.follow(image.topics.get(TRANSACTION_STATE_TOPIC), self._broker.node_id)
        if to_load:
            self.spawn(self._transactions.load(to_load))
        self._transactions.publish(image)

    async def _load_groups(self, shard_ids: list[int]) -> None:
        started_ms = self.now_ms()
        # Only what lives long is made now: the collector need not look at it again and again.
        if self.owns_heap:
            gc.disable()
        try:
            await self._groups.load(shard_ids)
        finally:
            if self.owns_heap:
                gc.enable()
                gc.freeze()
        _logger.info("Loaded %d shards of the group coordinator in %d ms", len(shard_ids), self.now_ms() - started_ms)

    def _new_group_shard(self, shard_id: int) -> GroupCoordinatorShard:
        return GroupCoordinatorShard(self._config, self._broker.image, self._groups.counters)

    def _new_transaction_shard(self, shard_id: int) -> TransactionCoordinatorShard:
        # Most brokers never see a transaction: its modules are not loaded at the start.
        from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard

        image = self._broker.image
        partition = image.partition(TRANSACTION_STATE_TOPIC, shard_id)
        return TransactionCoordinatorShard(self._config, image, partition.leader_epoch if partition is not None else 0)

    def _open_metrics(self) -> BrokerMetrics | None:
        config = self._config
        if config.kcoord_metrics_port < 0:
            return None
        # The library takes a tenth of a second to load: only who asked for it pays.
        from kcoord.server.observe.broker_metrics import BrokerMetrics

        metrics = BrokerMetrics(self._loop, self._groups, self._transactions, self._listeners, self.now_ms)
        host = config.kcoord_metrics_host
        try:
            port = metrics.open(host, config.kcoord_metrics_port)
        except OSError as error:
            where = f"kcoord.metrics.port={config.kcoord_metrics_port} on {host}"
            raise StartError(f"cannot serve metrics, {where}: {error.strerror or error}") from None
        _logger.info("Metrics are at http://%s:%d/metrics", host, port)
        self._worker.measure_writes(metrics.measures.writes)
        for listener in self._listeners:
            if listener.connection_class is KafkaConnection:  # test mode looks at requests in its own way
                listener.new_path = partial(metrics.new_path, listener.path_settings)
        return metrics

    # --- start and stop -----------------------------------------------------------------------------------------------

    def stop_on_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop_requested.set)

    async def start(self) -> None:
        """Joins the cluster, opens what the metadata log names, then the listeners."""
        for listener in self._listeners:
            self.bound[listener.address.name] = await _bind(listener)
        for advertised in self._config.advertised(self.bound, socket.gethostname()):
            self._broker.endpoints[advertised.name] = advertised
        await self._join_cluster()
        self._has_joined = True
        self.publish(self._metadata.image)
        self._metrics = self._open_metrics()
        await self._open_listeners()
        self._tick()
        if self._config.log_cleaner_enable:
            # Nobody waits for it, and it is not needed for the first answer.
            self._loop.call_later(CLEANER_DELAY_SECONDS, self._start_cleaner)
        if self.owns_heap:
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)

    async def _open_listeners(self) -> None:
        for listener in self._listeners:
            await listener.start_accepting()

    def _start_cleaner(self) -> None:
        if not self._stop_requested.is_set():
            self._cleaner = self._storage.cleaner(self._config, lambda: self._broker.image, self.now_ms)
            self._cleaner.start()

    async def _join_cluster(self) -> None:
        """Writes to the metadata log who and where the brokers are, before the first client can ask."""
        assert isinstance(self._metadata, LocalMetadataService)
        registrations = self._registrations()
        try:
            await self._metadata.run(
                lambda machine, context: machine.register_brokers(context, registrations),
                internal_operation_context(self.now_ms()),
            )
        except KafkaError as error:
            raise StartError(f"{CLUSTER_METADATA_TOPIC} cannot be written: {error}") from None

    def _registrations(self) -> list[BrokerRegistration]:
        return [self._registration(self._config, list(self._broker.endpoints.values()))]

    def _registration(self, config: BrokerConfig, endpoints: list[Listener]) -> BrokerRegistration:
        return BrokerRegistration(
            broker_id=config.node_id,
            incarnation_id=self._broker.uuids.take(),
            endpoints=[(one.name, one.host, one.port, int(one.security_protocol)) for one in endpoints],
            rack=config.broker_rack,
            log_dirs=[uuid_from_string(self._storage.directory_id)],
        )

    def _tick(self) -> None:
        """The periodic work on topics: what is due, in small steps."""
        self._tick_timer = self._loop.call_later(TICK_SECONDS, self._tick)
        self._work_on_topics()

    def _work_on_topics(self) -> None:
        try:
            self._storage.topics.tick(self.now_ms())
            self._groups.note_clock_gain(self._clock.gain_ms)
            self._groups.tick()
            self._transactions.tick()
        except Exception:
            _logger.exception("The periodic work on topics and shards failed")

    def ready(self) -> Ready:
        addresses = [str(one) for one in self._broker.endpoints.values()]
        return Ready(addresses, self._broker.node_id, self._broker.cluster_id)

    async def until_signal(self) -> None:
        await self._stop_requested.wait()

    async def stop(self) -> None:
        """Answers what is under way, then closes in the reverse order of the start."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        for listener in self._listeners:
            listener.stop_accepting()
        self._broker.fetches.close()
        await self._until(lambda: not self.in_flight, self.answer_seconds)
        for listener in self._listeners:
            listener.close_connections()
        self._transactions.close()
        self._groups.close()
        self._metadata.close()
        self._broker.cancel_tasks()
        await self._until(lambda: self._worker.is_quiet, WRITER_SECONDS)
        written = self._worker.close(WRITER_SECONDS)
        if written:
            self._groups.finish()
            self._transactions.finish()
        ended = self._cleaner is None or self._cleaner.close(WRITER_SECONDS)
        self._storage.close(self.now_ms(), clean=written and ended)

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return sum(listener.in_flight for listener in self._listeners)

    async def _until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = self._loop.time() + seconds
        while not condition() and self._loop.time() < deadline:
            await asyncio.sleep(_STOP_CHECK_SECONDS)


async def _bind(listener: SocketListener) -> Listener:
    wanted = listener.address
    try:
        port = await listener.bind()
    except OSError as error:
        raise StartError(f"cannot listen on {wanted}: {error.strerror or error}") from None
    return Listener(wanted.name, wanted.host, port, wanted.security_protocol)
