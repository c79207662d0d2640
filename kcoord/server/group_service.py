# SPDX-License-Identifier: Apache-2.0
"""The group coordinator shards of this process: their logs, loading, metadata updates, background tasks, and reloading
after a failure.

A shard answers only between being loaded and failing; before and after, clients are told to come again or to look
elsewhere, never a guess.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from kcoord.coordinator.group.regex import ResolveRegex, resolve
from kcoord.coordinator.runtime.runtime import LoadError, ShardState
from kcoord.coordinator.service import partition_for
from kcoord.server.request_context import internal_operation_context
from kcoord.server.runtime_driver import RuntimeDriver
from kcoord.storage.errors import StorageError
from protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from kcoord.coordinator.group.shard import GroupCoordinatorShard
    from kcoord.coordinator.result import CoordinatorResult, OperationContext, Task
    from kcoord.coordinator.runtime.runtime import CoordinatorRuntime
    from kcoord.metadata.image import MetadataImage
    from kcoord.server.broker import GroupOperation, Reply
    from kcoord.server.log_writer import WritableLog
    from kcoord.server.shard_logs import ShardLogs

_logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_RELOAD_SECONDS = 1.0
LONGEST_RELOAD_SECONDS = 60.0


class ServiceOwner(Protocol):
    """What the process gives to the service."""

    @property
    def image(self) -> MetadataImage: ...

    def now_ms(self) -> int: ...

    def wake(self) -> None: ...

    def on_coordinator_append(self, shard_id: int, size_bytes: int) -> None:
        """The log of a shard grew: clients may read it, too."""

    def spawn(self, coroutine: Coroutine[object, object, None]) -> object: ...


class LocalGroupService:
    """Serves `Broker.groups`; see the module's text."""

    def __init__(
        self,
        runtime: CoordinatorRuntime[GroupCoordinatorShard],
        logs: ShardLogs,
        owner: ServiceOwner,
        *,
        configured_shards: int,
        background_threads: int,
    ) -> None:
        self._runtime = runtime
        self._logs = logs
        self._owner = owner
        self._configured_shards = configured_shards
        self._background_threads = background_threads
        self._loop = asyncio.get_running_loop()
        self._shard_count = 0
        self._reload_seconds: dict[int, float] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._closing = False
        self.driver: RuntimeDriver[GroupCoordinatorShard] = RuntimeDriver("groups", runtime, self)

    # --- what handlers use --------------------------------------------------------------------------------------------

    @property
    def shard_ids(self) -> range:
        """The shards of this process; none before the internal topic exists."""
        return range(self._shard_count)

    def shard_of(self, group_id: str) -> int:
        return partition_for(group_id, self._shard_count or self._configured_shards)

    def run(self, group_id: str, operation: GroupOperation[T], context: OperationContext) -> Reply[T]:
        return self.run_on_shard(self.shard_of(group_id), operation, context)

    def run_on_shard(self, shard_id: int, operation: GroupOperation[T], context: OperationContext) -> Reply[T]:
        if shard_id >= self._shard_count:
            raise KafkaError(Errors.NOT_COORDINATOR)
        return self.driver.run(shard_id, operation, context)

    # --- the life of the shards ---------------------------------------------------------------------------------------

    def open_shards(self, count: int) -> list[int]:
        """Takes over the `count` partitions of the internal topic. Returns the shards that have a log, to be given to
        `load`.
        """
        assert not self._shard_count, "the number of shards never changes"
        self._shard_count = count
        to_load = []
        for shard_id in range(count):
            if self._logs.exists(shard_id):
                self._runtime.start_load(shard_id, ())
                to_load.append(shard_id)
            else:
                self._runtime.load(shard_id, (), self._owner.now_ms())
        return to_load

    async def load(self, shard_ids: list[int]) -> None:
        """Replays the logs in turn, and lets others have the event loop between slices."""
        for shard_id in shard_ids:
            await self._load(shard_id)

    async def _load(self, shard_id: int) -> None:
        try:
            log = self._logs.open(shard_id)
            loader = self._runtime.start_load(shard_id, log.batches(log.start_offset), log.end_offset)
            while not loader.step(self._owner.now_ms()):
                await asyncio.sleep(0)
        except (OSError, StorageError, LoadError) as error:
            _logger.error("Loading shard %d of the group coordinator failed: %s", shard_id, error)
            self._reload_later(shard_id)
            return
        self._reload_seconds.pop(shard_id, None)
        # The image may have changed since the machine was made.
        self._update_shard(shard_id, self._owner.image)

    def on_failed(self, shard_id: int) -> None:
        self._logs.close(shard_id)
        self._reload_later(shard_id)

    def _reload_later(self, shard_id: int) -> None:
        if self._closing:
            return
        seconds = self._reload_seconds.get(shard_id, FIRST_RELOAD_SECONDS)
        self._reload_seconds[shard_id] = min(seconds * 2, LONGEST_RELOAD_SECONDS)
        _logger.warning("Shard %d of the group coordinator is loaded again in %.0f s", shard_id, seconds)
        self._loop.call_later(seconds, self._reload, shard_id)

    def _reload(self, shard_id: int) -> None:
        if not self._closing:
            self._logs.close(shard_id)
            self._owner.spawn(self._load(shard_id))

    # --- metadata -----------------------------------------------------------------------------------------------------

    def publish(self, image: MetadataImage) -> None:
        """Tells every active shard of a new image; one that is loading is told when it is through."""
        for shard_id in self.shard_ids:
            if self._runtime.state(shard_id) is ShardState.ACTIVE:
                self._update_shard(shard_id, image)

    def _update_shard(self, shard_id: int, image: MetadataImage) -> None:
        def operation(shard: GroupCoordinatorShard, context: OperationContext) -> CoordinatorResult[None]:
            return shard.on_metadata_update(context, image)

        try:
            self.driver.run_unanswered(shard_id, operation, internal_operation_context(self._owner.now_ms()))
        except KafkaError as error:
            _logger.error("Shard %d of the group coordinator did not take a metadata image: %s", shard_id, error)

    # --- what the driver asks -----------------------------------------------------------------------------------------

    def log_of(self, shard_id: int) -> WritableLog:
        return self._logs.writable(shard_id)

    def on_append_started(self, shard_id: int) -> None:
        """Nothing to note: groups publish nothing."""

    def on_append_durable(self, shard_id: int, size_bytes: int) -> None:
        self._owner.on_coordinator_append(shard_id, size_bytes)

    def wake(self) -> None:
        self._owner.wake()

    # --- background tasks ---------------------------------------------------------------------------------------------

    def start_task(self, shard_id: int, task: Task) -> None:
        future = self._loop.run_in_executor(self._thread_pool(), _work, task, list(self._owner.image.topics))
        future.add_done_callback(partial(self._task_done, shard_id, task))

    def _thread_pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            from concurrent.futures import ThreadPoolExecutor

            self._threads = ThreadPoolExecutor(self._background_threads, thread_name_prefix="kcoord-background")
        return self._threads

    def _task_done(self, shard_id: int, task: Task, future: asyncio.Future[object]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            _logger.error("A background task of shard %d failed", shard_id, exc_info=error)
        value = future.result() if error is None else error
        self._runtime.complete_task(shard_id, task, value, internal_operation_context(self._owner.now_ms()))
        self.wake()

    def close(self) -> None:
        self._closing = True
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _work(task: Task, topic_names: list[str]) -> object:
    """Runs in a thread; sees nothing but its arguments."""
    if isinstance(task.work, ResolveRegex):
        return resolve(task.work, topic_names)
    raise AssertionError(f"unknown work {task.work!r}")
