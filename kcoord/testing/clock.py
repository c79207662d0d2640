# SPDX-License-Identifier: Apache-2.0
"""A clock that tests can advance. It never goes back."""

from __future__ import annotations

from kcoord.server.shards.shard_service import Clock


class MovableClock(Clock):
    """The clock of a test broker."""

    __slots__ = ("_ahead_ms",)

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = 0

    @property
    def ahead_ms(self) -> int:
        """How far the clock is ahead of the time of day."""
        return self._ahead_ms

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms

    def advance(self, milliseconds: int) -> None:
        assert milliseconds >= 0
        self._ahead_ms += milliseconds
