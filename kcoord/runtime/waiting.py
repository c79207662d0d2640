# SPDX-License-Identifier: Apache-2.0
"""The parts of a shard that wait: timers, replies that wait for the log, and the outbox that `poll` empties.

Replies wait in one queue per shard, in the order of offsets. A reply leaves when every record that its operation may
have read is durable.

Timers are data: a key and a deadline, without closures and without a clock. All shards of a set share one heap.
Re-arming is cheap, because every heartbeat moves a session timer: only the deadline in the timer changes. The timer's
heap entry keeps the old time, and when that time comes, the entry is pushed again with the new deadline. An entry is
valid if its time is the timer's `queued_ms`. Timers with equal deadlines fire in the order in which they were put into
the heap, so that runs can be repeated.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from kcoord.runtime.result import Completion, Task, TimerKey, TimerKind
from kcoord.runtime.shard_log import Append, Load, Release, Save
from kcoord_protocol.errors import KafkaError

_DISARMED: Final = -1
_NEVER: Final = 1 << 63
_SLACK: Final = 64
MOST_SETTLED: Final = 500
"""The most heap entries of re-armed timers that one look at the queue moves. Moving 100,000 takes 100 ms."""
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_FIRST_REFUSAL_MS: Final = 1000
_LONGEST_REFUSAL_MS: Final = 8000


class ShardState(Enum):
    """The states of a shard. Operations run only in ACTIVE. `kcoord.runtime.shard_set` describes the transitions."""

    INITIAL = "Initial"
    LOADING = "Loading"
    ACTIVE = "Active"
    FAILED = "Failed"
    CLOSED = "Closed"


NEXT_STATES: Final = {
    ShardState.INITIAL: {ShardState.LOADING, ShardState.CLOSED},
    ShardState.LOADING: {ShardState.LOADING, ShardState.ACTIVE, ShardState.FAILED, ShardState.CLOSED},
    ShardState.ACTIVE: {ShardState.FAILED, ShardState.CLOSED},
    ShardState.FAILED: {ShardState.LOADING, ShardState.CLOSED},
    ShardState.CLOSED: {ShardState.LOADING},
}


class Waiter(ABC):
    """Waits for records to become durable. The shard set calls neither method: it returns waiters in `Ready`."""

    __slots__ = ()

    @abstractmethod
    def settle(self) -> None:
        """Called when the records are durable. A response that depends on them may leave."""

    @abstractmethod
    def fail(self, error: KafkaError) -> None:
        """Called if the shard fails before the records are durable."""


def _to_nobody(value: object) -> None:
    """Drops the response. No client waits for it."""


class DeferredReply(Waiter):
    """The response of an operation that has to wait for the log.

    The caller of the operation sets `deliver`, which is called with the response, or with a KafkaError for an expected
    failure.
    """

    __slots__ = ("deliver", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.deliver: Callable[[object], None] = _to_nobody

    def settle(self) -> None:
        self.deliver(self.value)

    def fail(self, error: KafkaError) -> None:
        self.deliver(error)


class Refusal(Waiter):
    """Fails another waiter when it is settled. So failures leave in the same queue as responses."""

    __slots__ = ("_error", "_waiter")

    def __init__(self, waiter: Waiter, error: KafkaError) -> None:
        self._waiter = waiter
        self._error = error

    def settle(self) -> None:
        self._waiter.fail(self._error)

    def fail(self, error: KafkaError) -> None:
        self._waiter.fail(error)


class DeferredReplies:
    """The waiters of one shard. A waiter waits until everything that its operation may have read is durable.

    The next offset never falls, so the order of arrival is also the order of offsets.
    """

    __slots__ = ("_queue", "_seen")

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Waiter]] = deque()
        self._seen: deque[tuple[int, int]] = deque()
        """The times at which `overdue` was called, with the shard's next offset at that time."""

    def add(self, offset: int, waiter: Waiter) -> None:
        """Adds a waiter that is released when everything before `offset` is durable."""
        queue = self._queue
        assert not queue or queue[-1][0] <= offset, f"R-7: a reply waits for {offset} after one for {queue[-1][0]}"
        queue.append((offset, waiter))

    def release(self, durable_offset: int, replies: list[Waiter]) -> None:
        """Moves the waiters for offsets up to `durable_offset` to `replies`, in order."""
        queue = self._queue
        while queue and queue[0][0] <= durable_offset:
            replies.append(queue.popleft()[1])

    def overdue(self, next_offset: int, now_ms: int, since_ms: int) -> list[Waiter]:
        """Removes and returns, in order, the waiters that already waited at `since_ms`.

        Waiters have no time of their own. Periodic calls of this method note the next offset, so the age of a waiter is
        known only as exactly as the period.
        """
        self._seen.append((now_ms, next_offset))
        waiters: list[Waiter] = []
        while self._seen[0][0] <= since_ms:
            self.release(self._seen.popleft()[1], waiters)
        return waiters

    def drain(self) -> list[Waiter]:
        """Removes all waiters and returns them in order."""
        waiters = [waiter for _, waiter in self._queue]
        self._queue.clear()
        self._seen.clear()
        return waiters


