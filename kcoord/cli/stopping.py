# SPDX-License-Identifier: Apache-2.0
"""Stops endless commands cleanly on SIGINT (Ctrl-C) and SIGTERM, and ends others at once.

The handlers of `stop_on_signals` only set a flag. An exception in the middle of a call to the JVM would leave a
response in its connection, which the next call would read as its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final, TypeAlias

from kcoord.cli import EXIT_INTERRUPTED

_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """Yields an event that the first signal sets. That signal also restores the previous handlers, for the next one."""
    stop = threading.Event()
    before: dict[signal.Signals, _Handler] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in _SIGNALS:
        before[number] = signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()


@contextmanager
def end_at_once_on_interrupt() -> Iterator[None]:
    """Ends the process with exit code 130 on SIGINT, as if it were killed. Its threads are not waited for.

    A KeyboardInterrupt would wait for the threads that start Spark and make tables. They take seconds, with large
    tables minutes, and nothing interrupts a call to the JVM. The JVM ends by itself when its standard input does.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield  # SIGINT is ignored, the caller has its own handler, or the signals are not those of this thread
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):  # The signal may have interrupted a write to the same stream.
        sys.stdout.flush()
    os._exit(EXIT_INTERRUPTED)
