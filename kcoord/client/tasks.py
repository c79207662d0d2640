# SPDX-License-Identifier: Apache-2.0
"""Background tasks. `spawn` starts them all, and logs failures that would otherwise be lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable

_log = logging.getLogger(__name__)


def spawn(work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
    """Starts a task and logs its failure. The caller must keep the reference, since asyncio does not."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("the task %s failed", task.get_name(), exc_info=task.exception())


class Tasks:
    """The running tasks of one owner."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, task: asyncio.Task[None]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def wait(self, seconds: float) -> None:
        """Waits until the tasks have ended or the time has passed."""
        if self._running:
            await asyncio.wait(self._running, timeout=max(seconds, 0))

    async def stop(self) -> None:
        await stop(self._running)


async def stop(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancels tasks and waits until they have ended. None entries are skipped."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def to_the_end(work: Coroutine[object, object, None]) -> None:
    """Runs `work` to its end even if the caller is cancelled meanwhile. The cancellation is raised after it.

    It is for short work: half of it would leave tasks and connections that nobody ends.
    """
    task = asyncio.create_task(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancellation = error
    if cancellation is not None:
        raise cancellation
    task.result()
