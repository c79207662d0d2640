# SPDX-License-Identifier: Apache-2.0
"""Records which member owns each partition, as the members report it: conflicts, and gaps without an owner."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

Partition = tuple[str, int]


class Ownership:
    """Members report from their rebalance callbacks: partitions after the assignment, and before the revocation."""

    def __init__(self) -> None:
        self.conflicts: list[str] = []
        self.longest_gap_seconds = 0.0
        self._owners: dict[Partition, object] = {}
        self._free_since: dict[Partition, float] = {}
        self._lock = threading.Lock()

    def took(self, member: object, partitions: Iterable[Partition]) -> None:
        now = time.monotonic()
        with self._lock:
            for partition in partitions:
                owner = self._owners.get(partition)
                if owner is not None and owner is not member:
                    self.conflicts.append(f"{partition} of {owner} went to {member}")
                elif partition in self._free_since:
                    gap = now - self._free_since.pop(partition)
                    self.longest_gap_seconds = max(self.longest_gap_seconds, gap)
                self._owners[partition] = member

    def gave(self, member: object, partitions: Iterable[Partition]) -> None:
        now = time.monotonic()
        with self._lock:
            for partition in partitions:
                if self._owners.get(partition) is member:
                    del self._owners[partition]
                    self._free_since[partition] = now
