# SPDX-License-Identifier: Apache-2.0
"""Commands that go on until they are stopped: SIGINT (Ctrl-C) and SIGTERM ask for it, and both end well.

The handlers only set a flag: an exception in the middle of a conversation with the JVM would leave an answer there that
the next question takes for its own.
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
    """The event is set by the first signal; a second one does what it did before, and so does any after this."""
    stop = threading.Event()
    before: dict[signal.Signals, _Handler] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for each, handler in before.items():
            signal.signal(each, handler)

    for each in _SIGNALS:
        before[each] = signal.signal(each, handle)
    try:
        yield stop
    finally:
        restore()
