# SPDX-License-Identifier: Apache-2.0
"""The order of creation times of groups and partitions that several processes create (KIP-1327). Pure.

A partition is new to a group if its creation time is after the group's. The controller stamps partitions. The worker of
a group's coordinator stamps the group. Their clocks differ. Two rules must hold:

* A partition that a coordinator does not know when it creates a group is newer than that group.
* A partition that it knows is not newer.

The second rule is simple: a group is never older than the newest partition in the coordinator's image. For the first
rule, every operation that creates partitions takes these steps:

1. The controller asks all workers. A worker answers with the latest creation time that it has given or could give now.
   Until the operation is over, it gives no later time (`CreationLimits`), except the creation time of a newer partition
   that it learns of.
2. The controller stamps the new partitions later than all answers, and later than all earlier partitions.
3. The workers receive the partitions, in the order of the metadata log, and then the message that the operation is
   over.

A worker that joins in between receives the limits of the current operations. If a worker has ended or does not answer
in time, the controller assumes the latest time that the worker can have given: the newest time that it last reported,
plus the time since then by the controller's clock, plus an eighth of that time. The eighth covers the worker's clock,
which is adjusted towards the wall clock by at most an eighth of the elapsed time.

Nothing here is durable. A controller that has just started knows no time of any worker, but workers may have groups. It
therefore expects an answer from each worker: until then, operations also wait for workers that have not joined. If an
operation stops waiting, the controller expects these workers no longer, so a worker that is down delays partitions
once. Partitions that were created without its answer may be older than its groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

W = TypeVar("W", bound=Hashable)

_LEAN: Final = 8
UNKNOWN_TIME_MS: Final = -1


@dataclass(slots=True)
class _LastWord:
    number: int
    newest_ms: int
    heard_ms: int


@dataclass(slots=True)
class _Operation(Generic[W]):
    waiting: set[W]
    newest_ms: int = UNKNOWN_TIME_MS
    limit_ms: int | None = None
    """The latest creation time that a group may get; None until the partitions are stamped."""


class CreationOrder(Generic[W]):
    """The controller's side.

    `heard_ms` is the time of a clock that never stops or goes back. All other times are creation times. A value of type
    `W` is one connection of a worker. The number of the worker stays the same when it restarts. `expected` are the
    numbers of the workers that may have groups when the controller starts.
    """

    def __init__(self, expected: Iterable[int] = ()) -> None:
        self._expected = set(expected)
        self._workers: dict[W, _LastWord] = {}
        self._operations: dict[int, _Operation[W]] = {}
        self._tickets = itertools.count(1)
        self._lost_ms = UNKNOWN_TIME_MS
        """The latest creation time that any worker that has ended can have given."""

    def join(self, worker: W, number: int, newest_ms: int, heard_ms: int) -> dict[int, int | None]:
        """Adds a worker; returns the limits of the current operations by their tickets.

        The limit is None if the operation now also waits for this worker's answer.
        """
        self._workers[worker] = _LastWord(number, newest_ms, heard_ms)
        for operation in self._operations.values():
            if operation.limit_ms is None:
                operation.waiting.add(worker)
        return {ticket: operation.limit_ms for ticket, operation in self._operations.items()}

    def lose(self, worker: W, heard_ms: int) -> None:
        """Removes a worker that has ended. Operations no longer wait for it."""
        if worker in self._workers:
            self._lost_ms = max(self._lost_ms, self._latest_of(worker, heard_ms))
            del self._workers[worker]
        for operation in self._operations.values():
            operation.waiting.discard(worker)

    def begin(self) -> int:
        """Begins an operation and returns its ticket. The caller then asks the workers in `waiting`."""
        ticket = next(self._tickets)
        self._operations[ticket] = _Operation(set(self._workers))
        return ticket

    def waiting(self, ticket: int) -> Collection[W]:
        """Returns the workers that have joined and have not answered the operation."""
        return self._operations[ticket].waiting

    def is_waiting(self, ticket: int) -> bool:
        """Returns whether the operation waits for a worker: for its answer, or for it to join."""
        return bool(self._expected or self._operations[ticket].waiting)

    def answer(self, worker: W, ticket: int, newest_ms: int, heard_ms: int) -> None:
        """Notes that a worker gives no later creation time than `newest_ms` until the operation is over.

        The operation may already be over.
        """
        last = self._workers.get(worker)
        if last is not None:
            last.newest_ms, last.heard_ms = newest_ms, heard_ms
            # Only an answer counts: a worker that joins may still be loading its groups.
            self._expected.discard(last.number)
        operation = self._operations.get(ticket)
        if operation is not None and worker in operation.waiting:
            operation.waiting.remove(worker)
            operation.newest_ms = max(operation.newest_ms, newest_ms)

    def stamp(self, ticket: int, now_ms: int, newest_partition_ms: int, heard_ms: int) -> int:
        """Returns the creation time of the partitions. Stops waiting for workers that have not answered or joined."""
        operation = self._operations[ticket]
        newest_ms = max(operation.newest_ms, newest_partition_ms, self._lost_ms)
        for worker in operation.waiting:
            newest_ms = max(newest_ms, self._latest_of(worker, heard_ms))
        operation.waiting.clear()
        self._expected.clear()
        time_ms = max(now_ms, newest_ms + 1)
        operation.limit_ms = time_ms - 1
        return time_ms

    def end(self, ticket: int) -> None:
        """Ends an operation: all workers have been sent the partitions, or none were created."""
        del self._operations[ticket]

    def _latest_of(self, worker: W, heard_ms: int) -> int:
        last = self._workers[worker]
        elapsed_ms = heard_ms - last.heard_ms
        return last.newest_ms + elapsed_ms + elapsed_ms // _LEAN + 1
