# SPDX-License-Identifier: Apache-2.0
"""The clock never goes back, never jumps, and finds the time of day again."""

from __future__ import annotations

from kcoord.server.clock import Clock

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
