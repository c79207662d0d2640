# SPDX-License-Identifier: Apache-2.0
"""All shards of one kind in one process: ownership, loading, operations, appends and snapshots.

A shard is one partition of an internal topic with the state machine that is rebuilt from its log. A shard set is one
plain object: it has no clock, does no IO, starts no thread, and uses no futures.

Theory of operation
-------------------
The owner calls `run` for a request, and `poll` to get the work: requests for the logs (`kcoord.runtime.shard_log`),
replies that may leave, and background tasks to start. It calls one method for each outcome of a log request (`opened`,
`read`, `written`, ...), and `complete_task` when a task has ended. All these calls come from one thread, the event loop
of the owner. A shard set does nothing between two calls. Time is an argument, and `next_deadline_ms` returns the latest
time for the next `poll`. `poll` may be called at any time and returns every piece of work once.

The life of a shard:

    INITIAL -> LOADING     the shard is owned now and waits until its log is opened
    LOADING -> ACTIVE      the log is claimed, open and replayed; the machine's timers and tasks start
    LOADING -> FAILED      a batch cannot be replayed, or the loaded machine cannot be started
    ACTIVE  -> FAILED      a broken invariant, damage in the log, or an append with an unknown outcome
    FAILED  -> LOADING     the log is open again, after a delay that doubles with every failure in a row
    any     -> CLOSED      another process owns the shard or has claimed its log, or the topic was deleted
    CLOSED  -> LOADING     the shard is owned again

Rules:

* Operations run only while a shard is ACTIVE. Before, requests fail with COORDINATOR_LOAD_IN_PROGRESS; while it is
  FAILED or CLOSED, with NOT_COORDINATOR. A request is never answered from incomplete state.
* State is ahead of the log, and responses wait for it: no response leaves before everything that its operation may have
  read is durable. `kcoord.runtime.shard_context` has the steps of an operation.
* Operations of one shard are ordered by the calls of `run`, and so are their records in the log. A shard has at most
  one append in flight. Nothing orders two shards.
* Timers and tasks change state only by operations: `poll` fires the timers that are due, at most 500 at a time.
* A log is opened or released only while no append and no other load of its shard is in flight.
* Bulk completions are made by the polls that follow their operation, before these polls fire timers. Their requests
  still wait until then.
* A shard that leaves ACTIVE fails all waiting requests and drops its state machine, timers and tasks. The state comes
  back from the log. A crash of the process is the same event for all shards at once.
* The outcome of a load is dropped if the shard was closed or released meanwhile.
* Only the event loop calls a state machine. A task gets its input from the machine before it starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, StateMachine, Task, TimerKey
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

REPLIES_AT_ONCE: Final = 500
"""The most replies that leave, and the most bulk completions that are made, in one turn of the event loop.

