# SPDX-License-Identifier: Apache-2.0
"""A thread of a soak test that keeps its failure."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class Worker(ABC):
    """A thread that runs until `end` or `finish`. `finish` raises its failure."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Asks the thread to end, without waiting."""
        self._ending.set()

    def join(self, seconds: float) -> bool:
        """Waits for the thread. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def finish(self, seconds: float) -> None:
        self._ending.set()
        assert self.join(seconds), f"{type(self).__name__} did not end"
        if self.failure is not None:
            raise self.failure

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self.failure = error

    @abstractmethod
    def _run(self) -> None:
        """Works until `_ending` is set."""
