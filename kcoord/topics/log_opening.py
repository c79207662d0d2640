# SPDX-License-Identifier: Apache-2.0
"""The opening of a log, in the event loop or in another thread.

Theory of operation
-------------------
After an orderly stop, an opening reads little, but a request may need thousands of logs. After a crash, and if small
files of a partition are missing or damaged, it checks the end of the log and replays all batches after the newest
producer snapshot: about 2 s for 1,000,000 batches. The readers of a coordinator's log replay it in the same way
(`internal_partition`).

How much there is to read shows only while it is read. So `Openings.begin` reads in the event loop first, and counts.
All openings that begin in one millisecond, such as those of one request, share AT_ONCE_US. An opening that needs more
ends, and another thread does it from the beginning. After OPENED_AT_ONCE openings, another thread does the others.

The thread owns what it reads until `run` returns: the folder of the partition, or the producer state of a coordinator's
log. The event loop reads only `has_ended` meanwhile. `cancel` waits for the thread, which notices the cancellation
between two batches. So nothing touches the folder after `cancel`, and the owner may rename it. A canceled opening
leaves a folder that the next opening recovers again.

A producer snapshot that has to wait for the disk is stored in the same way (`open_log.snapshot_at`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, Generic, TypeVar

from kcoord.storage.errors import OpeningCanceledError
from kcoord.storage.recovery import Check
from kcoord.storage.rolled import Background, NewLock
from kcoord_protocol.errors import Errors, KafkaError

AT_ONCE_US: Final = 10_000
"""How long the openings of one millisecond may read in the event loop."""
OPENED_AT_ONCE: Final = 60
"""How many openings of one millisecond may take place in the event loop. One that reads no batch takes 0.15 ms."""
BATCH_US: Final = 11
BYTES_PER_US: Final = 1_000

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class LogBeingOpenedError(KafkaError):
    """Another thread opens the log. Clients retry, as if a new leader of the partition was not ready yet."""

    def __init__(self, opening: Opening[object]) -> None:
        super().__init__(Errors.NOT_LEADER_OR_FOLLOWER, f"The log of {opening.name} is still being opened.")
        self.opening = opening


class Opening(Generic[T_co]):
    """One opening of a log. The module text describes the threads."""

    __slots__ = ("_error", "_is_canceled", "_left_us", "_lock", "_opened", "_read", "has_ended", "name", "observers")

    def __init__(self, name: str, read: Callable[[Check], T_co], lock: AbstractContextManager[object]) -> None:
        self.name = name
        self.has_ended = False
        self.observers: list[Callable[[], None]] = []
        """Called in the event loop after the end of an opening in another thread."""
        self._read = read
        self._lock = lock
        self._left_us = math.inf
        self._is_canceled = False
        self._opened: T_co | None = None
        self._error: Exception | None = None

    def run_at_once(self, limit_us: float) -> float:
        """Opens the log, unless reading it takes longer than `limit_us`. Returns how much of the time is left."""
        self._left_us = limit_us
        self.run()
        left_us, self._left_us = self._left_us, math.inf
        return left_us

    def run(self) -> None:
        """Opens the log, and keeps it or the error for `result`."""
        with self._lock:
            if self._is_canceled:
                return
            try:
                self._opened = self._read(self._check)
            except Exception as error:
                if self._left_us < 0:
                    return
                self._error = error
            self.has_ended = True

    def _check(self, size_bytes: int) -> None:
        self._left_us -= BATCH_US + size_bytes / BYTES_PER_US
        if self._is_canceled or self._left_us < 0:
            raise OpeningCanceledError(f"the opening of {self.name} has ended early")

    def on_end(self) -> None:
        """Calls the observers."""
        for observer in self.observers:
            observer()

    def cancel(self) -> T_co | None:
        """Ends the opening. Returns the log if it was opened before."""
        self._is_canceled = True
        with self._lock:
            return self._opened

    def result(self) -> T_co:
        """Returns the log of an opening that has ended. Raises its error."""
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened


class Openings:
    """Opens logs in the event loop if that is short, else by `in_background`. `on_end` gets the partition then."""

    __slots__ = ("_in_background", "_left", "_left_us", "_new_lock", "_now_ms", "_on_end", "with_transactions")

    def __init__(self, in_background: Background, new_lock: NewLock, on_end: Callable[[str, int], None]) -> None:
        self.with_transactions: dict[tuple[str, int], None] = {}
        """The partitions whose logs had open transactions when they were opened."""
        self._in_background = in_background
        self._new_lock = new_lock
        self._on_end = on_end
        self._now_ms = -1
        self._left_us: float = AT_ONCE_US
        self._left = OPENED_AT_ONCE

    def begin(self, topic: str, index: int, read: Callable[[Check], T], now_ms: int) -> Opening[T]:
        """Begins an opening. `read` calls its argument for each batch, and may be called a second time."""
        if now_ms != self._now_ms:
            self._now_ms, self._left_us, self._left = now_ms, AT_ONCE_US, OPENED_AT_ONCE
        opening = Opening(f"{topic}-{index}", read, self._new_lock())
        self._left -= 1
        if self._left >= 0:
            self._left_us = opening.run_at_once(self._left_us)
        if not opening.has_ended:
            opening.observers.append(partial(self._on_end, topic, index))
            self._in_background(opening.run, opening.on_end)
        return opening

    def run(self, name: str, work: Callable[[Check], T], *, in_background: bool) -> Opening[T]:
        """Does other work on the files of a partition: in the event loop, or all of it in another thread."""
        running = self.prepare(name, work)
        if in_background:
            self._in_background(running.run, running.on_end)
        else:
            running.run()
        return running

    def prepare(self, name: str, work: Callable[[Check], T]) -> Opening[T]:
        """Returns other work on the files of a partition that the caller runs, in any thread."""
        return Opening(name, work, self._new_lock())
