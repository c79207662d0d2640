# SPDX-License-Identifier: Apache-2.0
"""The shards of one kind of state machine in one process: which are owned, their loading, operations, writes and
snapshots. One pure object: no clock, no IO, no futures.

Theory of operation
-------------------
The owner calls `run` for requests, and `poll` to hear what is to be done: log requests (`kcoord.runtime.shard_log`),
answers, background tasks. It calls one method per outcome of a log request (`opened`, `read`, `written`, ...), and
`complete_task` when a task ended. In between nothing happens: time is an argument, and `next_deadline_ms` says when
`poll` has to be called at the latest. `poll` can be called at any time, and hands out everything once.

The life of a shard:

    INITIAL -> LOADING     the shard is owned now, and waits for its turn to be opened
    LOADING -> ACTIVE      the log is claimed, open and replayed; the machine's timers and tasks start
    LOADING -> FAILED      a batch cannot be replayed
    ACTIVE  -> FAILED      a broken invariant, damage in the log, or an append whose outcome is unknown
    FAILED  -> LOADING     the log is open again, after a time that doubles with each failure in a row
    any     -> CLOSED      others own the shard, its topic was deleted, or its log was claimed by others
    CLOSED  -> LOADING     the shard is owned again

Rules:

* Operations run while a shard is ACTIVE, and never before. Otherwise requests fail with COORDINATOR_LOAD_IN_PROGRESS
  or NOT_COORDINATOR, never with a guess.
* A shard's log is opened, or given away, only while no append and no other load of it is under way.
* State runs ahead of the log, and answers wait for it: `poll` gives out nothing that rests on records that are not
  durable.
* A shard that leaves ACTIVE answers everybody who waits for it. Its memory is thrown away and comes back from the log.
* An outcome of a load that was overtaken (the shard was given away meanwhile) is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from kcoord.runtime.result import CoordinatorResult, OperationContext, StateMachine, Task, TimerKey
from kcoord.runtime.serde import partition_for
from kcoord.runtime.shard_context import ShardContext
from kcoord.runtime.shard_loads import SET_TIMERS, ShardLoads
from kcoord.runtime.shard_log import Append, Load, Release, Save
from kcoord.runtime.waiting import DeferredReply, Ready, ShardState, ShardTimer, Waiter
from kcoord_protocol.errors import Errors, KafkaError

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=StateMachine)
R = TypeVar("R")
T = TypeVar("T")

_MAX_TIMERS_PER_POLL: Final = 500
_SNAPSHOT: Final = TimerKey(ShardTimer.SNAPSHOT)


class ShardSet(ShardLoads[M]):
    """See the module's text. `make_machine` makes the empty state machine into which a shard's log is replayed. A write
    waits for `linger_ms` for others to join it.
    """

    # Looking at shards.

    def active_for(self, key: str) -> ShardContext[M] | None:
        """The shard of a group id or transactional id, if it can run operations: its `machine` is there."""
        shard = self._shards.get(partition_for(key, self.count))
        return shard if shard is not None and shard.machine is not None else None

    def active_shards(self) -> list[int]:
        return [shard_id for shard_id, shard in self._shards.items() if shard.machine is not None]

    def offsets(self, shard_id: int) -> tuple[int, int]:
        """(durable offset, next offset) of a shard; the state in memory is as of the second."""
        shard = self._shards[shard_id]
        return shard.durable_offset, shard.next_offset

    def queue_size(self, now_ms: int) -> int:
        """Tasks that run or wait to be started, and timers that are due and have not fired."""
        tasks = sum(shard.running_tasks for shard in self._shards.values())
        return tasks + self._timer_queue.count_due(now_ms)

    def is_idle(self) -> bool:
        """Whether everything is written and handed out."""
        outbox = self._outbox
        if outbox.replies or outbox.tasks or outbox.failed or outbox.writable:
            return False
        return not any(shard.is_writing for shard in self._shards.values())

    # Operations.

    def run(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> T | DeferredReply:
        """Runs an operation on a shard: see `ShardContext.run`."""
        shard = self._shards.get(shard_id)
        if shard is None:
            raise KafkaError(Errors.NOT_COORDINATOR)
        return shard.run(operation, request, context)

    def run_on_active(
        self, operation: Callable[[M, OperationContext, R], CoordinatorResult[None]], request: R, now_ms: int
    ) -> None:
        """Runs an operation whose answer nobody needs on every active shard, such as a metadata update."""
        for shard in self._shards.values():
            if shard.machine is not None:
                self._run_unanswered(shard, operation, request, now_ms)

    def complete_task(self, shard_id: int, task: Task, value: object, context: OperationContext) -> None:
        """A task of `Ready.tasks` ended with a value, or with an exception as value."""
        self._shards[shard_id].complete_task(task, value, context)

    def expire_replies(self, now_ms: int, timeout_ms: int) -> None:
        """Answers those with COORDINATOR_NOT_AVAILABLE who have waited for their shard's log longer than the timeout.
        It is called again and again, and times nobody's wait more exactly than that.
        """
        for shard in self._shards.values():
            if shard.machine is not None:
                shard.expire_replies(now_ms, timeout_ms)

    # What is owned.

    def follow(
        self, topic_id: bytes | None, count: int, led: Sequence[int], empty: Collection[int], now_ms: int
    ) -> list[int]:
        """Owns, from now on, the partitions `led` of the `count` of the internal topic, and gives the others away; all
        of them if the topic was deleted (`topic_id` None), as Kafka lets clients do. The logs of shards in `empty` hold
        nothing yet. Returns the shards that have to be loaded.
        """
        if topic_id is not None and topic_id == self.topic_id:
            return self._follow_leaders(led)
        if self.topic_id is not None:
            self._give_up(self.topic_id)
            return []
        if topic_id is None:
            return []
        self.topic_id = topic_id
        return self.open_shards(count, led, empty, now_ms)

    def open_shards(self, count: int, own: Sequence[int], empty: Collection[int], now_ms: int) -> list[int]:
        """Owns the partitions `own` of the `count` of the internal topic. Those in `empty` are active at once."""
        assert not self.shard_ids, "the number of shards never changes"
        self.count = count
        self._set_own(own)
        to_load = [shard_id for shard_id in own if shard_id not in empty]
        for shard_id in own:
            if shard_id in empty:
                self.load(shard_id, (), now_ms)
        self.claim(to_load)
        return to_load

    def _follow_leaders(self, led: Sequence[int]) -> list[int]:
        own = set(self.shard_ids)
        leaving = {shard_id for release in self._releasing for shard_id in release.shard_ids}
        lost = sorted(own - set(led))
        gained = sorted(set(led) - own - leaving)
        if not lost and not gained:
            return []
        self._set_own(sorted((own - set(lost)) | set(gained)))
        if lost:
            self._release(Release(lost))
        self.claim(gained)
        _logger.info("Of %s, %d shards are led here now, %d elsewhere", self.name, len(gained), len(lost))
        return gained

    def _give_up(self, topic_id: bytes) -> None:
        if all(release.deleted_topic_id is None for release in self._releasing):
            shard_ids = list(self.shard_ids)
            self._set_own(())
            self._release(Release(shard_ids, topic_id))

    def _set_own(self, own: Sequence[int]) -> None:
        """Asked often, so it is a range or a set of keys."""
        self.shard_ids = range(self.count) if len(own) == self.count else dict.fromkeys(own).keys()

    def _release(self, release: Release) -> None:
        """Closes shards. Their logs go when nothing of them is under way any more."""
        for shard_id in release.shard_ids:
            self.close_shard(shard_id)
        self._releasing[release] = False
        self._may_have_log_work = True

    def close_shard(self, shard_id: int) -> None:
        """Ends a shard: who waits gets NOT_COORDINATOR, and so does every later operation."""
        shard = self._context(shard_id)
        self._drop_load(shard_id)
        if shard.state is not ShardState.CLOSED:
            shard.close()

    def released(self, release: Release) -> None:
        """The logs are given away: a topic of that name, or the same shards, can be owned again."""
        del self._releasing[release]
        self._has_released = self._may_have_log_work = True
        if release.deleted_topic_id is not None:
            _logger.warning(
                "The topic of the %s was deleted: %d shards are given up", self.name, len(release.shard_ids)
            )
            self.topic_id = None

    def _releasable(self) -> list[Release]:
        """What can be given away now. A deleted topic goes after all that was given away before."""
        return [
            release
            for release, is_handed_out in self._releasing.items()
            if not is_handed_out
            and not any(map(self._is_busy, release.shard_ids))
            and (release.deleted_topic_id is None or release is next(iter(self._releasing)))
        ]

    def close(self) -> None:
        """The process ends: nothing is loaded any more, and no snapshot is begun."""
        self._is_closing = True
        self._timers.cancel(_SNAPSHOT)
        for shard_id in [*self._queued, *self._loads]:
            self._drop_load(shard_id)

    # Outcomes of appends and snapshots.

    def written(self, append: Append) -> None:
        """The batches are durable."""
        for observe in self.append_observers:
            try:
                observe(append)
            except Exception:
                _logger.exception("Publishing what shard %d of %s wrote failed", append.shard_id, self.name)
        self._shards[append.shard_id].written(append)

    def unknown(self, append: Append, error: OSError, now_ms: int) -> None:
        """The batches may be in the log or not. If there is no space for them (ENOSPC), the shard can be read, and
        refuses for a while what would have to be written.
        """
        self._shards[append.shard_id].unknown(append, error, now_ms)

    def fenced(self, ticket: Append | Load) -> None:
        """Another owner has claimed the log. It is not loaded again before `claim`, or a change of leaders."""
        shard = self._shards[ticket.shard_id]
        if isinstance(ticket, Append):
            shard.end_append(ticket)
        elif self._answered(ticket) is None:
            return
        _logger.warning("Shard %d of %s has another owner now", ticket.shard_id, self.name)
        self.close_shard(ticket.shard_id)
        self._closes.append(ticket.shard_id)
        self._may_have_log_work = True

    def saved(self, save: Save, now_ms: int, *, succeeded: bool) -> bool:
        """See `ShardSnapshots.saved`."""
        is_kept = self.snapshots.saved(save, now_ms, succeeded=succeeded)
        if is_kept and succeeded:
            self._distrusted.discard(save.shard_id)
        self._arm_snapshots()
        return is_kept

    def take_snapshots(self, now_ms: int) -> None:
        """Called once in a while, such as once a second: takes some of the snapshots that are due."""
        if not self._is_closing:
            self.snapshots.take_due(now_ms)
            self._arm_snapshots()

    def take_snapshot(self, shard_id: int, now_ms: int) -> bool:
        """Begins a snapshot of one shard; False if none can be made now, or another one is being taken."""
        has_begun = self.snapshots.take(shard_id, now_ms)
        self._arm_snapshots()
        return has_begun

    def _arm_snapshots(self) -> None:
        due_ms = self.snapshots.step_due_ms
        if due_ms is not None and not self._is_closing:
            self._timers.schedule(_SNAPSHOT, due_ms)

    # Time.

    def poll(self, now_ms: int) -> Ready:
        """Fires the timers that are due, then hands out everything there is to do."""
        saves = self._fire_timers(now_ms) if self._timer_queue.may_be_due(now_ms) else ()
        outbox = self._outbox
        if outbox.failed:
            failed, outbox.failed = outbox.failed, []
            for shard_id in failed:
                self._on_failed(shard_id, now_ms)
        appends = [self._shards[shard_id].take_append() for shard_id in outbox.writable]
        ready = Ready(outbox.replies, outbox.tasks, [append for append in appends if append is not None])
        outbox.replies, outbox.tasks, outbox.writable = [], [], []
        if saves:
            ready.saves = saves
        if self._may_have_log_work:
            ready.has_log_work = True
            ready.has_released, self._has_released = self._has_released, False
            ready.releases = self._releasable()
            self._releasing.update(dict.fromkeys(ready.releases, True))
            self._collect_loads(ready, now_ms)
            self._may_have_log_work = bool(self._queued or self._loads or self._closes or self._releasing)
        return ready

    def take_replies(self) -> list[Waiter]:
        """The answers that may leave now."""
        outbox = self._outbox
        replies, outbox.replies = outbox.replies, []
        return replies

    def has_ready(self, now_ms: int) -> bool:
        """Whether `poll` would give something, or find a timer due."""
        outbox = self._outbox
        if outbox.writable or outbox.replies or outbox.tasks or outbox.failed:
            return True
        if self._timer_queue.may_be_due(now_ms):
            return True
        return self._may_have_log_work and (self._can_load() or self._has_released or bool(self._releasable()))

    def next_deadline_ms(self) -> int | None:
        """When `poll` has to be called at the latest, if nothing else happens."""
        return self._timer_queue.next_deadline_ms()

    def has_timer_before(self, deadline_ms: int) -> bool:
        """False where no timer is due before; True may turn out to be one that moved on."""
        return self._timer_queue.may_have_before(deadline_ms)

    def _fire_timers(self, now_ms: int) -> list[Save]:
        """Returns the snapshots that are whole. A burst of timers is spread over several polls: those left over are due
        at once.
        """
        saves: list[Save] = []
        for _ in range(_MAX_TIMERS_PER_POLL):
            timer = self._timer_queue.pop_due(now_ms)
            if timer is None:
                break
            if timer.shard_id != SET_TIMERS:
                self._shards[timer.shard_id].fire(timer.key, now_ms)
                continue
            self._timers.fired(timer.key)
            if timer.key.kind is ShardTimer.RELOAD:
                shard_id = int(timer.key.group_id)
                self._queued[shard_id] = shard_id not in self._distrusted
                self._may_have_log_work = True
                continue
            save = self.snapshots.step(now_ms)
            if save is not None:
                saves.append(save)
            self._arm_snapshots()
        return saves
