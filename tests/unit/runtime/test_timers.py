# SPDX-License-Identifier: Apache-2.0
"""Timers against a plain model, and the promises about their cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcoord.runtime.result import TimerKey
from kcoord.runtime.waiting import ShardTimers, Timer, TimerQueue
from tests.unit.runtime.ledger import LedgerTimer

KEYS = [TimerKey(LedgerTimer.WORK, "g", f"m{i}") for i in range(4)]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.sampled_from(KEYS), st.integers(0, 50)),
        st.tuples(st.just("rearm"), st.sampled_from(KEYS), st.integers(0, 50)),
        st.tuples(st.just("cancel"), st.sampled_from(KEYS), st.just(0)),
        st.tuples(st.just("advance"), st.just(KEYS[0]), st.integers(0, 20)),
        st.tuples(st.just("clear"), st.just(KEYS[0]), st.just(0)),
    ),
    max_size=60,
)


@given(STEPS)
def test_timers_behave_like_a_dictionary_of_deadlines(steps: list[tuple[str, TimerKey, int]]) -> None:
    queue = TimerQueue()
    timers = ShardTimers(1, queue)
    model: dict[TimerKey, int] = {}
    held: dict[TimerKey, Timer] = {}
    now_ms = 0
    for step, key, number in steps:
        match step:
            case "schedule":
                held[key] = timers.schedule(key, now_ms + number)
                model[key] = now_ms + number
            case "rearm":
                # Of what somebody still holds, whatever has become of it.
                if key in held and held[key].rearm(now_ms + number):
                    assert key in model
                    model[key] = now_ms + number
            case "cancel":
                timers.cancel(key)
                model.pop(key, None)
            case "clear":
                timers.clear()
                model.clear()
            case _:
                now_ms += number
                fired = []
                while (timer := queue.pop_due(now_ms)) is not None:
                    fired.append((timer.deadline_ms, timer.key))
                    timers.fired(timer.key)
                assert [deadline for deadline, _ in fired] == sorted(deadline for deadline, _ in fired)
                assert {key for _, key in fired} == {key for key, deadline in model.items() if deadline <= now_ms}
                for _, due in fired:
                    del model[due]
        assert timers.deadlines() == model
        assert len(queue) == len(model)
        assert queue.next_deadline_ms() == min(model.values(), default=None)


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
    for i in range(10_000):
        timers.schedule(KEYS[1], 1_000_000 + i)
        timers.cancel(KEYS[1])
    assert len(queue._heap) < 200
