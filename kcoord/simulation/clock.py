# SPDX-License-Identifier: Apache-2.0
"""Virtual time: it stands still while an event runs, and then jumps to the next event."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Final

START_MS: Final = 1_000_000


class VirtualClock:
    """A queue of events, ordered by time. Events of the same time run in the order in which they were added."""

    __slots__ = ("_events", "_sequence", "now_ms")

    def __init__(self) -> None:
        self.now_ms = START_MS
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, delay_ms: int, action: Callable[[], None]) -> None:
        self.at(self.now_ms + delay_ms, action)

    def at(self, at_ms: int, action: Callable[[], None]) -> None:
        """Runs `action` at that time. Events cannot be cancelled; an action that is out of date has to do nothing."""
        self._sequence += 1
        heappush(self._events, (max(at_ms, self.now_ms), self._sequence, action))

    def step(self) -> bool:
        """Runs the next event. Returns False if there is none."""
        if not self._events:
            return False
        self.now_ms, _, action = heappop(self._events)
        action()
        return True
