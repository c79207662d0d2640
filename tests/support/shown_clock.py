# SPDX-License-Identifier: Apache-2.0
"""A clock that shows what a test says."""

from __future__ import annotations

from collections.abc import Callable

from kcoord.server.clock import Clock


class ShownClock(Clock):
    """`show` returns the time of now, in milliseconds."""

    __slots__ = ("now_ms",)

    def __init__(self, show: Callable[[], int]) -> None:
        super().__init__()
        self.now_ms = show  # type: ignore[method-assign]
