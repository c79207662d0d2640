# SPDX-License-Identifier: Apache-2.0
"""Runs the shard sets of a process in its event loop: drivers, the service of a coordinator, the clock and the pump.

Theory of operation
-------------------
A ShardSet (`kcoord.runtime.shard_set`) holds the state of shards and has no clock, no files and no futures. This module
connects it with them:

* `ShardDriver`, one per shard set, turns what the set has ready (`Ready`) into requests to its log, resolved futures
  and background tasks.
* `ShardService` is the driver of a coordinator's shards. It runs the operations of handlers, follows the leaders of the
  internal topic, and passes metadata updates to the shards.
* `Pump`, one per process, collects from all drivers and has their appends written.

The life of an operation:

    run        a handler calls `ShardService.call`; the shard changes its state before the call returns
    wake       the pump is scheduled for the next turn of the event loop, or up to MOST_GATHERING_TURNS later
    collect    the driver passes one append per shard to the log, which submits it to the pump
    write      with a journal (`kcoord.log.flush.policy=fsync`) the log writer makes the append durable;
               without a journal the pump writes it to the page cache before `submit` returns
    written    the log reports the outcome to the shard set
    deliver    futures and deferred responses are settled; an operation without records may be answered at once

What orders what:

* Operations of a shard run one at a time, in the order of their calls. A later operation sees the state that an earlier
  operation left, also if its records are not durable yet.
* A response leaves only when every record that the operation could have seen is durable.
* At most one append per shard is in flight. Records of further operations join the next append. Different shards have
  no order between them.
* Operations run only while a shard is active. A shard that is loading answers COORDINATOR_LOAD_IN_PROGRESS; a shard
  that has failed or has another owner answers NOT_COORDINATOR.
* A metadata image reaches all active shards in the turn in which it is published, and other shards when their load
  ends.

Threads. All code here runs in the event loop. The log writer, the snapshot thread and background tasks have threads of
their own; their results come back as callbacks of the event loop.

Failures. If the outcome of an append is unknown, its shard fails: waiting operations get an error, and the shard is
loaded from its log again. An exception of one driver or one result is logged and must not keep the next from being
handled; a client that is gone is no failure.

A crash loses no state that was acknowledged, because the shards are rebuilt from their logs. The records of an
unanswered request may or may not be in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.metadata.delta import CoordinatorMachine, TopicDelta
from kcoord.metadata.image import MetadataImage, TopicImage
from kcoord.metrics.measures import Histogram, WriteMeasures
from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine, Task
from kcoord.runtime.serde import partition_for
from kcoord.runtime.shard_log import Append, Load, ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply, Ready, Waiter
from kcoord.server.disk.log_writer import LogWriter, NewWriter, WriteJob, write
from kcoord.server.environment import Environment
from kcoord.server.replies import Reply, internal_operation_context
from kcoord.storage.journal import Journal
from kcoord_protocol.errors import KafkaError

_logger = logging.getLogger(__name__)


M = TypeVar("M", bound=StateMachine)
C = TypeVar("C", bound=CoordinatorMachine)
R = TypeVar("R")
T = TypeVar("T")

MOST_GATHERING_TURNS: Final = 2
"""While every turn of the event loop adds several writes, the pump waits up to this many more turns. Each log is then
written only once. A single write does not wait.
"""

MOST_DELETED_TOPICS: Final = 100_000
"""An owner deletes the offsets of a topic at once. So only those of the last topics may be left after a takeover."""

LARGE_WRITE_BYTES: Final = 256 << 10
"""The completion of a larger write has a turn of its own: a new image of 10,000 partitions takes more than 10 ms."""

_NS_PER_MS: Final = 1_000_000
_LARGEST_LEAN: Final = 8


class ShardDriver(Generic[M]):
    """Turns the `Ready` of one ShardSet into requests to its log, resolved futures and background tasks.

    `wake` makes the pump call `collect` soon. Subclasses override the `on_` methods and `start_task`.
    """

    def __init__(self, shards: ShardSet[M], log: ShardLog, wake: Callable[[], None]) -> None:
        self.shards = shards
        self.log = log
        self._wake = wake

    def future_of(self, reply: DeferredReply) -> asyncio.Future[T]:
        """Returns a future that ends with the response, or with the KafkaError that was delivered instead."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        reply.deliver = partial(self._resolve, future)
        return future

    def _resolve(self, future: asyncio.Future[T], value: object) -> None:
        if future.done():
            return
        if isinstance(value, KafkaError):
            future.set_exception(value)
            # Marks the exception as retrieved: a caller that asked several shards may have given up at another error.
            future.exception()
        else:
            future.set_result(cast("T", value))

    def collect(self, now_ms: int) -> None:
        """Handles everything that the shard set has ready."""
        ready = self.shards.poll(now_ms)
        for append in ready.appends:
            self.on_append_started(append)
            self.log.append(append, now_ms)
        if ready.replies:
            self._deliver(ready.replies)
        for shard_id, task in ready.tasks:
            self.start_task(shard_id, task)
        for save in ready.saves:
            self.log.save(save)
        if ready.has_log_work:
            self._collect_log_work(ready)
        if ready.appends:
            # Without a journal the appends are written by now, and their replies are ready.
            self.deliver_replies()
            if self.shards.has_ready(now_ms):
                self._wake()
        elif self.shards.has_replies():
            self._wake()

    def _collect_log_work(self, ready: Ready) -> None:
        for shard_id in ready.closes:
            self.log.close(shard_id)
            self.on_failed(shard_id)
        for release in ready.releases:
            self.log.release(release)
        for load in ready.active:
            self.on_active(load)
        for load in ready.opens:
            self.on_opening(load)
            self.log.open(load)
        for load in ready.reads:
            self.log.read(load)
        if ready.has_released:
            self.on_released()
        if ready.opens or ready.reads or ready.releases:
            # The next step takes place in another turn, so that the event loop serves connections in between.
            self._wake()

    def deliver_replies(self) -> None:
        """Delivers the replies that became ready since `collect`."""
        self._deliver(self.shards.take_replies())

    def _deliver(self, replies: list[Waiter]) -> None:
        for waiter in replies:
            try:
                waiter.settle()
            except Exception:
                _logger.exception("Delivering a reply of the shards of %s failed", self.shards.name)

    def on_append_started(self, append: Append) -> None:
        """Called before an append is passed to the log."""

    def on_failed(self, shard_id: int) -> None:
        """Called when a shard has failed and its log is closed."""

    def on_opening(self, load: Load) -> None:
        """Called when a load begins."""

    def on_active(self, load: Load) -> None:
        """Called when a load has succeeded."""

    def on_released(self) -> None:
        """Called when logs were handed over or deleted."""

    def start_task(self, shard_id: int, task: Task) -> None:
        raise AssertionError(f"shards of {self.shards.name} have no tasks, got {task}")


