# SPDX-License-Identifier: Apache-2.0
"""Timers against a plain model, and the limits of their cost."""

from __future__ import annotations

from random import Random

import pytest

from kcoord.runtime.result import TimerKey
from kcoord.runtime.waiting import _NEVER, MOST_SETTLED, ShardTimers, Timer, TimerQueue
from tests.unit.runtime.ledger import LedgerTimer

KEYS = [TimerKey(LedgerTimer.WORK, "g", f"m{i}") for i in range(40)]


class Walk:
    """The timers of a shard, and a model of them: deadlines by key."""

    def __init__(self) -> None:
        self.queue = TimerQueue()
        self.timers = ShardTimers(1, self.queue)
        self.deadlines: dict[TimerKey, int] = {}
        self.held: dict[TimerKey, Timer] = {}
        """The results of `schedule`, whether or not they are still armed."""
        self.now_ms = 1_000

    def schedule(self, key: TimerKey, deadline_ms: int) -> None:
        self.held[key] = self.timers.schedule(key, deadline_ms)
        self.deadlines[key] = deadline_ms

    def rearm(self, key: TimerKey, deadline_ms: int) -> None:
        if key not in self.held:
            return
        if self.held[key].rearm(deadline_ms):
            assert key in self.deadlines
            self.deadlines[key] = deadline_ms
        else:
            assert key not in self.deadlines or deadline_ms < self.deadlines[key], "rearm accepts every later deadline"

    def cancel(self, key: TimerKey) -> None:
        self.timers.cancel(key)
        self.deadlines.pop(key, None)

    def clear(self) -> None:
        self.timers.clear()
        self.deadlines.clear()

    def pass_time(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        due = sorted(deadline for deadline in self.deadlines.values() if deadline <= self.now_ms)
        assert self.queue.count_due(self.now_ms) == len(due)
        assert self.queue.first_ms <= self.now_ms or not due
        fired = []
        while (timer := self.queue.pop_due(self.now_ms)) is not None:
            assert self.deadlines.pop(timer.key) == timer.deadline_ms
            fired.append(timer.deadline_ms)
            self.timers.fired(timer.key)
        assert fired == due
        assert self.queue.count_due(self.now_ms) == 0

    def check(self) -> None:
        assert self.timers.deadlines() == self.deadlines
        assert len(self.timers) == len(self.queue) == len(self.deadlines)
        next_ms = min(self.deadlines.values(), default=None)
        assert self.queue.next_deadline_ms() == next_ms
        assert self.queue.first_ms == (next_ms or _NEVER), "the first heap entry is valid after next_deadline_ms"


@pytest.mark.parametrize("seed", range(20))
def test_timers_behave_like_a_dictionary_of_deadlines(seed: int) -> None:
    random = Random(seed)
    walk = Walk()
    keys = KEYS[: random.choice((2, 8, 40))]
    looks_often = random.random() < 0.5
    for _ in range(400):
        key, deadline_ms = random.choice(keys), walk.now_ms + random.randrange(50)
        match random.choices(("schedule", "rearm", "cancel", "time", "clear"), (30, 40, 15, 15, 1))[0]:
            case "schedule":
                walk.schedule(key, deadline_ms)
            case "rearm":
                walk.rearm(key, deadline_ms)
            case "cancel":
                walk.cancel(key)
            case "clear":
                walk.clear()
            case _:
                walk.pass_time(random.randrange(8))
        if looks_often:
            walk.check()
    walk.check()
    walk.pass_time(100)


def test_equal_deadlines_fire_in_the_order_of_arming() -> None:
    queue = TimerQueue()
    shards = [ShardTimers(number, queue) for number in range(3)]
    for shard in (2, 0, 1):
        shards[shard].schedule(KEYS[0], 10)
    fired = [queue.pop_due(10) for _ in range(3)]
    assert [timer.shard_id for timer in fired if timer is not None] == [2, 0, 1]


def test_moving_a_deadline_back_and_forth_leaves_no_garbage() -> None:
    queue = TimerQueue()
    timers = ShardTimers(1, queue)
    for i in range(10_000):
        timers.schedule(KEYS[0], 1_000_000 + i)
        timers.schedule(KEYS[0], 1_000_000)
    assert len(queue._heap) == 1
    most_void = 0
    for i in range(1_000):
        timers.schedule(KEYS[1 + i % 30], 1_000_000 - i * 7919 % 1_000)
        timers.cancel(KEYS[1 + (i - 10) % 30])
        most_void = max(most_void, len(queue._heap) - 2 * len(queue))
    assert most_void == 64, "void entries are removed when they outnumber the valid ones"
    left = sorted(timers.deadlines().values())
    fired = [queue.pop_due(2_000_000) for _ in left]
    assert [timer.deadline_ms for timer in fired if timer is not None] == left


@pytest.mark.parametrize("seed", range(5))
def test_timers_fire_in_order_after_most_others_were_cancelled(seed: int) -> None:
    random, queue = Random(seed), TimerQueue()
    timers = ShardTimers(1, queue)
    keys = [TimerKey(LedgerTimer.WORK, "g", f"m{number}") for number in range(300)]
    for key in keys:
        timers.schedule(key, random.randrange(1_000))
    for key in random.sample(keys, 250):
        timers.cancel(key)
    assert len(queue._heap) < len(keys), "void entries were removed"
    left = sorted(timers.deadlines().values())
    assert queue.next_deadline_ms() == left[0]
    fired = [queue.pop_due(1_000) for _ in left]
    assert [timer.deadline_ms for timer in fired if timer is not None] == left


def test_a_look_at_the_queue_moves_a_limited_number_of_rearmed_timers() -> None:
    """Members that joined in one second have sent heartbeats since. 100,000 of them would be a pause of 100 ms."""
    queue = TimerQueue()
    timers = ShardTimers(1, queue)
    keys = [TimerKey(LedgerTimer.WORK, "g", f"m{number}") for number in range(2 * MOST_SETTLED + 10)]
    for key in keys:
        timers.schedule(key, 10)
    for key in keys[1:]:
        timers.schedule(key, 90)
    timers.cancel(keys[0])
    timers.schedule(keys[0], 50)

    def moved() -> int:
        return sum(queued_ms == 90 for queued_ms, _, _ in queue._heap)

    looks: list[tuple[object, int]] = [(queue.next_deadline_ms(), moved())]
    looks += [(queue.pop_due(40), moved()), (queue.next_deadline_ms(), moved())]
    # The void entry of the cancelled timer is the first that is moved.
    assert looks == [(10, MOST_SETTLED - 1), (None, 2 * MOST_SETTLED - 1), (50, len(keys) - 1)]
    fired = [queue.pop_due(now_ms) for now_ms in (49, 50, 89)]
    assert [timer and timer.key for timer in fired] == [None, keys[0], None]
    assert {queue.pop_due(90) for _ in keys[1:]} == {timers._timers[key] for key in keys[1:]}


def test_a_timer_is_rearmed_in_place_until_it_is_cancelled() -> None:
    timers = ShardTimers(1, TimerQueue())
    timer = timers.schedule(KEYS[0], 0)
    assert timer.rearm(0)
    assert timer.rearm(7)
    assert timer.rearm(3), "the heap entry still has the first deadline"
    timers.cancel(KEYS[0])
    assert not timer.rearm(9)
