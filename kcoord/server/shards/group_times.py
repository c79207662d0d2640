# SPDX-License-Identifier: Apache-2.0
"""What the controller has to know of the creation times of this process's groups (`kcoord.metadata.creation_order`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kcoord.coordinator.group.creation_limits import CreationLimits

_LOAD_CHECK_SECONDS: Final = 0.01


class GroupTimes:
    """`newest_ms` is the latest creation time that a group of this process has, or could get now; it counts only while
    `is_loading` is false.
    """

    def __init__(self, newest_ms: Callable[[], int], is_loading: Callable[[], bool]) -> None:
        self.newest_ms = newest_ms
        self.limits = CreationLimits()
        self._is_loading = is_loading

    async def loaded(self) -> None:
        """Waits until all groups of this process are known."""
        while self._is_loading():
            await asyncio.sleep(_LOAD_CHECK_SECONDS)
