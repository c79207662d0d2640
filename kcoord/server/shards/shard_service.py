# SPDX-License-Identifier: Apache-2.0
"""The coordinator shards of one kind in this process: requests of handlers, the internal topic's leaders, metadata
updates.

A shard answers only between being loaded and failing; before and after, clients are told to come again or to look
elsewhere, never a guess.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar, cast

from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.metadata.delta import TopicDelta
from kcoord.metadata.image import MetadataImage, TopicImage
from kcoord.metrics.measures import Histogram
from kcoord.runtime.hashing import partition_for
from kcoord.runtime.outbox import DeferredReply
from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine, Task
from kcoord.runtime.shard_log import Load, ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.environment import Environment
from kcoord.server.replies import Reply, internal_operation_context
from kcoord.server.shards.pump import ShardDriver

R = TypeVar("R")
T = TypeVar("T")


class CoordinatorMachine(StateMachine, Protocol):
    """A state machine whose operations depend on the metadata image."""

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]: ...


M = TypeVar("M", bound=CoordinatorMachine)


class ShardService(ShardDriver[M]):
    """See the module's text. A subclass starts tasks and hears of growing logs. `image` returns the newest metadata
    image, `wake` makes the pump collect what the shards have ready.
    """

    def __init__(
        self,
        shards: ShardSet[M],
        log: ShardLog,
        environment: Environment,
        image: Callable[[], MetadataImage],
        wake: Callable[[], None],
        *,
        creation_limits: CreationLimits | None = None,
    ) -> None:
        super().__init__(shards, log, wake)
        self.release_observers: list[Callable[[], None]] = []
        """Called when the logs of a deleted internal topic are out of use: one of that name can be taken over now."""
        self.load_times = Histogram()
        self._creation_limits = creation_limits or CreationLimits()
        self._environment = environment
        self._image = image
        self._now_ms = environment.now_ms
        self._loop = environment.loop
        self._followed: TopicImage | None = None
        self._published: MetadataImage | None = None
        self._loading_since: dict[int, float] = {}
        self._when_loaded: list[asyncio.Future[None]] = []
        shards.catch_up = self._catch_up

    # --- what handlers use --------------------------------------------------------------------------------------------

    @property
    def shard_ids(self) -> Collection[int]:
        """The shards of this worker, in ascending order; none before the internal topic exists."""
        return self.shards.shard_ids

    def shard_of(self, key: str) -> int:
        return partition_for(key, self.shards.count)

    def call(
        self,
        key: str,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Runs an operation of the state machine on the shard of a group id or transactional id."""
        return self.call_shard(partition_for(key, self.shards.count), operation, request, context)

    def call_shard(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Raises KafkaError if the operation fails at once, and NOT_COORDINATOR if another broker has the shard."""
        context.creation_limit_ms = self._creation_limits.limit_ms
        self._wake()
        outcome = self.shards.run(shard_id, operation, request, context)
        return self.future_of(outcome) if type(outcome) is DeferredReply else cast("T", outcome)

    # --- what metrics ask ---------------------------------------------------------------------------------------------

    def count_states(self) -> Mapping[str, int]:
        """Shards by state, in Kafka's words for those that Kafka has."""
        return Counter(self.shards.state(shard_id).value.lower() for shard_id in self.shard_ids)

    # --- the life of the shards ---------------------------------------------------------------------------------------

    def follow(self, topic: TopicImage | None, node_id: int) -> list[int]:
        """Owns what broker `node_id` leads of the internal topic. Returns the shards that have to be loaded now."""
        if topic is self._followed:
            return []
        self._followed = topic
        partitions = topic.partitions if topic is not None else ()
        led = [partition.partition_id for partition in partitions if partition.leader == node_id]
        topic_id = topic.id if topic is not None else None
        if topic_id != self.shards.topic_id:
            empty = {shard_id for shard_id in led if self.log.is_empty(shard_id)}
            to_load = self.shards.follow(topic_id, len(partitions), led, empty, self._now_ms())
        else:
            to_load = self.shards.follow(topic_id, len(partitions), led, (), self._now_ms())
            for shard_id in to_load:
                self.log.gained(shard_id)
        self._wake()
        return to_load

    def open_shards(self, count: int) -> list[int]:
        """Owns all of the `count` partitions of the internal topic. Returns the shards that have to be loaded."""
        empty = {shard_id for shard_id in range(count) if self.log.is_empty(shard_id)}
        self._wake()
        return self.shards.open_shards(count, range(count), empty, self._now_ms())

    async def loaded(self) -> None:
        """Ends when every shard that had to be loaded is active, or waits for its next attempt."""
        while self.shards.is_loading:
            future = self._loop.create_future()
            self._when_loaded.append(future)
            await future

    def collect(self, now_ms: int) -> None:
        super().collect(now_ms)
        if self._when_loaded and not self.shards.is_loading:
            waiting, self._when_loaded = self._when_loaded, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def on_opening(self, load: Load) -> None:
        self._loading_since[load.shard_id] = self._loop.time()

    def on_active(self, load: Load) -> None:
        self.load_times.add((self._loop.time() - self._loading_since.pop(load.shard_id)) * 1000)

    def on_released(self) -> None:
        self._followed = None
        for observe in self.release_observers:
            observe()

    def tick(self) -> None:
        """Once a second."""
        now_ms = self._now_ms()
        self.log.tick(now_ms)
        self.shards.take_snapshots(now_ms)
        self._wake()

    def close(self) -> None:
        self.shards.close()
        self.log.stop()

    def finish(self) -> None:
        """At an orderly stop, when everything is written."""
        self.log.finish(self.shards.snapshots.last(self._now_ms()))

    # --- metadata -----------------------------------------------------------------------------------------------------

    def publish(self, image: MetadataImage) -> None:
        """Tells every active shard of a new image; one that is loading is told when it is through."""
        delta = TopicDelta.between(self._published, image) if self._published is not None else None
        self._published = image
        self.shards.run_on_active(self._update, (image, delta), self._now_ms())
        self._wake()

    def _update(
        self, machine: M, context: OperationContext, update: tuple[MetadataImage, TopicDelta | None]
    ) -> CoordinatorResult[None]:
        image, delta = update
        return machine.on_metadata_update(context, image, delta)

    def _catch_up(self, machine: M, context: OperationContext, nothing: None) -> CoordinatorResult[None]:
        """The image may have changed since the machine was made."""
        return self._update(machine, context, (self._image(), None))

    def task_done(self, shard_id: int, task: Task, value: object) -> None:
        """Hands the outcome of a task to its shard."""
        self.shards.complete_task(shard_id, task, value, internal_operation_context(self._now_ms()))
        self._wake()
