# SPDX-License-Identifier: Apache-2.0
"""The trace of a run: a hash over all events, the text of the latest ones, and the error that ends a run."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import Final

from kcoord.simulation.clock import VirtualClock

_KEPT_EVENTS: Final = 60


class ViolationError(Exception):
    """Raised if an invariant does not hold. `invariant` is its name, such as "I-1 one owner"."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Trace:
    """Counts, hashes and keeps events. Every event of a run goes through `add`, so equal hashes mean equal runs."""

    def __init__(self, clock: VirtualClock) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._digest = hashlib.sha256()
        self._latest: deque[str] = deque(maxlen=_KEPT_EVENTS)

    def add(self, kind: str, text: str = "") -> None:
        line = f"{self._clock.now_ms} {kind} {text}"
        self.counts[kind] += 1
        self._digest.update(line.encode())
        self._digest.update(b"\n")
        self._latest.append(line)

    def hash(self) -> str:
        return self._digest.hexdigest()

    def latest(self) -> list[str]:
        return list(self._latest)
