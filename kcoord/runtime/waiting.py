# SPDX-License-Identifier: Apache-2.0
"""What the shards of one set wait for, and what they have ready: timers, replies that rest on records which are not
durable yet, and the outbox from which the next `poll` takes.

Timers are data: a key and a deadline, no closures and no clock. Re-arming is cheap, because session timers move with
every heartbeat: the new deadline is stored in the timer, and the heap learns of it only when its old entry comes up.
Timers with equal deadlines fire in the order in which they were put into the heap, so that runs can be repeated.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from kcoord.runtime.result import Task, TimerKey, TimerKind
from kcoord.runtime.shard_log import Append, Load, Release, Save
from kcoord_protocol.errors import KafkaError

_DISARMED: Final = -1
_SLACK: Final = 64
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_FIRST_REFUSAL_MS: Final = 1000
_LONGEST_REFUSAL_MS: Final = 8000


class ShardState(Enum):
    """The life of a shard; operations run in ACTIVE alone."""

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
    """Waits for records to be durable. The shard set calls neither method itself: it hands waiters out in `Ready`."""

    __slots__ = ()

    @abstractmethod
    def settle(self) -> None:
        """The records are durable: an answer that rests on them may leave."""

    @abstractmethod
    def fail(self, error: KafkaError) -> None:
        """The shard failed before that."""


def _to_nobody(value: object) -> None:
    """Nobody waits for the answer."""


class DeferredReply(Waiter):
    """The answer to an operation, which has to wait. Whoever ran the operation sets `deliver`: it gets the response, or
    a KafkaError for an expected failure.
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
    """Settles a waiter by failing it."""

    __slots__ = ("_error", "_waiter")

    def __init__(self, waiter: Waiter, error: KafkaError) -> None:
        self._waiter = waiter
        self._error = error

    def settle(self) -> None:
        self._waiter.fail(self._error)

    def fail(self, error: KafkaError) -> None:
        self._waiter.fail(error)


class DeferredReplies:
    """The waiters of one shard that wait until everything their operation could have seen is durable.

    Offsets only grow, so a queue in arrival order is also a queue in order of offsets.
    """

    __slots__ = ("_queue", "_seen")

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Waiter]] = deque()
        self._seen: deque[tuple[int, int]] = deque()
        """When `overdue` was called, and the end of the log then."""

    def add(self, offset: int, waiter: Waiter) -> None:
        """`waiter` is settled once everything before `offset` is durable."""
        self._queue.append((offset, waiter))

    def release(self, durable_offset: int, replies: list[Waiter]) -> None:
        """Moves all that waited for at most `durable_offset`, in order."""
        queue = self._queue
        while queue and queue[0][0] <= durable_offset:
            replies.append(queue.popleft()[1])

    def overdue(self, next_offset: int, now_ms: int, since_ms: int) -> list[Waiter]:
        """Removes all that were there at `since_ms`, as far as calls of this have seen: it is called again and again.
        Returns them in order.
        """
        self._seen.append((now_ms, next_offset))
        waiters: list[Waiter] = []
        while self._seen[0][0] <= since_ms:
            self.release(self._seen.popleft()[1], waiters)
        return waiters

    def drain(self) -> list[Waiter]:
        """Removes all and returns them in order."""
        waiters = [waiter for _, waiter in self._queue]
        self._queue.clear()
        self._seen.clear()
        return waiters


class FullDisk:
    """How long a shard refuses what would have to be written, after a write that found no space. The time doubles with
    each such write, until a write succeeds and sets `refusal_ms` to 0.
    """

    __slots__ = ("refusal_ms", "until_ms")

    def __init__(self) -> None:
        self.refusal_ms = 0
        self.until_ms = 0

    def note(self, error: OSError, now_ms: int) -> None:
        """A write failed."""
        if error.errno in _NO_SPACE:
            self.refusal_ms = min(max(2 * self.refusal_ms, _FIRST_REFUSAL_MS), _LONGEST_REFUSAL_MS)
            self.until_ms = now_ms + self.refusal_ms


@dataclass(slots=True)
class Statistics:
    """What the shards of one set did, for metrics."""

    records_appended: int = 0
    batches_appended: int = 0
    bytes_appended: int = 0
    operations_failed: int = 0
    records_loaded: int = 0
    records_skipped: int = 0


@dataclass(slots=True)
class Outbox:
    """What the shards of one set have for the next `poll`."""

    replies: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    writable: list[int] = field(default_factory=list)


class Ready:
    """What the owner has to do now: requests of the log, answers that may leave, and tasks to start. It is made anew in
    each turn, so what is rare is an attribute of the class until there is some.
    """

    saves: Sequence[Save] = ()
    has_log_work = False
    """Whether any of the following may be there."""
    closes: Sequence[int] = ()
    releases: Sequence[Release] = ()
    opens: Sequence[Load] = ()
    reads: Sequence[Load] = ()
    has_released = False
    """Shards were given away: a topic of that name, or the same shards, can be owned again (`ShardSet.follow`)."""
    active: Sequence[Load] = ()
    """Loads that ended well; their shards answer from now on."""

    def __init__(self, replies: list[Waiter], tasks: list[tuple[int, Task]], appends: list[Append]) -> None:
        self.replies = replies
        self.tasks = tasks
        self.appends = appends


