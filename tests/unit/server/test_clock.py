# SPDX-License-Identifier: Apache-2.0
"""The clock never goes back, never jumps, and finds the time of day again."""

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


def test_it_shows_the_wall_clock_while_both_agree() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.pass_seconds(2.5)
    assert clock.now_ms() == 1_002_500


def test_a_wall_clock_set_forward_does_not_jump_but_is_followed() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.wall += 3600 * SECOND_NS
    assert clock.now_ms() == 1_000_000
    sources.pass_seconds(8)
    assert clock.now_ms() == 1_009_000
    sources.pass_seconds(8 * 3600)
    assert clock.now_ms() == sources.wall // 1_000_000


def test_a_wall_clock_set_back_slows_it_without_going_back() -> None:
    sources = Sources()
    clock = sources.clock()
    sources.wall -= 3600 * SECOND_NS
    before = clock.now_ms()
    sources.pass_seconds(8)
    assert clock.now_ms() == before + 7_000


def test_the_gain_is_what_it_ran_too_fast() -> None:
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
    assert clock.gain_ms() == 0, "it only gave back what it had lost"


@given(st.lists(st.tuples(st.integers(-(10**6), 10**6), st.integers(0, 10**5)), max_size=30))
def test_between_two_moments_no_more_time_passes_than_the_gain_allows(steps: list[tuple[int, int]]) -> None:
    """Jumps of the wall clock and pauses, in seconds: whatever they are, now less the gain is never early."""
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
