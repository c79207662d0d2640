# SPDX-License-Identifier: Apache-2.0
"""When the periodic work of the data plane is due: each kind has its own interval, counted from the first look at
the clock.
"""

from __future__ import annotations


class Every:
    """True once per interval."""

    __slots__ = ("_next_ms", "interval_ms")

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._next_ms: int | None = None

    def is_due(self, now_ms: int) -> bool:
        if self._next_ms is None:
            self._next_ms = now_ms + self.interval_ms
            return False
        # A clock that was set back must not stop the work for as long as it went back.
        if now_ms < self._next_ms <= now_ms + self.interval_ms:
            return False
        self._next_ms = now_ms + self.interval_ms
        return True
