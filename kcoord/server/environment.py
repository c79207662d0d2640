# SPDX-License-Identifier: Apache-2.0
"""What a broker gets from outside: the event loop, the clock, random numbers, threads. It keeps the tasks that run.

The services of a broker ask the system for nothing of this themselves. So a process, a test and the simulation compose
the same broker, and differ in what they hand in here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

from kcoord.server.random_uuids import RandomUuids
from kcoord_protocol.errors import KafkaError

if TYPE_CHECKING:
    # Most brokers compute nothing beside the event loop, so they do not load this at their start.
    from concurrent.futures import Executor

_logger = logging.getLogger(__name__)

T = TypeVar("T")

NewPool: TypeAlias = "Callable[[int, str], Executor]"
"""Makes threads for background work: at most this many, with this name."""

SWITCH_SECONDS: Final = 0.001
"""How long the event loop may have to wait while another thread computes; Python's own choice is five times that."""


def no_gain() -> int:
    """The gain of a clock that never runs too fast."""
    return 0


class Environment:
    """See the module's text. `now_ms` and `clock_gain_ms` are those of a `Clock`, or of a clock that others move.
    `owns_heap` is False if other programs live in the process too: then its garbage collector
    is not the broker's to tune.
    """

    __slots__ = ("_tasks", "clock_gain_ms", "loop", "new_pool", "now_ms", "owns_heap", "uuids")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ms: Callable[[], int],
        *,
        clock_gain_ms: Callable[[], int] = no_gain,
        uuids: RandomUuids | None = None,
        new_pool: NewPool | None = None,
        owns_heap: bool = False,
    ) -> None:
        self.loop = loop
        self.now_ms = now_ms
        self.clock_gain_ms = clock_gain_ms
        self.uuids = uuids if uuids is not None else RandomUuids()
        self.new_pool = new_pool if new_pool is not None else thread_pool
        self.owns_heap = owns_heap
        self._tasks: dict[asyncio.Task[object], None] = {}
        """A set that keeps their order: cancelling them is the same in every run."""

    def spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Starts a task that is neither lost to the garbage collector nor able to fail unseen."""
        task = self.loop.create_task(coroutine)
        self._tasks[cast("asyncio.Task[object]", task)] = None
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.pop(cast("asyncio.Task[object]", task), None)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, KafkaError):
            _logger.error("A background task failed", exc_info=error)

    def cancel_tasks(self) -> None:
        """Ends the tasks that still run at shutdown."""
        for task in list(self._tasks):
            task.cancel()


def thread_pool(size: int, name: str) -> Executor:
    """Returns a pool of real threads, which start when they are first needed."""
    from concurrent.futures import ThreadPoolExecutor

    share_with_loop()
    return ThreadPoolExecutor(size, thread_name_prefix=name)


def share_with_loop() -> None:
    """Lets the event loop in soon while a thread computes. To be called before the thread starts; holds for the whole
    process.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
