# SPDX-License-Identifier: Apache-2.0
"""When periodic work is due."""

from __future__ import annotations


class Every:
    """An interval. `is_due` returns True once per interval; the first interval begins with the first call."""

    __slots__ = ("_next_ms", "interval_ms")

    def __init__(self, interval_ms: int) -> None:
        self.interval_ms = interval_ms
        self._next_ms: int | None = None

    def is_due(self, now_ms: int) -> bool:
        if self._next_ms is None:
            self._next_ms = now_ms + self.interval_ms
            return False
        # If the clock was set back, the work must not wait until the clock reaches the old time again.
        if now_ms < self._next_ms <= now_ms + self.interval_ms:
            return False
        self._next_ms = now_ms + self.interval_ms
        return True
