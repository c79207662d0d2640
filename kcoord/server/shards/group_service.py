# SPDX-License-Identifier: Apache-2.0
"""The group coordinator shards of this process, their fast paths, and the threads for their background tasks.

`kcoord.server.shards.shard_service` describes how operations run and what orders them. Besides, groups have:

* Fast paths. A `SteadyReply` repeats a heartbeat's response; a `ShardCommitter` commits offsets without an operation.
  Each keeps the state machine of the shard that it was made for. If the shard was loaded again or given away, its
  `machine` is another object or None, and the request takes the general path. Appends and answers of a fast path keep
  the order of operations.
* Background tasks. A target assignment that takes long, and every resolution of a regular expression, is computed in a
  thread. The thread sees only its input, which nothing changes. The result comes back as an operation of the shard,
  which decides whether it still applies to the group. Each assignor of one's own has a thread for itself, which waits
  for its process (`own_assignors`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kcoord.coordinator.group.consumer.assignment import ComputedTarget, ComputeTarget, compute, encode, free
from kcoord.coordinator.group.consumer.client_computation import InstallAssignment, PrepareAssignment
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.creation_limits import CreationLimits
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
from kcoord.coordinator.group.regex import ResolveRegex, resolve
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.group.steady import SteadyHeartbeat
from kcoord.metadata.delta import TopicDelta
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer, Task
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_log import ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import ShardState, Timer, Waiter
from kcoord.server.environment import Environment
from kcoord.server.large_responses import EncodedResponse
from kcoord.server.shards.shard_service import ShardService
from kcoord_protocol.messages import ConsumerGroupPrepareAssignmentResponse

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kcoord.server.shards.own_assignors import OwnAssignor

_logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST_ON_LOOP_US = 10_000
"""A target assignment that takes no longer is computed in the event loop. A thread would compete with the event loop
for the GIL, while waiting members keep sending heartbeats.
"""


class SteadyReply:
    """Repeats the response to a steady heartbeat while its shard is loaded and active, without a reload in between."""

    __slots__ = ("_machine", "_shard", "_steady", "_timeout_ms", "_timer")

    def __init__(
        self, shard: ShardContext[GroupCoordinatorShard], machine: GroupCoordinatorShard, steady: SteadyHeartbeat
    ) -> None:
        self._shard = shard
        self._machine = machine
        self._steady = steady
        self._timeout_ms = steady.timeout_ms
        self._timer: Timer | None = None

    def repeat(self, now_ms: int) -> bool:
        """Returns True if the response still holds. The member's session timeout starts again then."""
        machine = self._machine
        if self._shard.machine is not machine or not self._steady.is_current(machine.image_epoch):
            return False
        timer, deadline_ms = self._timer, now_ms + self._timeout_ms
        if timer is None or not timer.rearm(deadline_ms):
            self._timer = self._shard.timers.schedule(self._steady.timer, deadline_ms)
        return True


class ShardCommitter:
    """Commits offsets of a group while its shard is loaded and active, without a reload in between."""

    __slots__ = ("_machine", "_shard", "_wake")

    def __init__(
        self, shard: ShardContext[GroupCoordinatorShard], machine: GroupCoordinatorShard, wake: Callable[[], None]
    ) -> None:
        self._shard = shard
        self._machine = machine
        self._wake = wake

    def commit(self, plan: CommitPlan, cells: Sequence[bytes], now_ms: int, waiter: Waiter) -> bool:
        """Commits the offsets in `cells` without an operation. `waiter` is settled when they are durable.

        Returns False if nothing was appended; the request then needs an operation.
        """
        shard, machine = self._shard, self._machine
        if shard.machine is not machine or shard.is_read_only(now_ms):
            return False
        if not machine.commit_packed(plan, cells, now_ms):
            return False
        self._wake()
        if not shard.append_packed(plan, waiter):
            return False
        machine.counters.offset_commits += plan.count
        return True


