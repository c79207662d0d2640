# SPDX-License-Identifier: Apache-2.0
"""What the shards of one set have for the outside: their states, replies, now or once the log has what they rest on,
tasks, requests of their logs, and counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kcoord.runtime.result import Task
from kcoord.runtime.shard_log import Append, Load, Release, Save
from kcoord_protocol.errors import KafkaError


class ShardState(Enum):
    """The life of a shard; operations run in ACTIVE alone."""

    INITIAL = "Initial"
    LOADING = "Loading"
    ACTIVE = "Active"
    FAILED = "Failed"
    CLOSED = "Closed"


class Waiter(ABC):
    """Waits for records to be durable. The shard set calls neither method itself: it hands waiters out in `Ready`."""

    __slots__ = ()

    @abstractmethod
    def settle(self) -> None:
        """The records are durable: an answer that rests on them may leave."""

    @abstractmethod
    def fail(self, error: KafkaError) -> None:
        """The shard failed before that."""


def _to_nobody(value: object) -> None:
    """Nobody waits for the answer."""


class DeferredReply(Waiter):
    """The answer to an operation, which has to wait. Whoever ran the operation sets `deliver`: it gets the response, or
    a KafkaError for an expected failure.
    """

    __slots__ = ("deliver", "value")

    def __init__(self, value: object) -> None:
        self.value = value
        self.deliver: Callable[[object], None] = _to_nobody

    def settle(self) -> None:
        self.deliver(self.value)

    def fail(self, error: KafkaError) -> None:
        self.deliver(error)


class Refusal(Waiter):
    """Settles a waiter by failing it."""

    __slots__ = ("_error", "_waiter")

    def __init__(self, waiter: Waiter, error: KafkaError) -> None:
        self._waiter = waiter
        self._error = error

    def settle(self) -> None:
        self._waiter.fail(self._error)

    def fail(self, error: KafkaError) -> None:
        self._waiter.fail(error)


class DeferredReplies:
    """The waiters of one shard that wait until everything their operation could have seen is durable.

    Offsets only grow, so a queue in arrival order is also a queue in order of offsets.
    """

    __slots__ = ("_behind", "_queue")

    def __init__(self) -> None:
        self._behind: deque[tuple[int, int]] = deque()
        self._queue: deque[tuple[int, Waiter]] = deque()

    def add(self, offset: int, waiter: Waiter) -> None:
        """`waiter` is settled once everything before `offset` is durable."""
        self._queue.append((offset, waiter))

    def release(self, durable_offset: int, replies: list[Waiter]) -> None:
        """Moves all that waited for at most `durable_offset`, in order."""
        queue = self._queue
        while queue and queue[0][0] <= durable_offset:
            replies.append(queue.popleft()[1])

    def overdue(self, durable_offset: int, next_offset: int, now_ms: int, since_ms: int) -> list[Waiter]:
        """Removes all that were there at `since_ms`, as far as calls of this have seen: it is called again and again.
        Returns them in order.
        """
        behind = self._behind
        if durable_offset == next_offset:
            behind.clear()
            return []
        behind.append((now_ms, next_offset))
        offset = durable_offset
        while behind and behind[0][0] <= since_ms:
            offset = behind.popleft()[1]
        waiters: list[Waiter] = []
        self.release(offset, waiters)
        return waiters

    def drain(self) -> list[Waiter]:
        """Removes all and returns them in order."""
        waiters = [waiter for _, waiter in self._queue]
        self._queue.clear()
        self._behind.clear()
        return waiters


@dataclass(slots=True)
class Statistics:
    """What the shards of one set did, for metrics."""

    records_appended: int = 0
    batches_appended: int = 0
    bytes_appended: int = 0
    operations_failed: int = 0
    timers_fired: int = 0
    records_loaded: int = 0
    records_skipped: int = 0


@dataclass(slots=True)
class Outbox:
    """What the shards of one set have for the next `poll`."""

    replies: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    writable: list[int] = field(default_factory=list)


class Ready:
    """What the owner has to do now: requests of the log, answers that may leave, and tasks to start. It is made anew in
    each turn, so what is rare is an attribute of the class until there is some.
    """

    saves: Sequence[Save] = ()
    has_log_work = False
    """Whether any of the following may be there."""
    closes: Sequence[int] = ()
    releases: Sequence[Release] = ()
    opens: Sequence[Load] = ()
    reads: Sequence[Load] = ()
    has_released = False
    """Shards were given away: a topic of that name, or the same shards, can be owned again (`ShardSet.follow`)."""
    active: Sequence[Load] = ()
    """Loads that ended well; their shards answer from now on."""

    def __init__(self, replies: list[Waiter], tasks: list[tuple[int, Task]], appends: list[Append]) -> None:
        self.replies = replies
        self.tasks = tasks
        self.appends = appends