class ShardService(ShardDriver[C]):
    """The coordinator shards of one kind in this process. Subclasses start their background tasks.

    `image` returns the newest metadata image.
    """

    def __init__(
        self,
        shards: ShardSet[C],
        log: ShardLog,
        environment: Environment,
        image: Callable[[], MetadataImage],
        wake: Callable[[], None],
        *,
        creation_limits: CreationLimits | None = None,
    ) -> None:
        super().__init__(shards, log, wake)
        self.release_observers: list[Callable[[], None]] = []
        """Called when logs were handed over or deleted. A new internal topic of the same name can be followed now."""
        self.load_times = Histogram()
        self._creation_limits = creation_limits or CreationLimits()
        self._environment = environment
        self._image = image
        self._now_ms = environment.now_ms
        self._loop = environment.loop
        self._followed: TopicImage | None = None
        self._newest_image: MetadataImage | None = None
        self.deleted_topics: dict[bytes, None] = {}
        """The ids of the topics that were deleted while this process ran, at most `MOST_DELETED_TOPICS`."""
        self._loading_since: dict[int, float] = {}
        self._when_loaded: list[asyncio.Future[None]] = []
        shards.catch_up = self._catch_up

    # --- for handlers -------------------------------------------------------------------------------------------------

    @property
    def shard_ids(self) -> Collection[int]:
        """The shards that this worker owns, in ascending order; none before the internal topic exists."""
        return self.shards.shard_ids

    def shard_of(self, key: str) -> int:
        return partition_for(key, self.shards.count)

    def call(
        self,
        key: str,
        operation: Callable[[C, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Runs an operation of the state machine on the shard of a group id or transactional id, as `call_shard`."""
        return self.call_shard(partition_for(key, self.shards.count), operation, request, context)

    def call_shard(
        self,
        shard_id: int,
        operation: Callable[[C, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> Reply[T]:
        """Runs an operation on a shard. Returns the response, or a future if the response has to wait for records.

        Raises KafkaError if the operation fails at once, and NOT_COORDINATOR if this broker does not own the shard.
        """
        context.creation_limit_ms = self._creation_limits.limit_ms
        self._wake()
        outcome = self.shards.run(shard_id, operation, request, context)
        return self.future_of(outcome) if type(outcome) is DeferredReply else cast("T", outcome)

    # --- for metrics --------------------------------------------------------------------------------------------------

    def count_states(self) -> Mapping[str, int]:
        """Returns the number of shards by state, with Kafka's names for the states that Kafka has."""
        return Counter(self.shards.state(shard_id).value.lower() for shard_id in self.shard_ids)

    # --- the life of the shards ---------------------------------------------------------------------------------------

    def follow(self, topic: TopicImage | None, node_id: int) -> list[int]:
        """Owns the partitions of the internal topic that broker `node_id` leads, and gives up the other shards.

        Returns the shards that have to be loaded now.
        """
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

    def own(self, shard_ids: Sequence[int]) -> list[int]:
        """Owns these shards from now on, and gives up all others. Returns the shards that have to be loaded.

        Shards that were owned before and closed, because another process had claimed their logs, are claimed again.
        """
        gained = self.shards.own(shard_ids)
        self.shards.claim(shard_id for shard_id in shard_ids if shard_id in self.shards.shard_ids)
        self._wake()
        return gained

    async def loaded(self) -> None:
        """Waits until every shard that had to be loaded is active or waits for its next attempt."""
        while self.shards.is_loading:
            future = self._loop.create_future()
            self._when_loaded.append(future)
            await future

    def _collect_log_work(self, ready: Ready) -> None:
        super()._collect_log_work(ready)
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
        """Does periodic work: the log's own, and snapshots that are due. Called once a second."""
        now_ms = self._now_ms()
        self.log.tick(now_ms)
        self.shards.take_snapshots(now_ms)
        self._wake()

    def close(self) -> None:
        self.shards.close()
        self.log.stop()

    def finish(self) -> None:
        """Saves the last snapshots at an orderly stop. Called when everything is written."""
        self.log.finish(self.shards.snapshots.last(self._now_ms()))

    # --- metadata -----------------------------------------------------------------------------------------------------

    def on_metadata_update(self, image: MetadataImage) -> None:
        """Passes a new image to every active shard. A shard that is loading gets it when its load ends."""
        delta = TopicDelta.between(self._newest_image, image) if self._newest_image is not None else None
        self._newest_image = image
        if delta is not None and delta.gone:
            self._note_deleted(delta)
        self.shards.run_on_active(self._update, (image, delta), self._now_ms())
        self._wake()

    def _note_deleted(self, delta: TopicDelta) -> None:
        """Notes deleted topics for shards that are not active here. Ids are unique, so these never come back."""
        deleted = self.deleted_topics
        deleted.update((delta.old.topics[name].id, None) for name in delta.gone)
        while len(deleted) > MOST_DELETED_TOPICS:
            del deleted[next(iter(deleted))]

    def _update(
        self, machine: C, context: OperationContext, update: tuple[MetadataImage, TopicDelta | None]
    ) -> CoordinatorResult[None]:
        image, delta = update
        return machine.on_metadata_update(context, image, delta)

    def _catch_up(self, machine: C, context: OperationContext, nothing: None) -> CoordinatorResult[None]:
        """Passes the newest image to a machine that has just been loaded, since it was made with an earlier image."""
        return self._update(machine, context, (self._image(), None))

    def task_done(self, shard_id: int, task: Task, value: object) -> None:
        """Passes the outcome of a task, a value or an exception, to its shard."""
        self.shards.complete_task(shard_id, task, value, internal_operation_context(self._now_ms()))
        self._wake()


class Clock:
    """The clock of a process: milliseconds since 1970 that never go back and never jump.

    It follows the monotonic clock, and corrects its difference from the wall clock by at most an eighth of the elapsed
    time. So a wall clock that is set, or a machine that was suspended, neither ends sessions nor expires offsets early.
    The time of day becomes right again. The expiration of offsets, which takes days, subtracts `gain_ms`, so that the
    correction does not make it early either. Tests may replace the two sources.
    """

    __slots__ = (
        "_last_monotonic_ns",
        "_lead_ns",
        "_least_lead_ns",
        "_monotonic_ns",
        "_now_ms",
        "_now_ns",
        "_unchanged_until_ns",
        "_wall_ns",
    )

    def __init__(
        self, *, wall_ns: Callable[[], int] = time.time_ns, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._now_ns = wall_ns()
        self._now_ms = self._now_ns // _NS_PER_MS
        # Until the second of these times the millisecond stays the same, with any correction. Most calls are before it.
        self._last_monotonic_ns = self._unchanged_until_ns = monotonic_ns()
        self._lead_ns = self._least_lead_ns = 0

    def now_ms(self) -> int:
        monotonic_ns = self._monotonic_ns()
        if monotonic_ns < self._unchanged_until_ns:
            return self._now_ms
        elapsed_ns = monotonic_ns - self._last_monotonic_ns
        if elapsed_ns > 0:
            self._last_monotonic_ns = monotonic_ns
            lean_ns = self._wall_ns() - self._now_ns - elapsed_ns
            most_ns = elapsed_ns // _LARGEST_LEAN
            # Comparisons, because calls of min and max would be most of the cost of reading the clock.
            if lean_ns > most_ns:
                lean_ns = most_ns
            elif lean_ns < -most_ns:
                lean_ns = -most_ns
            self._now_ns += elapsed_ns + lean_ns
            self._lead_ns += lean_ns
            if self._lead_ns < self._least_lead_ns:
                self._least_lead_ns = self._lead_ns
            self._now_ms, passed_ns = divmod(self._now_ns, _NS_PER_MS)
            left_ns = _NS_PER_MS - passed_ns
            self._unchanged_until_ns = monotonic_ns + left_ns - left_ns // _LARGEST_LEAN
        return self._now_ms

    def gain_ms(self) -> int:
        """Returns an upper bound of how much the clock ran too fast between any earlier moment and now."""
        return (self._lead_ns - self._least_lead_ns) // _NS_PER_MS


class Pump:
    """Collects from all drivers of a process and has their appends written; the module describes the steps.

    Drivers are added once, before the first request. One timer handle stands for the earliest deadline of all shard
    sets. `gathers`: a write may wait up to MOST_GATHERING_TURNS for other writes. `new_writer` makes the writer for the
    journal, if there is one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ms: Callable[[], int],
        journal: Journal | None,
        *,
        gathers: bool = True,
        new_writer: NewWriter = LogWriter,
    ) -> None:
        self._loop = loop
        self._now_ms = now_ms
        self._drivers: tuple[ShardDriver[Any], ...] = ()
        self._pump_scheduled = False
        self._most_gathering_turns = MOST_GATHERING_TURNS if gathers else 0
        self._wakes = self._gathering_turns = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms = 0
        self._jobs: list[WriteJob] = []
        self._writes_under_way = 0
        self._measures: WriteMeasures | None = None
        self._writer = new_writer(loop, self._written, journal) if journal is not None else None

    def measure_writes(self, measures: WriteMeasures) -> None:
        """Records the times of writes from now on."""
        self._measures = measures
        if self._writer is not None:
            self._writer.measures = measures

    def add(self, driver: ShardDriver[Any]) -> None:
        self._drivers += (driver,)

    @property
    def is_quiet(self) -> bool:
        """True if no write is in flight and no turn of the pump is scheduled."""
        return not self._writes_under_way and not self._pump_scheduled

    def wake(self) -> None:
        """Schedules the pump for the next turn of the event loop; the pump may then wait for more writes."""
        self._wakes += 1
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def submit(self, job: WriteJob) -> None:
        """Adds an append to the writes of the current turn. Without a log writer it is written at once."""
        if self._writer is not None:
            self._jobs.append(job)
            return
        write(job, job.log.append, self._measures)
        if len(job.data) > LARGE_WRITE_BYTES:
            self._writes_under_way += 1
            self._loop.call_soon(self._written, [job])
        else:
            self._end(job, job.now_ms)

    def next_deadline_ms(self) -> int | None:
        """Returns the earliest deadline of all shard sets, None if no timer is armed."""
        deadlines = [driver.shards.next_deadline_ms() for driver in self._drivers]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def on_clock_moved(self) -> None:
        """Discards the armed timer, which would be late after the clock jumped ahead, and runs the pump."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()

    def close(self, timeout_seconds: float) -> bool:
        """Ends the pump and the log writer. Returns True if all submitted appends are on disk."""
        if self._timer is not None:
            self._timer.cancel()
        return self._writer is None or self._writer.close(timeout_seconds)

    def _pump(self) -> None:
        if self._wakes > 1 and self._gathering_turns < self._most_gathering_turns:
            self._wakes = 0
            self._gathering_turns += 1
            self._loop.call_soon(self._pump)
            return
        self._wakes = self._gathering_turns = 0
        self._pump_scheduled = False
        self._turn(self._now_ms())

    def _turn(self, now_ms: int) -> None:
        self._collect(now_ms)
        if self._jobs and self._writer is not None:
            jobs, self._jobs = self._jobs, []
            self._writes_under_way += len(jobs)
            self._writer.submit(jobs)
        self._arm_timer(now_ms)

    def _collect(self, now_ms: int) -> None:
        for driver in self._drivers:
            if driver.shards.has_ready(now_ms):
                try:
                    driver.collect(now_ms)
                except Exception:
                    # Appends that were collected before are still written; the next turn collects the rest.
                    _logger.exception("Collecting the ready work of the shards of %s failed", driver.shards.name)

    def _written(self, jobs: list[WriteJob]) -> None:
        """Ends the jobs. The turn that follows delivers their replies."""
        now_ms = self._now_ms()
        self._writes_under_way -= len(jobs)
        for job in jobs:
            self._end(job, now_ms)
        self._turn(now_ms)

    def _end(self, job: WriteJob, now_ms: int) -> None:
        try:
            job.end(job.error, now_ms)
        except Exception:
            _logger.exception("Completing a write of %s failed", job.key)

    def _arm_timer(self, now_ms: int) -> None:
        """Arms a timer unless the armed one is early enough.

        Heartbeats postpone deadlines all the time, and a turn of the pump without work costs less than re-arming.
        """
        armed_ms = self._timer_deadline_ms if self._timer is not None else None
        if armed_ms is not None:
            for driver in self._drivers:
                if driver.shards.has_timer_before(armed_ms):
                    break
            else:
                return
        deadline_ms = self.next_deadline_ms()
        if deadline_ms is None or (armed_ms is not None and armed_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ms = deadline_ms
        self._timer = self._loop.call_later(max(deadline_ms - now_ms, 1) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()
