# SPDX-License-Identifier: Apache-2.0
"""A thread of a soak test: told to end from outside, and its failure is not lost."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Worker(ABC):
    """A thread whose failure is told by `finish`."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Asks it to end, and waits for nothing."""
        self._ending.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def finish(self, seconds: float) -> None:
        self._ending.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"{type(self).__name__} did not end"
        if self.failure is not None:
            raise self.failure

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    @abstractmethod
    def _run(self) -> None:
        """The work, until `_ending` is set."""
