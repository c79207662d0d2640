# SPDX-License-Identifier: Apache-2.0
"""The clock of the process: milliseconds since 1970 that never go back and never jump.

It runs with the monotonic clock and leans towards the wall clock by an eighth of the elapsed time at most. So a wall
clock that is set, or a machine that was suspended, neither ends sessions nor expires offsets early, and the time of day
is right again after a while. What is late by days (the expiration of offsets) takes `gain_ms` off, and is not early
by that eighth either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeAlias

_NS_PER_MS = 1_000_000
_LARGEST_LEAN = 8

_Source: TypeAlias = Callable[[], int]


class Clock:
    """See the module's text; the two sources can be replaced for tests."""

    __slots__ = ("_last_monotonic_ns", "_lead_ns", "_least_lead_ns", "_monotonic_ns", "_now_ns", "_wall_ns")

    def __init__(self, *, wall_ns: _Source = time.time_ns, monotonic_ns: _Source = time.monotonic_ns) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._now_ns = wall_ns()
        self._last_monotonic_ns = monotonic_ns()
        self._lead_ns = self._least_lead_ns = 0

    def now_ms(self) -> int:
        monotonic_ns = self._monotonic_ns()
        elapsed_ns = monotonic_ns - self._last_monotonic_ns
        if elapsed_ns > 0:
            self._last_monotonic_ns = monotonic_ns
            lean_ns = self._wall_ns() - self._now_ns - elapsed_ns
            most_ns = elapsed_ns // _LARGEST_LEAN
            # Compared, because calls of min and max would be most of what a reading costs.
            if lean_ns > most_ns:
                lean_ns = most_ns
            elif lean_ns < -most_ns:
                lean_ns = -most_ns
            self._now_ns += elapsed_ns + lean_ns
            self._lead_ns += lean_ns
            if self._lead_ns < self._least_lead_ns:
                self._least_lead_ns = self._lead_ns
        return self._now_ns // _NS_PER_MS

    @property
    def gain_ms(self) -> int:
        """By how much this clock ran too fast, at most, from any moment of the process until now."""
        return (self._lead_ns - self._least_lead_ns) // _NS_PER_MS