class GroupService(ShardService[GroupCoordinatorShard]):
    """The group coordinator of a process: serves `Broker.groups`."""

    def __init__(
        self,
        shards: ShardSet[GroupCoordinatorShard],
        log: ShardLog,
        environment: Environment,
        image: Callable[[], MetadataImage],
        wake: Callable[[], None],
        *,
        background_threads: int,
        write_timeout_ms: int,
        creation_limits: CreationLimits | None = None,
        own_assignors: Mapping[str, OwnAssignor] | None = None,
    ) -> None:
        super().__init__(shards, log, environment, image, wake, creation_limits=creation_limits)
        self.counters = GroupCounters()
        """Counts of all shards that this process owns or owned."""
        self.must_ask_first: Callable[[str], bool] | None = None
        """Whether the offsets of a group may still be with another coordinator, so that no fast path answers."""
        self._latest_creation_time_ms = -1
        self._background_threads = background_threads
        self._write_timeout_ms = write_timeout_ms
        self._threads: Executor | None = None
        self._own_assignors = {} if own_assignors is None else own_assignors
        self._assignor_threads: dict[str, Executor] = {}

    # --- for handlers and fast paths ----------------------------------------------------------------------------------

    def steady(self, group_id: str, member_id: str) -> SteadyReply | None:
        """Returns an object that repeats the response that the member's heartbeat has just got.

        Returns None if the member is not steady.
        """
        shard = self.shards.active_for(group_id)
        if shard is None or shard.machine is None:
            return None
        steady = shard.machine.steady_heartbeat(group_id, member_id)
        return SteadyReply(shard, shard.machine, steady) if steady is not None else None

    def committer(self, group_id: str) -> ShardCommitter | None:
        """Returns a committer for a group that exists on an active shard, else None."""
        shard = self.shards.active_for(group_id)
        if shard is None or shard.machine is None or not shard.machine.has_group(group_id):
            return None
        return ShardCommitter(shard, shard.machine, self._wake)

    def fetch_packed(self, fetch: PackedFetch, require_stable: bool) -> tuple[bytes, bool] | None:
        """Returns the encoded offsets of one group, and True if the response has to `wait` for records.

        Returns None if the request needs an operation.
        """
        shard = self.shards.active_for(fetch.group_id)
        if shard is None or shard.machine is None:
            return None
        if self.must_ask_first is not None and self.must_ask_first(fetch.group_id):
            return None
        answer = shard.machine.fetch_packed(fetch, require_stable)
        return (answer, shard.is_behind) if answer is not None else None

    def wait(self, group_id: str, waiter: Waiter) -> bool:
        """Settles `waiter` when all records of the group's shard are durable.

        Returns False if they are already, or if the shard is not active.
        """
        shard = self.shards.active_for(group_id)
        return shard is not None and shard.defer(waiter)

    @property
    def group_count(self) -> int:
        """The number of groups of the shards that are active here."""
        return sum(machine.group_count for machine in self._machines())

    def _machines(self) -> list[GroupCoordinatorShard]:
        machines = map(self.shards.machine, self.shard_ids)
        return [machine for machine in machines if machine is not None]

    def latest_creation_time_ms(self) -> int:
        """Returns the latest creation time of any group on shards that were loaded here (KIP-1327).

        Returns -1 if there was none.
        """
        for machine in self._machines():
            self._latest_creation_time_ms = max(self._latest_creation_time_ms, machine.latest_creation_time_ms)
        return self._latest_creation_time_ms

    def _update(
        self,
        machine: GroupCoordinatorShard,
        context: OperationContext,
        update: tuple[MetadataImage, TopicDelta | None],
    ) -> CoordinatorResult[None]:
        """Notes the latest creation time of the shard's groups, also at the end of each load.

        The groups of a shard that fails later still count. Groups that it created meanwhile are not later than the
        clock, the newest partition, or the groups that it was loaded with.
        """
        self._latest_creation_time_ms = max(self._latest_creation_time_ms, machine.latest_creation_time_ms)
        return super()._update(machine, context, update)

    @property
    def is_loading(self) -> bool:
        """True while a shard is loading, so that some groups of this process may not be known yet.

        A shard whose log cannot be read does not count, since new partitions would wait for it again and again.
        """
        return any(
            self.shards.state(shard_id) is ShardState.LOADING and not self.shards.has_failed(shard_id)
            for shard_id in self.shard_ids
        )

    def start_verification(self, shard_id: int, producer: Producer) -> int | None:
        """Returns a ticket if the transaction coordinator has to verify the producer first, else None."""
        machine = self.shards.machine(shard_id)
        return machine.start_verification(producer) if machine is not None else None

    def finish_verification(self, shard_id: int, producer: Producer, ticket: int) -> None:
        machine = self.shards.machine(shard_id)
        if machine is not None:
            machine.finish_verification(producer, ticket)

    def note_clock_gain(self, gain_ms: int) -> None:
        """Sets the clock gain (`Clock.gain_ms`) by which active shards delay the expiration of offsets."""
        for machine in self._machines():
            machine.clock_gain_ms = gain_ms

    # --- background tasks ---------------------------------------------------------------------------------------------

    def start_task(self, shard_id: int, task: Task) -> None:
        work = task.work
        if isinstance(work, ComputeTarget):
            machine = self.shards.machine(shard_id)
            target = machine.target_input(work) if machine is not None else None
            if target is None:
                self.task_done(shard_id, task, None)
                return
            own = self._own_assignors.get(target.assignor)
            if own is None and target.cost_us <= LONGEST_ON_LOOP_US:
                self.task_done(shard_id, task, compute(target))
                return
            future: asyncio.Future[object]
            if own is not None:
                future = self._loop.run_in_executor(self._thread_of(own.name), own.compute, target)
            else:
                future = self._loop.run_in_executor(self._thread_pool(), _encoded, partial(compute, target))
        elif isinstance(work, PrepareAssignment | InstallAssignment):
            if work.snapshot.cost_us <= LONGEST_ON_LOOP_US:
                self.task_done(shard_id, task, work.run())
                return
            run = work.run if isinstance(work, PrepareAssignment) else partial(_checked, work)
            future = self._loop.run_in_executor(self._thread_pool(), _encoded, run)
        elif isinstance(work, ResolveRegex):
            future = self._loop.run_in_executor(self._thread_pool(), resolve, work, list(self._image().topics))
        else:
            raise AssertionError(f"unknown work {work!r}")
        future.add_done_callback(partial(self._task_done, shard_id, task))

    def _thread_pool(self) -> Executor:
        if self._threads is None:
            self._threads = self._environment.new_pool(self._background_threads, "kcoord-background")
        return self._threads

    def _thread_of(self, assignor: str) -> Executor:
        """Each assignor has one thread, so that one that hangs delays no other one and no other background task."""
        if assignor not in self._assignor_threads:
            self._assignor_threads[assignor] = self._environment.new_pool(1, "kcoord-own-assignor")
        return self._assignor_threads[assignor]

    def _task_done(self, shard_id: int, task: Task, future: asyncio.Future[object]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            _logger.error("A background task of shard %d failed", shard_id, exc_info=error)
        self.task_done(shard_id, task, future.result() if error is None else error)

    def tick(self) -> None:
        super().tick()
        self.shards.expire_replies(self._now_ms(), self._write_timeout_ms)
        self.deliver_replies()

    def close(self) -> None:
        super().close()
        for pool in (self._threads, *self._assignor_threads.values()):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        for assignor in self._own_assignors.values():
            assignor.close()


def _checked(work: InstallAssignment) -> object:
    """Checks an assignment, and frees the request's, so that the event loop does not pause for that."""
    value = work.run()
    free(work.request.members)
    return value


def _encoded(work: Callable[[], object]) -> object:
    """Does the work in a thread, and encodes its value if that would block the event loop for long."""
    value = work()
    if isinstance(value, ComputedTarget):
        encode(value, CoordinatorSerde().serialize)
    elif isinstance(value, ConsumerGroupPrepareAssignmentResponse):
        return EncodedResponse(value.encode(0))
    return value