The end of a classic join phase answers all members.
"""
_MAX_TIMERS_PER_POLL: Final = 500
_SNAPSHOT: Final = TimerKey(ShardTimer.SNAPSHOT)


class ShardSet(ShardLoads[M]):
    """All shards of one kind in one process. The module docstring has the rules, and ShardLoads the arguments."""

    # Queries.

    def active_for(self, key: str) -> ShardContext[M] | None:
        """Returns the shard of a group id or transactional id, or None if it is not ACTIVE."""
        shard = self._shards.get(partition_for(key, self.count))
        return shard if shard is not None and shard.machine is not None else None

    def active_shards(self) -> list[int]:
        """Returns the numbers of the ACTIVE shards."""
        return [shard_id for shard_id, shard in self._shards.items() if shard.machine is not None]

    def offsets(self, shard_id: int) -> tuple[int, int]:
        """Returns the durable offset and the next offset of a shard. The state in memory is that of the next offset."""
        shard = self._shards[shard_id]
        return shard.durable_offset, shard.next_offset

    def queue_size(self, now_ms: int) -> int:
        """Returns the number of tasks that run or wait to be started, plus that of timers that are due."""
        tasks = sum(shard.running_tasks for shard in self._shards.values())
        return tasks + self._timer_queue.count_due(now_ms)

    def is_idle(self) -> bool:
        """True if no append is in flight and `poll` has no replies, tasks, failures or appends."""
        outbox = self._outbox
        if self.has_replies() or outbox.tasks or outbox.failed or outbox.writable:
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
        """Runs an operation on a shard, as `ShardContext.run` describes."""
        shard = self._shards.get(shard_id)
        if shard is None:
            raise KafkaError(Errors.NOT_COORDINATOR)
        return shard.run(operation, request, context)

    def run_on_active(
        self, operation: Callable[[M, OperationContext, R], CoordinatorResult[None]], request: R, now_ms: int
    ) -> None:
        """Runs an operation, such as a metadata update, on every ACTIVE shard. Its responses are dropped.

        It also runs on standbys. Their records are dropped, because the owner of the shard writes them.
        """
        for shard in self._shards.values():
            if shard.machine is not None:
                self._run_unanswered(shard, operation, request, now_ms)
        for standby in self.standbys.values():
            operation(standby.loader.machine, OperationContext(now_ms), request)

    def complete_task(self, shard_id: int, task: Task, value: object, context: OperationContext) -> None:
        """Passes on the outcome of a task from `Ready.tasks`: a value, or the exception with which it failed."""
        self._shards[shard_id].complete_task(task, value, context)

    def expire_replies(self, now_ms: int, timeout_ms: int) -> None:
        """Fails requests that have waited for their shard's log longer than the timeout.

        They get COORDINATOR_NOT_AVAILABLE. The period of the calls limits how exactly the timeout is kept.
        """
        for shard in self._shards.values():
            if shard.machine is not None:
                shard.expire_replies(now_ms, timeout_ms)

    # Ownership.

    def follow(
        self, topic_id: bytes | None, count: int, led: Sequence[int], empty: Collection[int], now_ms: int
    ) -> list[int]:
        """Owns the partitions `led` of the internal topic, which has `count` partitions, and releases all others.

        If the topic was deleted, as Kafka permits, `topic_id` is None and all shards are released. The logs of the
        shards in `empty` have no records yet. Returns the shards that have to be loaded.
        """
        if topic_id is not None and topic_id == self.topic_id:
            return self.own(led)
        if self.topic_id is not None:
            self._give_up(self.topic_id)
            return []
        if topic_id is None:
            return []
        self.topic_id = topic_id
        return self.open_shards(count, led, empty, now_ms)

    def open_shards(self, count: int, own: Sequence[int], empty: Collection[int], now_ms: int) -> list[int]:
        """Owns the partitions `own` of the internal topic, which has `count` partitions. Returns the shards to load.

        The shards in `empty` become ACTIVE at once.
        """
        assert not self.shard_ids, "the number of shards never changes"
        self.count = count
        self._set_own(own)
        to_load = [shard_id for shard_id in own if shard_id not in empty]
        for shard_id in own:
            if shard_id in empty:
                self.load(shard_id, (), now_ms)
        self.claim(to_load)
        return to_load

    def own(self, led: Sequence[int]) -> list[int]:
        """Owns the shards `led` from now on, and releases all others. Returns the shards that have to be loaded.

        A shard whose release has not ended cannot be owned yet.
        """
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
        _logger.info("Owners of %s have changed: %d shards gained, %d lost", self.name, len(gained), len(lost))
        return gained

    def _give_up(self, topic_id: bytes) -> None:
        if all(release.deleted_topic_id is None for release in self._releasing):
            shard_ids = list(self.shard_ids)
            self._set_own(())
            self._release(Release(shard_ids, topic_id))

    def _set_own(self, own: Sequence[int]) -> None:
        """Sets the owned shards, as a range or as dictionary keys: both find a number fast and are in order."""
        self.shard_ids = range(self.count) if len(own) == self.count else dict.fromkeys(own).keys()

    def _release(self, release: Release) -> None:
        """Closes shards. `poll` releases their logs when no append and no load of them is in flight."""
        for shard_id in release.shard_ids:
            self.close_shard(shard_id)
        self._releasing[release] = False
        self._may_have_log_work = True

    def close_shard(self, shard_id: int) -> None:
        """Closes a shard. All waiting and all later requests get NOT_COORDINATOR."""
        shard = self._context(shard_id)
        self._drop_load(shard_id)
        if shard.state is not ShardState.CLOSED:
            shard.close()

    def released(self, release: Release) -> None:
        """Ends a release. The same shards, or those of a new topic of this name, can be owned again."""
        del self._releasing[release]
        self._has_released = self._may_have_log_work = True
        if release.deleted_topic_id is not None:
            _logger.warning(
                "The topic of the %s was deleted: %d shards were released", self.name, len(release.shard_ids)
            )
            self.topic_id = None

    def _releasable(self) -> list[Release]:
        """Returns the releases that can be requested now. That of a deleted topic waits for all earlier releases."""
        return [
            release
            for release, is_handed_out in self._releasing.items()
            if not is_handed_out
            and not any(map(self._is_busy, release.shard_ids))
            and (release.deleted_topic_id is None or release is next(iter(self._releasing)))
        ]

    def close(self) -> None:
        """Stops loading and taking snapshots, because the process ends."""
        self._is_closing = True
        self._timers.cancel(_SNAPSHOT)
        for shard_id in [*self._queued, *self._loads]:
            self._drop_load(shard_id)

    # Outcomes of appends and snapshots.

    def written(self, append: Append) -> None:
        """Handles an append that is durable: its replies leave with the next `poll`."""
        for observe in self.append_observers:
            try:
                observe(append)
            except Exception:
                _logger.exception("An observer of the appends of shard %d of %s failed", append.shard_id, self.name)
        shard = self._shards[append.shard_id]
        try:
            shard.written(append)
        except AssertionError as error:
            shard.broken(error)

    def decided(self, append: Append, offset: int, error: KafkaError | None) -> None:
        """Handles the decision about a provisional batch of an append that is still in flight."""
        shard = self._shards[append.shard_id]
        try:
            shard.decided(append, offset, error)
        except AssertionError as broken:
            shard.broken(broken)

    def unknown(self, append: Append, error: OSError, now_ms: int) -> None:
        """Handles an append whose batches may be in the log or not: the shard fails and is loaded again.

        After an error for lack of space (ENOSPC or EDQUOT), the loaded shard is read-only for a while.
        """
        shard = self._shards[append.shard_id]
        try:
            shard.unknown(append, error, now_ms)
        except AssertionError as broken:
            shard.broken(broken)

    def fenced(self, ticket: Append | Load) -> None:
        """Closes a shard whose log another process has claimed. It is loaded again after `claim` or `follow`."""
        shard = self._shards[ticket.shard_id]
        if isinstance(ticket, Append):
            try:
                shard.end_append(ticket)
            except AssertionError as error:
                shard.broken(error)
        elif self._answered(ticket) is None:
            return
        _logger.warning("Shard %d of %s is closed: another process has claimed its log", ticket.shard_id, self.name)
        self.close_shard(ticket.shard_id)
        self._closes.append(ticket.shard_id)
        self._may_have_log_work = True

    def saved(self, save: Save, now_ms: int, *, succeeded: bool) -> bool:
        """Ends a snapshot that was written or not. Returns False if it must be removed (`ShardSnapshots.saved`)."""
        is_kept = self.snapshots.saved(save, now_ms, succeeded=succeeded)
        if is_kept and succeeded:
            self._distrusted.discard(save.shard_id)
        self._arm_snapshots()
        return is_kept

    def take_snapshots(self, now_ms: int) -> None:
        """Begins to take the snapshots that are due. Called periodically, about once a second."""
        if not self._is_closing:
            self.snapshots.take_due(now_ms)
            self._arm_snapshots()

    def take_snapshot(self, shard_id: int, now_ms: int) -> bool:
        """Begins a snapshot of one shard. Returns False if it cannot be made now or another is being taken."""
        has_begun = self.snapshots.take(shard_id, now_ms)
        self._arm_snapshots()
        return has_begun

    def _arm_snapshots(self) -> None:
        due_ms = self.snapshots.step_due_ms
        if due_ms is not None and not self._is_closing:
            self._timers.schedule(_SNAPSHOT, due_ms)

    # Events in the log that no append has caused.

    def ended(self, shard_id: int, marker: CoordinatorRecord) -> None:
        """Replays the marker of a transaction that another coordinator has written to the log of a shard."""
        self._shards[shard_id].ended(marker)

    def rewrite(self, shard_id: int, keys: Collection[bytes], now_ms: int) -> None:
        """Writes the present values of keys again, because the log has void records of them."""
        self._shards[shard_id].rewrite(keys, now_ms)

    # Time.

    def poll(self, now_ms: int) -> Ready:
        """Fires the timers that are due, and returns all work for the owner."""
        if self._outbox.completing:
            self._complete_some()
        saves = self._fire_timers(now_ms) if self._timer_queue.first_ms <= now_ms else ()
        outbox = self._outbox
        if outbox.failed:
            failed, outbox.failed = outbox.failed, []
            for shard_id in failed:
                self._on_failed(shard_id, now_ms)
        appends = []
        for shard_id in outbox.writable:
            append = self._shards[shard_id].take_append()
            if append is not None:
                appends.append(append)
        ready = Ready(self.take_replies(), outbox.tasks, appends)
        outbox.tasks, outbox.writable = [], []
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
        """Removes and returns the replies that may leave now: no more than REPLIES_AT_ONCE, the oldest."""
        outbox = self._outbox
        replies, outbox.replies = outbox.replies, []
        if len(replies) > REPLIES_AT_ONCE:
            outbox.replies = replies[REPLIES_AT_ONCE:]
            del replies[REPLIES_AT_ONCE:]
        return replies

    def _complete_some(self) -> None:
        """Takes bulk completions, no more than REPLIES_AT_ONCE with the replies that leave before them."""
        completing = self._outbox.completing
        left = REPLIES_AT_ONCE - len(self._outbox.replies)
        while left > 0 and completing:
            shard_id, completions = completing[0]
            left -= self._shards[shard_id].complete_some(completions, left)
            if left > 0:
                completing.popleft()

    def has_replies(self) -> bool:
        """True if replies are left for the next turn of the event loop."""
        return bool(self._outbox.replies or self._outbox.completing)

    def has_ready(self, now_ms: int) -> bool:
        """True if `poll` would return any work or a timer may be due."""
        outbox = self._outbox
        if outbox.writable or outbox.replies or outbox.tasks or outbox.failed or outbox.completing:
            return True
        if self._timer_queue.first_ms <= now_ms:
            return True
        return self._may_have_log_work and (self._can_load() or self._has_released or bool(self._releasable()))

    def next_deadline_ms(self) -> int | None:
        """Returns the latest time for the next `poll`, or None if no timer is armed."""
        return self._timer_queue.next_deadline_ms()

    def has_timer_before(self, deadline_ms: int) -> bool:
        """False if no timer is due before `deadline_ms`. True may be wrong, for a timer that was re-armed."""
        return self._timer_queue.first_ms < deadline_ms

    def _fire_timers(self, now_ms: int) -> list[Save]:
        """Fires timers that are due, and returns the snapshots that are complete.

        A burst of timers is spread over several polls. The timers left over are still due.
        """
        saves: list[Save] = []
        for _ in range(_MAX_TIMERS_PER_POLL):
            timer = self._timer_queue.pop_due(now_ms)
            if timer is None:
                break
            if timer.shard_id != SET_TIMERS:
                shard = self._shards[timer.shard_id]
                try:
                    shard.fire(timer.key, now_ms)
                except AssertionError as error:
                    shard.broken(error)
                continue
            self._timers.fired(timer.key)
            if timer.key.kind is ShardTimer.RELOAD:
                shard_id = int(timer.key.group_id)
                self._queued[shard_id] = shard_id not in self._distrusted
                self._may_have_log_work = True
                continue
            try:
                save = self.snapshots.step(now_ms)
                if save is not None:
                    saves.append(save)
            except AssertionError as error:
                self.snapshots.abandon(error)
            self._arm_snapshots()
        return saves
