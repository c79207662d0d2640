# SPDX-License-Identifier: Apache-2.0
"""The order of creation times between groups and partitions, where several processes give them (KIP-1327). Pure.

A partition is new to a group if its creation time is after the group's. The controller stamps partitions, the worker of
a group's coordinator stamps the group, and their clocks differ. What has to hold is:

* a partition that a coordinator does not know when it creates a group is newer than that group;
* a partition that it knows is not newer.

The second rule is simple: a group is never older than the newest partition in the coordinator's image. For the first
rule every operation that makes partitions takes these steps:

1. The controller asks all workers. A worker answers with the latest creation time that it has given or could give now,
   and gives no later time until the operation is over (`CreationLimits`), except the time of a newer partition that it
   gets to know.
2. The controller stamps the new partitions later than all answers, and later than all partitions before.
3. The workers get the partitions, in the order of the metadata log, and then the word that the operation is over.

A worker that joins in between gets the limit with what it joins with. Of a worker that has ended, or does not answer in
time, the controller knows how late it can have been: its last word, and the time since by the controller's clock. The
clock of a process leans towards the wall clock by an eighth of that time at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

W = TypeVar("W", bound=Hashable)

_LEAN: Final = 8
UNKNOWN_TIME_MS: Final = -1


@dataclass(slots=True)
class _LastWord:
    newest_ms: int
    heard_ms: int


@dataclass(slots=True)
class _Operation(Generic[W]):
    waiting: set[W]
    newest_ms: int = UNKNOWN_TIME_MS
    limit_ms: int | None = None
    """What groups may claim at most; None until the partitions are stamped."""


class CreationOrder(Generic[W]):
    """The controller's side. Times with `heard` are of any clock that never stops; all others are creation times."""

    def __init__(self) -> None:
        self._workers: dict[W, _LastWord] = {}
        self._operations: dict[int, _Operation[W]] = {}
        self._tickets = itertools.count(1)
        self._lost_ms = UNKNOWN_TIME_MS
        """The latest creation time that a worker which has ended can have given."""

    def join(self, worker: W, newest_ms: int, heard_ms: int) -> dict[int, int | None]:
        """The limits of the operations under way, by their tickets; None where the worker is asked."""
        self._workers[worker] = _LastWord(newest_ms, heard_ms)
        for operation in self._operations.values():
            if operation.limit_ms is None:
                operation.waiting.add(worker)
        return {ticket: operation.limit_ms for ticket, operation in self._operations.items()}

    def lose(self, worker: W, heard_ms: int) -> None:
        """The worker has ended."""
        if worker in self._workers:
            self._lost_ms = max(self._lost_ms, self._latest_of(worker, heard_ms))
            del self._workers[worker]
        for operation in self._operations.values():
            operation.waiting.discard(worker)

    def begin(self) -> int:
        """A ticket for an operation; `waiting` are the workers to be asked."""
        ticket = next(self._tickets)
        self._operations[ticket] = _Operation(set(self._workers))
        return ticket

    def waiting(self, ticket: int) -> Collection[W]:
        return self._operations[ticket].waiting

    def answer(self, worker: W, ticket: int, newest_ms: int, heard_ms: int) -> None:
        """The worker gives no later creation time until the operation is over. The operation may be over already."""
        if worker in self._workers:
            self._workers[worker] = _LastWord(newest_ms, heard_ms)
        operation = self._operations.get(ticket)
        if operation is not None and worker in operation.waiting:
            operation.waiting.remove(worker)
            operation.newest_ms = max(operation.newest_ms, newest_ms)

    def stamp(self, ticket: int, now_ms: int, newest_partition_ms: int, heard_ms: int) -> int:
        """The creation time of the partitions; workers that have not answered are not waited for any longer."""
        operation = self._operations[ticket]
        newest_ms = max(operation.newest_ms, newest_partition_ms, self._lost_ms)
        for worker in operation.waiting:
            newest_ms = max(newest_ms, self._latest_of(worker, heard_ms))
        operation.waiting.clear()
        time_ms = max(now_ms, newest_ms + 1)
        operation.limit_ms = time_ms - 1
        return time_ms

    def end(self, ticket: int) -> None:
        """All workers have been sent the partitions, or there are none."""
        del self._operations[ticket]

    def _latest_of(self, worker: W, heard_ms: int) -> int:
        last = self._workers[worker]
        elapsed_ms = heard_ms - last.heard_ms
        return last.newest_ms + elapsed_ms + elapsed_ms // _LEAN + 1