class FullDisk:
    """The time for which a shard refuses results with records after a write found no space.

    The time doubles with every such write, up to a limit. After a successful write the shard sets `refusal_ms` to 0.
    """

    __slots__ = ("refusal_ms", "until_ms")

    def __init__(self) -> None:
        self.refusal_ms = 0
        self.until_ms = 0

    def note(self, error: OSError, now_ms: int) -> None:
        """Begins a refusal if a write failed because there is no space."""
        if error.errno in _NO_SPACE:
            self.refusal_ms = min(max(2 * self.refusal_ms, _FIRST_REFUSAL_MS), _LONGEST_REFUSAL_MS)
            self.until_ms = now_ms + self.refusal_ms


@dataclass(slots=True)
class Statistics:
    """Counters of all shards of one set, for metrics."""

    records_appended: int = 0
    batches_appended: int = 0
    bytes_appended: int = 0
    operations_failed: int = 0
    invariants_broken: int = 0
    records_loaded: int = 0
    records_skipped: int = 0


@dataclass(slots=True)
class Outbox:
    """What the next `poll` returns or handles, for all shards of one set."""

    replies: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    writable: list[int] = field(default_factory=list)
    completing: deque[tuple[int, Iterator[Completion]]] = field(default_factory=deque)
    """The bulk completions of results that are not answered yet, with their shards."""


class Ready:
    """The work of the owner after a `poll`: requests for the log, replies that may leave, and tasks to start.

    Every turn of the event loop makes an instance. Rare fields are therefore attributes of the class and set only if
    they have content.
    """

    saves: Sequence[Save] = ()
    has_log_work = False
    """True if any of the following fields may have content."""
    closes: Sequence[int] = ()
    releases: Sequence[Release] = ()
    opens: Sequence[Load] = ()
    reads: Sequence[Load] = ()
    has_released = False
    """True if shards were released. They, or those of a new topic of this name, can be owned again (`ShardSet.follow`).
    """
    active: Sequence[Load] = ()
    """Loads that succeeded. Their shards are ACTIVE."""

    def __init__(self, replies: list[Waiter], tasks: list[tuple[int, Task]], appends: list[Append]) -> None:
        self.replies = replies
        self.tasks = tasks
        self.appends = appends


class ShardTimer(TimerKind):
    """The timers of the runtime itself. State machines do not see them."""

    LINGER = "shard-linger"
    RELOAD = "shard-reload"
    SNAPSHOT = "shard-snapshot"


class Timer:
    """One timer of one shard. `queued_ms` is the time of its valid heap entry, which is never after the deadline."""

    __slots__ = ("deadline_ms", "key", "queued_ms", "shard_id")

    def __init__(self, shard_id: int, key: TimerKey, deadline_ms: int) -> None:
        self.shard_id = shard_id
        self.key = key
        self.deadline_ms = deadline_ms
        self.queued_ms = deadline_ms

    def rearm(self, deadline_ms: int) -> bool:
        """Moves the deadline without a change of the heap.

        Returns False if that is impossible: the timer is not armed, or the deadline is before its heap entry.
        """
        if not 0 <= self.queued_ms <= deadline_ms:
            return False
        self.deadline_ms = deadline_ms
        return True


