# SPDX-License-Identifier: Apache-2.0
"""The coordinator shards of one kind in this process: their logs, loading, metadata updates, and reloading after a
failure.

A shard answers only between being loaded and failing; before and after, clients are told to come again or to look
elsewhere, never a guess.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.metadata.delta import TopicDelta
from kcoord.metrics.measures import Histogram
from kcoord.runtime.coordinator_runtime import LoadError, ShardState
from kcoord.runtime.hashing import partition_for
from kcoord.runtime.result import StateMachine
from kcoord.server.api.api_table import internal_operation_context
from kcoord.server.environment import NewPool, thread_pool
from kcoord.server.shards.runtime_driver import RuntimeDriver
from kcoord.server.shards.shard_snapshots import ShardSnapshots
from kcoord.storage.errors import PartitionHeldError, StorageError
from kcoord.topics.schedule import Every
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.metadata.image import MetadataImage, TopicImage
    from kcoord.runtime.coordinator_runtime import CoordinatorRuntime
    from kcoord.runtime.result import CoordinatorResult, OperationContext, Task
    from kcoord.runtime.snapshot import Snapshot
    from kcoord.server.api.replies import Reply
    from kcoord.server.disk.log_writer import WritableLog
    from kcoord.server.disk.shard_logs import ShardLogs
    from kcoord.storage.errors import CorruptLogError
    from kcoord.storage.log import Log

_logger = logging.getLogger(__name__)

R = TypeVar("R")
T = TypeVar("T")

FIRST_RELOAD_SECONDS = 1.0
LONGEST_RELOAD_SECONDS = 60.0
_FULL_DISK_RELOAD_SECONDS = 0.25
INDEX_STORE_INTERVAL_MS = 30_000
"""Half of what lies between two recovery points (log.flush.offset.checkpoint.interval.ms)."""
_WRITE_CHECK_SECONDS = 0.005
_HELD_CHECK_SECONDS = 0.05


class CoordinatorMachine(StateMachine, Protocol):
    """A state machine whose operations depend on the metadata image."""

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]: ...


M = TypeVar("M", bound=CoordinatorMachine)


class ShardOwner(Protocol):
    """What the process gives to a service."""

    @property
    def image(self) -> MetadataImage: ...

    def now_ms(self) -> int: ...

    def wake(self) -> None: ...

    def spawn(self, coroutine: Coroutine[object, object, None]) -> object: ...

    def tombstones_kept_ms(self) -> int:
        """`delete.retention.ms` of the coordinators' logs."""

    def on_shards_given_up(self) -> None:
        """The logs of a deleted internal topic are out of use: one of that name can be taken over now."""


