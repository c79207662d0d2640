# SPDX-License-Identifier: Apache-2.0
"""The creation times of this process's groups, for the controller (`kcoord.metadata.creation_order`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kcoord.coordinator.group.creation_limits import CreationLimits

_LOAD_CHECK_SECONDS: Final = 0.01


class GroupTimes:
    """Gives the controller the latest creation time of this process's groups, and limits the times of new groups.

    `newest_ms` returns the latest creation time that a group of this process has, or could get now. It is meaningful
    only while `is_loading` returns False. `limits` bounds the creation times of groups while partitions are created.
    """

    def __init__(self, newest_ms: Callable[[], int], is_loading: Callable[[], bool]) -> None:
        self.newest_ms = newest_ms
        self.limits = CreationLimits()
        self._is_loading = is_loading

    async def loaded(self) -> None:
        """Waits until all groups of this process are loaded."""
        while self._is_loading():
            await asyncio.sleep(_LOAD_CHECK_SECONDS)
