# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.watched FILE COMMAND ...`: runs kcoord, and writes its longest pauses to FILE on SIGUSR1.

Each report has the pauses since the report before. The pauses are those of `kcoord_event_loop_lag_ms` and
`kcoord_event_loop_own_lag_ms`, checked ten times as often, so that a pause is measured too short by 1 ms at most.
Collections of the garbage collector are timed by the CPU time of their thread, by generation.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

from kcoord.metrics import measures

CHECK_SECONDS: Final = 0.001


class WatchedLag(measures.LoopLag):
    """The pauses of the event loop, which a signal reports and forgets."""

    path = Path(os.devnull)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._collections = [0.0, 0.0, 0.0]
        self._collection_began = 0.0
        gc.callbacks.append(self._on_collection)
        loop.add_signal_handler(signal.SIGUSR1, self._report)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collection_began = now
        else:
            generation = info["generation"]
            took_ms = (now - self._collection_began) * 1000
            self._collections[generation] = max(self._collections[generation], took_ms)

    def _report(self) -> None:
        pauses = {"any": self.histogram.largest_ms, "own": self.own.largest_ms, "collections": self._collections}
        self.histogram.largest_ms = self.own.largest_ms = 0.0
        self._collections = [0.0, 0.0, 0.0]
        complete = self.path.with_suffix(".new")
        complete.write_text(json.dumps(pauses))
        complete.rename(self.path)


if __name__ == "__main__":
    from kcoord.cli import main

    WatchedLag.path = Path(sys.argv.pop(1))
    measures.LAG_CHECK_SECONDS = CHECK_SECONDS  # type: ignore[misc]
    measures.LoopLag = WatchedLag  # type: ignore[misc]
    sys.exit(main())