class TimerQueue:
    """The armed timers of all shards of a runtime in one heap."""

    __slots__ = ("_armed", "_heap", "_numbers", "first_ms")

    def __init__(self) -> None:
        self.first_ms = _NEVER
        """No timer is due before this time, that of the first heap entry. Its timer may have a later deadline now.

        An attribute, because every turn of the event loop reads it several times.
        """
        self._heap: list[tuple[int, int, Timer]] = []
        self._numbers = count()
        self._armed = 0

    def __len__(self) -> int:
        return self._armed

    def add(self, timer: Timer) -> None:
        """Adds a timer that was just armed."""
        self._armed += 1
        self._push(timer)

    def advance(self, timer: Timer) -> None:
        """Adds an entry for an armed timer whose deadline is now before its heap entry. The old entry becomes void."""
        self._push(timer)

    def disarm(self, timer: Timer) -> None:
        """Voids the timer's heap entry. Void entries are removed when they outnumber the valid entries."""
        self._armed -= 1
        timer.deadline_ms = timer.queued_ms = _DISARMED
        if len(self._heap) > 2 * self._armed + _SLACK:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued_ms]
            heapify(self._heap)
            self._note_first()

    def next_deadline_ms(self) -> int | None:
        """Returns the earliest deadline, or None if no timer is armed.

        It may be an earlier time if more than MOST_SETTLED timers were re-armed.
        """
        self._settle()
        return self.first_ms if self._heap else None

    def count_due(self, now_ms: int) -> int:
        """Returns the number of timers that are due, for metrics. Reads the whole heap."""
        valid = {timer for queued_ms, _, timer in self._heap if queued_ms == timer.queued_ms}
        return sum(timer.deadline_ms <= now_ms for timer in valid)

    def pop_due(self, now_ms: int) -> Timer | None:
        """Removes and returns the first timer that is due. Returns None if no timer is due.

        It may also return None while more than MOST_SETTLED timers were re-armed. Later calls then return the timers
        that are due.
        """
        if now_ms < self.first_ms or not self._settle() or now_ms < self.first_ms:
            return None
        timer = heappop(self._heap)[2]
        self._armed -= 1
        self._note_first()
        return timer

    def _note_first(self) -> None:
        self.first_ms = self._heap[0][0] if self._heap else _NEVER

    def _push(self, timer: Timer) -> None:
        timer.queued_ms = timer.deadline_ms
        heappush(self._heap, (timer.deadline_ms, next(self._numbers), timer))
        if timer.deadline_ms < self.first_ms:
            self.first_ms = timer.deadline_ms

    def _settle(self) -> bool:
        """Makes the first heap entry valid: drops void entries and pushes those of re-armed timers again.

        Returns False if the entry is still invalid after MOST_SETTLED entries.
        """
        heap, is_settled = self._heap, False
        for _ in range(MOST_SETTLED):
            queued_ms, timer = (heap[0][0], heap[0][2]) if heap else (_NEVER, None)
            if timer is None or queued_ms == timer.deadline_ms == timer.queued_ms:
                is_settled = True
                break
            heappop(heap)
            if queued_ms == timer.queued_ms:
                self._push(timer)
        self._note_first()
        return is_settled


class ShardTimers:
    """The timers of one shard by key. The heap is shared with the other shards."""

    __slots__ = ("_queue", "_shard_id", "_timers")

    def __init__(self, shard_id: int, queue: TimerQueue) -> None:
        self._shard_id = shard_id
        self._queue = queue
        self._timers: dict[TimerKey, Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def schedule(self, key: TimerKey, deadline_ms: int) -> Timer:
        """Arms the timer or moves its deadline. `Timer.rearm` of the result is a faster way to a later deadline."""
        timer = self._timers.get(key)
        if timer is None:
            timer = self._timers[key] = Timer(self._shard_id, key, deadline_ms)
            self._queue.add(timer)
            return timer
        timer.deadline_ms = deadline_ms
        if deadline_ms < timer.queued_ms:
            self._queue.advance(timer)
        return timer

    def cancel(self, key: TimerKey) -> None:
        """Disarms the timer, if it is armed."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            self._queue.disarm(timer)

    def deadline_ms(self, key: TimerKey) -> int | None:
        """Returns the deadline of the timer, or None if it is not armed."""
        timer = self._timers.get(key)
        return timer.deadline_ms if timer is not None else None

    def deadlines(self) -> dict[TimerKey, int]:
        """Returns the deadlines of all armed timers, in the order in which the timers were first armed."""
        return {key: timer.deadline_ms for key, timer in self._timers.items()}

    def fired(self, key: TimerKey) -> None:
        """Forgets a timer that `TimerQueue.pop_due` returned."""
        timer = self._timers.pop(key)
        timer.deadline_ms = timer.queued_ms = _DISARMED

    def clear(self) -> None:
        """Disarms all timers of the shard."""
        for timer in self._timers.values():
            self._queue.disarm(timer)
        self._timers.clear()