class ShardTimer(TimerKind):
    """The timers of a shard's own, which no state machine hears of."""

    LINGER = "shard-linger"
    RELOAD = "shard-reload"
    SNAPSHOT = "shard-snapshot"


class Timer:
    """One timer of one shard. `queued_ms` is the position of its valid heap entry, at or before the deadline."""

    __slots__ = ("deadline_ms", "key", "queued_ms", "shard_id")

    def __init__(self, shard_id: int, key: TimerKey, deadline_ms: int) -> None:
        self.shard_id = shard_id
        self.key = key
        self.deadline_ms = deadline_ms
        self.queued_ms = deadline_ms

    def rearm(self, deadline_ms: int) -> bool:
        """Moves the deadline, without asking the queue; False where that has to be asked: the timer is not armed any
        more, or would come before its heap entry.
        """
        if not 0 <= self.queued_ms <= deadline_ms:
            return False
        self.deadline_ms = deadline_ms
        return True


class TimerQueue:
    """The armed timers of all shards of a runtime in one heap."""

    __slots__ = ("_armed", "_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._numbers = count()
        self._armed = 0

    def __len__(self) -> int:
        return self._armed

    def add(self, timer: Timer) -> None:
        """Takes in a newly armed timer."""
        self._armed += 1
        self._push(timer)

    def advance(self, timer: Timer) -> None:
        """The deadline of an armed timer moved to before its heap entry, which becomes void."""
        self._push(timer)

    def disarm(self, timer: Timer) -> None:
        """The timer's heap entry becomes void; void entries are swept out once they outnumber the others."""
        self._armed -= 1
        timer.deadline_ms = timer.queued_ms = _DISARMED
        if len(self._heap) > 2 * self._armed + _SLACK:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].queued_ms]
            heapify(self._heap)

    def next_deadline_ms(self) -> int | None:
        """When the next timer is due."""
        self._settle()
        return self._heap[0][0] if self._heap else None

    def may_be_due(self, now_ms: int) -> bool:
        """Whether the heap begins with an entry that has come up; its timer may have moved on since."""
        return bool(self._heap) and self._heap[0][0] <= now_ms

    def may_have_before(self, deadline_ms: int) -> bool:
        """Whether the heap begins with an entry before that; its timer may have moved on since."""
        return bool(self._heap) and self._heap[0][0] < deadline_ms

    def count_due(self, now_ms: int) -> int:
        """How many timers are due, for metrics."""
        valid = {timer for queued_ms, _, timer in self._heap if queued_ms == timer.queued_ms}
        return sum(timer.deadline_ms <= now_ms for timer in valid)

    def pop_due(self, now_ms: int) -> Timer | None:
        """Disarms and returns the first timer whose deadline has come."""
        if not self.may_be_due(now_ms):
            return None
        self._settle()
        if not self.may_be_due(now_ms):
            return None
        timer = heappop(self._heap)[2]
        self._armed -= 1
        return timer

    def _push(self, timer: Timer) -> None:
        timer.queued_ms = timer.deadline_ms
        heappush(self._heap, (timer.deadline_ms, next(self._numbers), timer))

    def _settle(self) -> None:
        """Drops void entries at the top, and moves those of re-armed timers to where they belong now."""
        heap = self._heap
        while heap:
            queued_ms, _, timer = heap[0]
            if queued_ms == timer.deadline_ms == timer.queued_ms:
                return
            heappop(heap)
            if queued_ms == timer.queued_ms:
                self._push(timer)


class ShardTimers:
    """The timers of one shard by key; its heap is shared with the other shards."""

    __slots__ = ("_queue", "_shard_id", "_timers")

    def __init__(self, shard_id: int, queue: TimerQueue) -> None:
        self._shard_id = shard_id
        self._queue = queue
        self._timers: dict[TimerKey, Timer] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def schedule(self, key: TimerKey, deadline_ms: int) -> Timer:
        """Arms the timer, or moves it; `Timer.rearm` of the result is the quick way to move it further."""
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
        timer = self._timers.pop(key, None)
        if timer is not None:
            self._queue.disarm(timer)

    def deadline_ms(self, key: TimerKey) -> int | None:
        """The deadline of an armed timer."""
        timer = self._timers.get(key)
        return timer.deadline_ms if timer is not None else None

    def deadlines(self) -> dict[TimerKey, int]:
        """All armed timers, in the order in which they were first armed."""
        return {key: timer.deadline_ms for key, timer in self._timers.items()}

    def fired(self, key: TimerKey) -> None:
        """The queue has popped this timer."""
        timer = self._timers.pop(key)
        timer.deadline_ms = timer.queued_ms = _DISARMED

    def clear(self) -> None:
        for timer in self._timers.values():
            self._queue.disarm(timer)
        self._timers.clear()
