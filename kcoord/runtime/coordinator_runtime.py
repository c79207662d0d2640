# SPDX-License-Identifier: Apache-2.0
"""Runs operations on the shards of one kind of state machine; synchronous, without clock and IO.

The owner calls `run_write` for requests, `poll` to fetch what is to be written, answered and started, and
`on_append_completed` when a write ended. In between nothing happens: time is an argument, and `next_deadline_ms` says
when `poll` has to be called at the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kcoord.runtime.loader import Loader, LoadError
from kcoord.runtime.outbox import WAIT, Append, Outbox, Reply, Statistics, Wait, Waiter
from kcoord.runtime.result import MAX_BATCH_BYTES, CoordinatorResult, OperationContext, StateMachine, Task
from kcoord.runtime.serde import RecordSerde
from kcoord.runtime.shard_context import ShardContext, ShardState
from kcoord.runtime.snapshot import Chunk, HasSnapshot, make_chunks
from kcoord.runtime.timers import TimerQueue
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader

__all__ = [
    "WAIT",
    "Append",
    "CoordinatorRuntime",
    "LoadError",
    "Loader",
    "Ready",
    "Reply",
    "ShardContext",
    "ShardState",
    "Statistics",
    "Wait",
    "Waiter",
]

M = TypeVar("M", bound=StateMachine)
R = TypeVar("R")
T = TypeVar("T")

_MAX_TIMERS_PER_POLL: Final = 500


@dataclass(slots=True)
class Ready:
    """What the owner has to do: write, answer, start, and load again.

    `failed` names shards whose log can be opened and loaded again now: no write of theirs is under way.
    """

    appends: list[Append] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class CoordinatorRuntime(Generic[M]):
    """See the module's text. `make_machine` makes the empty state machine into which a shard's log is replayed. A write
    waits for `linger_ms` for others to join it.
    """

    def __init__(
        self,
        make_machine: Callable[[int], M],
        serde: RecordSerde,
        *,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        compression: Compression = Compression.NONE,
        linger_ms: int = 0,
    ) -> None:
        self.statistics = Statistics()
        self._make_machine = make_machine
        self._serde = serde
        self._max_batch_bytes = max_batch_bytes
        self._compression = compression
        self._linger_ms = linger_ms
        self._shards: dict[int, ShardContext[M]] = {}
        self._timer_queue = TimerQueue()
        self._outbox = Outbox()
        self._skipped: set[str] = set()

    # Shards.

    def start_load(
        self,
        shard_id: int,
        batches: Iterable[tuple[BatchHeader, bytes]],
        end_offset: int = 0,
        snapshot: Iterable[Chunk] = (),
    ) -> Loader[M]:
        """Begins to load a shard that is new, failed or closed. Until the loader is through,
        COORDINATOR_LOAD_IN_PROGRESS.
        """
        shard = self._shards.get(shard_id)
        if shard is None:
            shard = self._shards[shard_id] = ShardContext(
                shard_id,
                self._serde,
                self._timer_queue,
                self._outbox,
                self.statistics,
                self._max_batch_bytes,
                self._compression,
                self._linger_ms,
            )
        machine = self._make_machine(shard_id)
        return Loader(shard, machine, self._serde, batches, end_offset, self.statistics, self._skipped, snapshot)

    def load(
        self, shard_id: int, batches: Iterable[tuple[BatchHeader, bytes]], now_ms: int, end_offset: int = 0
    ) -> None:
        """Loads a shard in one go."""
        loader = self.start_load(shard_id, batches, end_offset)
        while not loader.step(now_ms):
            pass

    def close_shard(self, shard_id: int) -> None:
        """Ends a shard: who waits gets NOT_COORDINATOR, and so does every later operation."""
        shard = self._shards.get(shard_id)
        if shard is not None and shard.state is not ShardState.CLOSED:
            shard.close()

    def fail_shard(self, shard_id: int, reason: str) -> None:
        """Its log turned out to be damaged: the shard ends as after a failed write."""
        shard = self._shards.get(shard_id)
        if shard is not None and shard.state is ShardState.ACTIVE:
            shard.fail(reason, None)

    def chunks(self, shard_id: int) -> Iterator[list[Chunk]] | None:
        """A snapshot of an active shard, to be taken from here in slices; None where there can be none now."""
        machine: object = self.machine(shard_id)
        parts = machine.snapshot() if isinstance(machine, HasSnapshot) else None
        return make_chunks(parts, self._serde) if parts is not None else None

    def state(self, shard_id: int) -> ShardState:
        shard = self._shards.get(shard_id)
        return shard.state if shard is not None else ShardState.INITIAL

    def is_writing(self, shard_id: int) -> bool:
        """Whether a write of the shard is under way, also of one that has been closed."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_writing

    def is_read_only(self, shard_id: int, now_ms: int) -> bool:
        """Whether a shard takes no writes for now, since its disk is full. It can be loaded and read."""
        shard = self._shards.get(shard_id)
        return shard is not None and shard.is_read_only(now_ms)

    def machine(self, shard_id: int) -> M | None:
        """The state machine of an active shard, to look at."""
        shard = self._shards.get(shard_id)
        return shard.machine if shard is not None else None

    def active_shards(self) -> list[int]:
        return [shard_id for shard_id, shard in self._shards.items() if shard.machine is not None]

    def offsets(self, shard_id: int) -> tuple[int, int]:
        """(durable offset, next offset) of a shard; the state in memory is as of the second."""
        shard = self._shards[shard_id]
        return shard.durable_offset, shard.next_offset

    # Operations.

    def run_write(
        self,
        shard_id: int,
        operation: Callable[[M, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
        token: Hashable,
    ) -> T | Wait:
        """Runs an operation, also one that only reads. `request` is handed to it, so that callers on the hot path need
        no closure.

        Returns its response, or raises its KafkaError, where it depends on nothing that is still to be written. Else
        WAIT: a later `Ready.replies` has `token` with the response or the KafkaError. A result that is PENDING is
        completed by `context.token`.
        """
        shard = self._shards.get(shard_id)
        if shard is None:
            raise KafkaError(Errors.NOT_COORDINATOR)
        return shard.run(operation, request, context, token)

    def active(self, shard_id: int) -> ShardContext[M] | None:
        """A shard that can run operations; its `machine` is there. For what need not go through `run_write`."""
        shard = self._shards.get(shard_id)
        return shard if shard is not None and shard.machine is not None else None

    def complete_task(self, shard_id: int, task: Task, value: object, context: OperationContext) -> None:
        """A task of `Ready.tasks` ended with a value, or with an exception as value."""
        self._shards[shard_id].complete_task(task, value, context)

    # Disk and time.

    def poll(self, now_ms: int) -> Ready:
        """Fires the timers that are due, then hands out everything there is to do."""
        self._fire_timers(now_ms)
        outbox = self._outbox
        replies, waiters = self.take_replies()
        ready = Ready(replies=replies, waiters=waiters, tasks=outbox.tasks, failed=outbox.failed)
        for shard_id in outbox.writable:
            append = self._shards[shard_id].take_append()
            if append is not None:
                ready.appends.append(append)
        outbox.tasks, outbox.failed, outbox.writable = [], [], []
        return ready

    def take_replies(self) -> tuple[list[Reply], list[Waiter]]:
        """What may leave now; the waiters are those whose wait was for good."""
        outbox = self._outbox
        replies, waiters = outbox.replies, outbox.waiters
        outbox.replies, outbox.waiters = [], []
        return replies, waiters

    def has_ready(self, now_ms: int) -> bool:
        """Whether `poll` would give something, or find a timer due."""
        outbox = self._outbox
        has_some = outbox.writable or outbox.replies or outbox.waiters or outbox.tasks or outbox.failed
        return bool(has_some) or self._timer_queue.may_have_before(now_ms + 1)

    def queue_size(self, now_ms: int) -> int:
        """Tasks that run or wait to be started, and timers that are due and have not fired."""
        tasks = sum(shard.running_tasks for shard in self._shards.values())
        return tasks + self._timer_queue.count_due(now_ms)

    def has_timer_before(self, deadline_ms: int) -> bool:
        """False where no timer is due before; True may turn out to be one that moved on."""
        return self._timer_queue.may_have_before(deadline_ms)

    def on_append_completed(self, shard_id: int, now_ms: int, error: OSError | None) -> None:
        """The write of an Append ended. With an error nothing is known about the log: the shard fails and has to be
        loaded again. Where the disk is full, it refuses for a while what would have to be written.
        """
        self._shards[shard_id].append_completed(error, now_ms)

    def expire_replies(self, now_ms: int, timeout_ms: int) -> None:
        """Answers those with COORDINATOR_NOT_AVAILABLE who have waited for their shard's log longer than the timeout.
        It is called again and again, and times nobody's wait more exactly than that.
        """
        for shard in self._shards.values():
            if shard.machine is not None:
                shard.expire_replies(now_ms, timeout_ms)

    def next_deadline_ms(self) -> int | None:
        """When a timer is due next."""
        return self._timer_queue.next_deadline_ms()

    def is_idle(self) -> bool:
        """Whether everything is written and handed out."""
        outbox = self._outbox
        if outbox.replies or outbox.waiters or outbox.tasks or outbox.failed or outbox.writable:
            return False
        return not any(shard.is_writing for shard in self._shards.values())

    def _fire_timers(self, now_ms: int) -> None:
        """A burst of timers is spread over several polls: those left over are due at once."""
        for _ in range(_MAX_TIMERS_PER_POLL):
            timer = self._timer_queue.pop_due(now_ms)
            if timer is None:
                return
            self._shards[timer.shard_id].fire(timer.key, now_ms)
