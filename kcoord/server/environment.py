# SPDX-License-Identifier: Apache-2.0
"""The environment of a broker: event loop, clock, random ids, threads and background tasks.

Handlers take the time and the random ids that an operation may need from here, and pass them as values. So the state
machines stay deterministic. The clock of a process is in `kcoord.server.shards.shard_service`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar, cast

from kcoord_protocol.errors import KafkaError

if TYPE_CHECKING:
    # Most brokers have no work for a pool of threads, so their start does not import this.
    from concurrent.futures import Executor

_logger = logging.getLogger(__name__)

T = TypeVar("T")

NewPool: TypeAlias = "Callable[[int, str], Executor]"
"""Makes a pool of threads for background work: the largest number of threads, and their name."""

SWITCH_SECONDS: Final = 0.001
"""The longest time that the event loop waits for the GIL while another thread computes. Python's default is 5 ms."""

_UUID_BYTES: Final = 16
_DASH: Final = 62
"""The six bits that base64 writes as '-'."""
_POOL_BYTES: Final = 256 * _UUID_BYTES


class RandomUuids:
    """The random ids that a broker assigns: member ids, topic ids, incarnation ids, ids of fetch sessions.

    They come from a pool of random bytes, since a system call per id is too expensive. `read` fills the pool.

    After a fork, parent and child would take the same ids from one pool. So each process makes its own object.
    """

    __slots__ = ("_pool", "_position", "_read")

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read
        self._pool = b""
        self._position = 0

    def take(self) -> bytes:
        """Returns 16 random bytes with the version and variant bits of a random UUID."""
        if self._position == len(self._pool):
            self._pool = self._read(_POOL_BYTES)
            self._position = 0
        start = self._position
        self._position = start + _UUID_BYTES
        value = bytearray(self._pool[start : self._position])
        value[6] = value[6] & 0x0F | 0x40
        value[8] = value[8] & 0x3F | 0x80
        return bytes(value)

    def _take_for_text(self) -> bytes:
        """Returns a UUID whose text never starts with '-', which command lines take for an option."""
        while (value := self.take())[0] >> 2 == _DASH:
            pass
        return value

    def take_text(self) -> str:
        """Returns a UUID in Kafka's text form."""
        return urlsafe_b64encode(self._take_for_text())[:22].decode("ascii")

    def take_topic_ids(self, count: int) -> list[bytes]:
        """Returns ids for new topics."""
        return [self._take_for_text() for _ in range(count)]

    def take_session_id(self) -> int:
        """Returns a positive 31-bit id for a fetch session."""
        return int.from_bytes(self.take()[:4], "big") % (2**31 - 1) + 1


def no_gain() -> int:
    """Returns the gain of a clock that never runs too fast."""
    return 0


class Environment:
    """The dependencies of a broker on the system. Its services use the system only through this object.

    So a process, a test and the simulation compose the same broker with different environments.

    `now_ms` and `clock_gain_ms` are methods of a `Clock`, or of a clock that a test or the simulation moves.
    `cpu_ns` returns the CPU time of the calling thread.
    `owns_heap` is False if the process also runs other code. Then the broker does not tune the garbage collector.
    """

    __slots__ = ("_tasks", "clock_gain_ms", "cpu_ns", "loop", "new_pool", "now_ms", "owns_heap", "uuids")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ms: Callable[[], int],
        *,
        clock_gain_ms: Callable[[], int] = no_gain,
        cpu_ns: Callable[[], int] = time.thread_time_ns,
        uuids: RandomUuids | None = None,
        new_pool: NewPool | None = None,
        owns_heap: bool = False,
    ) -> None:
        self.loop = loop
        self.now_ms = now_ms
        self.clock_gain_ms = clock_gain_ms
        self.cpu_ns = cpu_ns
        self.uuids = uuids if uuids is not None else RandomUuids()
        self.new_pool = new_pool if new_pool is not None else thread_pool
        self.owns_heap = owns_heap
        self._tasks: dict[asyncio.Task[object], None] = {}
        """The running tasks, as an ordered set: `cancel_tasks` cancels them in the same order in every run."""

    def spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Starts a task, keeps a reference to it until it ends, and logs its error unless that is a KafkaError."""
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
        """Cancels the tasks that still run, at shutdown."""
        for task in list(self._tasks):
            task.cancel()


def thread_pool(size: int, name: str) -> Executor:
    """Returns a pool of real threads, which start when they are first needed."""
    from concurrent.futures import ThreadPoolExecutor

    share_with_loop()
    return ThreadPoolExecutor(size, thread_name_prefix=name)


def share_with_loop() -> None:
    """Shortens the time after which a computing thread gives the GIL to the event loop.

    Called before a thread starts. The setting holds for the whole process.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
