# SPDX-License-Identifier: Apache-2.0
"""Timers as data: a key and a deadline, no closures and no clock.

Re-arming is cheap, because session timers move with every heartbeat: the new deadline is stored in the timer, and the
heap learns of it only when its old entry comes up. Timers with equal deadlines fire in the order in which they were put
into the heap, so that runs can be repeated.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

from kcoord.runtime.result import TimerKey, TimerKind

_DISARMED: Final = -1
_SLACK: Final = 64


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

    __slots__ = ("_armed", "_heap", "_sequence")

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
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

    def may_have_before(self, deadline_ms: int) -> bool:
        """Whether the heap begins with an entry before that; its timer may have moved on since."""
        return bool(self._heap) and self._heap[0][0] < deadline_ms

    def count_due(self, now_ms: int) -> int:
        """How many timers are due, for metrics."""
        if not self.may_have_before(now_ms + 1):
            return 0
        return sum(queued_ms == timer.queued_ms and timer.deadline_ms <= now_ms for queued_ms, _, timer in self._heap)

    def pop_due(self, now_ms: int) -> Timer | None:
        """Disarms and returns the first timer whose deadline has come."""
        if not self._heap or self._heap[0][0] > now_ms:
            return None
        self._settle()
        if not self._heap or self._heap[0][0] > now_ms:
            return None
        timer = heappop(self._heap)[2]
        self._armed -= 1
        return timer

    def _push(self, timer: Timer) -> None:
        timer.queued_ms = timer.deadline_ms
        self._sequence += 1
        heappush(self._heap, (timer.deadline_ms, self._sequence, timer))

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
