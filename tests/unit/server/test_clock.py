# SPDX-License-Identifier: Apache-2.0
"""The clock never goes back, never jumps, and approaches the wall clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcoord.server.shards.shard_service import Clock

SECOND_NS = 1_000_000_000


class Sources:
    def __init__(self) -> None:
        self.wall = 1_000 * SECOND_NS
        self.monotonic = 5 * SECOND_NS

    def clock(self) -> Clock:
        return Clock(wall_ns=lambda: self.wall, monotonic_ns=lambda: self.monotonic)

    def pass_seconds(self, seconds: float) -> None:
        self.wall += int(seconds * SECOND_NS)
        self.monotonic += int(seconds * SECOND_NS)


def test_the_clock_equals_the_wall_clock_while_both_sources_agree() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.pass_seconds(2.5)
    assert clock.now_ms() == 1_002_500


@given(st.lists(st.integers(0, 3_000_000), max_size=40))
def test_the_clock_shows_each_millisecond_on_time(steps_ns: list[int]) -> None:
    sources = Sources()
    clock = sources.clock()
    for step_ns in steps_ns:
        sources.wall += step_ns
        sources.monotonic += step_ns
        assert clock.now_ms() == sources.wall // 1_000_000


def test_the_clock_approaches_a_wall_clock_that_was_set_forward_without_a_jump() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.wall += 3600 * SECOND_NS
    assert clock.now_ms() == 1_000_000
    sources.pass_seconds(8)
    assert clock.now_ms() == 1_009_000
    sources.pass_seconds(8 * 3600)
    assert clock.now_ms() == sources.wall // 1_000_000


def test_the_clock_runs_slower_after_the_wall_clock_was_set_back() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.wall -= 3600 * SECOND_NS
    before = clock.now_ms()
    sources.pass_seconds(8)
    assert clock.now_ms() == before + 7_000


def test_the_gain_is_the_time_by_which_the_clock_ran_too_fast() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.pass_seconds(100)
    assert (clock.now_ms(), clock.gain_ms()) == (1_100_000, 0)
    sources.wall += 3600 * SECOND_NS
    sources.pass_seconds(80)
    assert (clock.now_ms(), clock.gain_ms()) == (1_190_000, 10_000)
    sources.wall -= 7200 * SECOND_NS
    sources.pass_seconds(80)
    assert (clock.now_ms(), clock.gain_ms()) == (1_260_000, 0)
    sources.wall += 3600 * SECOND_NS
    sources.pass_seconds(8000)
    assert clock.now_ms() == sources.wall // 1_000_000
    assert clock.gain_ms() == 0, "the clock only made up for the time that it had lost"


@given(st.lists(st.tuples(st.integers(-(10**6), 10**6), st.integers(0, 10**5)), max_size=30))
def test_now_less_the_gain_never_runs_ahead_of_the_monotonic_clock(steps: list[tuple[int, int]]) -> None:
    """The steps are jumps of the wall clock and pauses, in seconds."""
    sources = Sources()
    clock = sources.clock()
    moments: list[tuple[int, int]] = []
    for jump, seconds in steps:
        sources.wall += jump * SECOND_NS
        sources.pass_seconds(seconds)
        now_ms = clock.now_ms()
        for then_ms, elapsed_from in moments:
            elapsed_ms = (sources.monotonic - elapsed_from) // 1_000_000
            assert now_ms - clock.gain_ms() - then_ms <= elapsed_ms + 1
        moments.append((now_ms, sources.monotonic))
