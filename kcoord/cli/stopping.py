# SPDX-License-Identifier: Apache-2.0
"""Stops endless commands cleanly on SIGINT (Ctrl-C) and SIGTERM.

The handlers only set a flag. An exception in the middle of a call to the JVM would leave a response in its connection,
which the next call would read as its own.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, TypeAlias

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