class ShardService(Generic[M]):
    """See the module's text. `name` is for log lines; a subclass starts tasks and hears of growing logs."""

    def __init__(
        self,
        name: str,
        runtime: CoordinatorRuntime[M],
        logs: ShardLogs,
        owner: ShardOwner,
        *,
        configured_shards: int,
        creation_limits: CreationLimits | None = None,
        new_pool: NewPool = thread_pool,
    ) -> None:
        self.name = name
        self._creation_limits = creation_limits or CreationLimits()
        self._runtime = runtime
        self._logs = logs
        self._owner = owner
        self._configured_shards = configured_shards
        self._loop = asyncio.get_running_loop()
        self._shard_count = 0
        self._own_shards: Collection[int] = range(0)
        self._topic_id: bytes | None = None
        self._followed: TopicImage | None = None
        self._leaving: set[int] = set()
        """Shards that others lead, whose logs are still open here."""
        self._giving_up = False
        self._reload_seconds: dict[int, float] = {}
        self._last_failed: dict[int, float] = {}
        self.load_times = Histogram()
        self._published: MetadataImage | None = None
        self._closing = False
        self._index_store = Every(INDEX_STORE_INTERVAL_MS)
        self.driver: RuntimeDriver[M] = RuntimeDriver(name, runtime, self)
        self._snapshots = ShardSnapshots(
            name, runtime, logs, logs.file_system, owner.now_ms, self._on_damage, owner.tombstones_kept_ms, new_pool
        )
        self.append_observers: list[Callable[[int, int], None]] = [self._snapshots.on_grown]
        """Called with shard and size when a batch has become durable: clients may read it, too."""

    # --- what handlers use --------------------------------------------------------------------------------------------

    @property
    def shard_ids(self) -> Collection[int]:
        """The shards of this worker, in ascending order; none before the internal topic exists."""
        return self._own_shards

    def shard_of(self, key: str) -> int:
        return partition_for(key, self._shard_count or self._configured_shards)

    def call(
        self,
        key: str,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Runs an operation of the state machine on the shard of a group id or transactional id."""
        return self.call_shard(
            partition_for(key, self._shard_count or self._configured_shards), operation, request, context
        )

    def call_shard(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Raises KafkaError if the operation fails at once, and NOT_COORDINATOR if another broker has the shard."""
        if shard_id not in self._own_shards:
            raise KafkaError(Errors.NOT_COORDINATOR)
        context.creation_limit_ms = self._creation_limits.limit_ms
        return self.driver.run(shard_id, operation, request, context)

    # --- what metrics ask ---------------------------------------------------------------------------------------------

    def machine(self, shard_id: int) -> M | None:
        """The state machine of an active shard, to look at."""
        return self._runtime.machine(shard_id)

    def count_states(self) -> Mapping[str, int]:
        """Shards by state, in Kafka's words for those that Kafka has."""
        return Counter(self._runtime.state(shard_id).value.lower() for shard_id in self.shard_ids)

    # --- the life of the shards ---------------------------------------------------------------------------------------

    def follow(self, topic: TopicImage | None, node_id: int) -> list[int]:
        """Takes over what broker `node_id` leads of the internal topic, and gives up what others lead, and all of it
        when the topic is deleted, as Kafka lets clients do. Returns the shards that have a log, to be given to `load`.
        """
        topic_id = topic.id if topic is not None else None
        if self._giving_up or topic is self._followed:
            return []
        self._followed = topic
        if topic is not None and topic_id == self._topic_id:
            return self._follow_leaders(topic, node_id)
        if self._topic_id is not None:
            self._giving_up = True
            self._owner.spawn(self._give_up(list(self.shard_ids), self._topic_id))
            return []
        assert topic is not None
        self._topic_id = topic_id
        own = [partition.partition_id for partition in topic.partitions if partition.leader == node_id]
        return self.open_shards(len(topic.partitions), own)

    def _follow_leaders(self, topic: TopicImage, node_id: int) -> list[int]:
        """Other brokers lead some of the partitions from now on, or this one does."""
        led = {partition.partition_id for partition in topic.partitions if partition.leader == node_id}
        own = set(self._own_shards)
        lost = sorted(own - led)
        gained = sorted(led - own - self._leaving)
        if not lost and not gained:
            return []
        self._set_own(sorted((own - set(lost)) | set(gained)))
        if lost:
            self._leaving.update(lost)
            for shard_id in lost:
                self._runtime.close_shard(shard_id)
            self._owner.spawn(self._hand_over(lost))
        for shard_id in gained:
            # Whether there is a log is only known when its last leader has let go of it.
            self._logs.note_gained(shard_id)
            self._runtime.start_load(shard_id, ())
        self.wake()
        _logger.info("Of %s, %d shards are led here now, %d elsewhere", self.name, len(gained), len(lost))
        return gained

    async def _hand_over(self, shard_ids: list[int]) -> None:
        """Who waits is told to look elsewhere; the logs go when nothing is being written any more."""
        await self._written(shard_ids)
        self._logs.hand_over(shard_ids)
        self._leaving.difference_update(shard_ids)
        self._followed = None
        self._owner.on_shards_given_up()

    async def _written(self, shard_ids: list[int]) -> None:
        self.wake()
        while any(self._runtime.is_writing(shard_id) for shard_id in shard_ids):
            await asyncio.sleep(_WRITE_CHECK_SECONDS)

    async def _give_up(self, shard_ids: list[int], topic_id: bytes) -> None:
        """Who waits is told to look elsewhere; the logs go when nothing is being written any more."""
        self._shard_count, self._own_shards = 0, range(0)
        for shard_id in shard_ids:
            self._runtime.close_shard(shard_id)
        await self._written([*shard_ids, *self._leaving])
        _logger.warning("The topic of the %s was deleted: %d shards are given up", self.name, len(shard_ids))
        self._logs.delete(shard_ids, topic_id)
        self._topic_id, self._followed, self._giving_up = None, None, False
        self._owner.on_shards_given_up()

    def open_shards(self, count: int, own: Sequence[int] | None = None) -> list[int]:
        """Takes over all of the `count` partitions of the internal topic, or those in `own`. Returns the shards that
        have a log, to be given to `load`.
        """
        assert not self._shard_count, "the number of shards never changes"
        self._shard_count = count
        self._set_own(range(count) if own is None else own)
        to_load = []
        for shard_id in self._own_shards:
            if self._logs.exists(shard_id):
                self._runtime.start_load(shard_id, ())
                to_load.append(shard_id)
            else:
                self._runtime.load(shard_id, (), self._owner.now_ms())
        self.wake()
        return to_load

    def _set_own(self, own: Sequence[int]) -> None:
        """Asked at every request, so it is a range or a set of keys."""
        self._own_shards = range(self._shard_count) if len(own) == self._shard_count else dict.fromkeys(own).keys()

    async def load(self, shard_ids: list[int]) -> None:
        """Replays the logs in turn, and lets others have the event loop between slices."""
        for shard_id in shard_ids:
            await self._load(shard_id)

    async def _load(self, shard_id: int) -> None:
        if not self._is_to_load(shard_id):
            return
        began = self._loop.time()
        try:
            log = self._logs.open(shard_id)
            snapshot = self._snapshots.read(shard_id, log)
            try:
                await self._replay(shard_id, log, snapshot)
            except LoadError as error:
                if snapshot is None or not self._is_to_load(shard_id):
                    raise
                _logger.warning("The snapshot of %s is not used, the whole log is read: %s", log.directory, error)
                snapshot = None
                await self._replay(shard_id, log, None)
        except PartitionHeldError:
            # Who led it before has not heard of the change yet, or is closing the log.
            if self._is_to_load(shard_id) and not self._closing:
                self._loop.call_later(_HELD_CHECK_SECONDS, self._reload, shard_id)
            return
        except (OSError, StorageError, LoadError) as error:
            if self._is_to_load(shard_id):
                _logger.error("Loading shard %d of %s failed: %s", shard_id, self.name, error)
                self._reload_later(shard_id)
            return
        self._reload_seconds.pop(shard_id, None)
        self.load_times.add((self._loop.time() - began) * 1000)
        self._snapshots.on_loaded(shard_id, log, snapshot)
        # The image may have changed since the machine was made.
        self._update_shard(shard_id, self._owner.image)

    async def _replay(self, shard_id: int, log: Log, snapshot: Snapshot | None) -> None:
        start_offset = log.start_offset if snapshot is None else snapshot.offset
        chunks = () if snapshot is None else snapshot.chunks
        loader = self._runtime.start_load(shard_id, log.batches(start_offset), log.end_offset, chunks)
        while not loader.step(self._owner.now_ms()):
            await asyncio.sleep(0)

    def _on_damage(self, shard_id: int, error: CorruptLogError) -> None:
        """Found behind a snapshot, and treated as it would be without one: the shard is refused."""
        _logger.error("The log of shard %d of %s is damaged: %s", shard_id, self.name, error)
        self._snapshots.distrust(shard_id)
        self._runtime.fail_shard(shard_id, str(error))
        self.wake()

    def tick(self) -> None:
        """Once a second: snapshots, if some are due, and index files, so that recovery points are worth something."""
        if self._index_store.is_due(self._owner.now_ms()):
            self._loop.run_in_executor(None, self._logs.store_indexes)
        if self._snapshots.is_due():
            self._owner.spawn(self._snapshots.take_due())

    def finish(self) -> None:
        """At an orderly stop, when everything is written."""
        self._snapshots.take_last()
        self._logs.end_index_store()

    def _is_to_load(self, shard_id: int) -> bool:
        """Not if its topic was deleted meanwhile, and perhaps made again."""
        return shard_id in self.shard_ids and self._runtime.state(shard_id) is not ShardState.ACTIVE

    def on_failed(self, shard_id: int) -> None:
        """A full disk can be read: there the shard is loaded at once, but not again and again."""
        self._logs.close(shard_id)
        now = self._loop.time()
        since = now - self._last_failed.get(shard_id, -LONGEST_RELOAD_SECONDS)
        self._last_failed[shard_id] = now
        if self._runtime.is_read_only(shard_id, self._owner.now_ms()):
            self._loop.call_later(max(_FULL_DISK_RELOAD_SECONDS - since, 0.0), self._reload, shard_id)
        else:
            self._reload_later(shard_id)

    def _reload_later(self, shard_id: int) -> None:
        if self._closing:
            return
        seconds = self._reload_seconds.get(shard_id, FIRST_RELOAD_SECONDS)
        self._reload_seconds[shard_id] = min(seconds * 2, LONGEST_RELOAD_SECONDS)
        _logger.warning("Shard %d of %s is loaded again in %.0f s", shard_id, self.name, seconds)
        self._loop.call_later(seconds, self._reload, shard_id)

    def _reload(self, shard_id: int) -> None:
        if not self._closing and self._is_to_load(shard_id):
            self._logs.close(shard_id)
            self._owner.spawn(self._load(shard_id))

    def close(self) -> None:
        self._closing = True
        self._snapshots.close()

    # --- metadata -----------------------------------------------------------------------------------------------------

    def publish(self, image: MetadataImage) -> None:
        """Tells every active shard of a new image; one that is loading is told when it is through."""
        delta = TopicDelta.between(self._published, image) if self._published is not None else None
        self._published = image
        for shard_id in self.shard_ids:
            if self._runtime.state(shard_id) is ShardState.ACTIVE:
                self._update_shard(shard_id, image, delta)

    def _update_shard(self, shard_id: int, image: MetadataImage, delta: TopicDelta | None = None) -> None:
        def operation(shard: M, context: OperationContext, image: MetadataImage) -> CoordinatorResult[None]:
            return shard.on_metadata_update(context, image, delta)

        try:
            self.driver.run_unanswered(shard_id, operation, image, internal_operation_context(self._owner.now_ms()))
        except KafkaError as error:
            _logger.error("Shard %d of %s did not take a metadata image: %s", shard_id, self.name, error)

    # --- what the driver asks -----------------------------------------------------------------------------------------

    def log_of(self, shard_id: int) -> WritableLog:
        return self._logs.writable(shard_id)

    def on_append_started(self, shard_id: int) -> None:
        """Nothing to note: coordinators publish nothing."""

    def on_append_durable(self, shard_id: int, size_bytes: int) -> None:
        for observe in self.append_observers:
            observe(shard_id, size_bytes)

    def start_task(self, shard_id: int, task: Task) -> None:
        raise AssertionError(f"shards of {self.name} have no tasks, got {task}")

    def wake(self) -> None:
        self._owner.wake()

    def task_done(self, shard_id: int, task: Task, value: object) -> None:
        """Hands the outcome of a task to its shard."""
        self._runtime.complete_task(shard_id, task, value, internal_operation_context(self._owner.now_ms()))
        self.wake()
