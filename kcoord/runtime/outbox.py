# SPDX-License-Identifier: Apache-2.0
"""What the shards of one runtime have for the outside: replies, now or once the disk has what they rest on, tasks,
appends for their logs, and counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kcoord.runtime.result import Task
from kcoord_protocol.errors import KafkaError


class Wait(Enum):
    """Stands for an answer that `poll` will give later."""

    WAIT = "WAIT"


WAIT: Final = Wait.WAIT


class Waiter(ABC):
    """Who waits for records to be durable and needs no more than that: an answer that is known before it may leave."""

    __slots__ = ()

    @abstractmethod
    def settle(self) -> None:
        """What was waited for is durable."""

    @abstractmethod
    def fail(self, error: KafkaError) -> None:
        """The shard failed before that."""


@dataclass(slots=True)
class Reply:
    """The answer to the operation whose caller gave `token`; a `KafkaError` as `value` is an expected failure."""

    token: Hashable
    value: object


class DeferredReplies:
    """The replies and waiters of one shard that wait until everything their operation could have seen is on disk.

    Offsets only grow, so a queue in arrival order is also a queue in order of offsets.
    """

    __slots__ = ("_behind", "_replies", "_waiters")

    def __init__(self) -> None:
        self._behind: deque[tuple[int, int]] = deque()
        self._replies: deque[tuple[int, Reply]] = deque()
        self._waiters: deque[tuple[int, Waiter]] = deque()

    def __len__(self) -> int:
        return len(self._replies) + len(self._waiters)

    def add(self, offset: int, reply: Reply) -> None:
        """`reply` may leave once everything before `offset` is durable."""
        assert not self._replies or self._replies[-1][0] <= offset, "replies are added in the order of their offsets"
        self._replies.append((offset, reply))

    def add_waiter(self, offset: int, waiter: Waiter) -> None:
        """`waiter` is settled once everything before `offset` is durable."""
        self._waiters.append((offset, waiter))

    def release(self, durable_offset: int, replies: list[Reply], waiters: list[Waiter]) -> None:
        """Moves all that waited for at most `durable_offset`, in order."""
        queue = self._replies
        while queue and queue[0][0] <= durable_offset:
            replies.append(queue.popleft()[1])
        waiting = self._waiters
        while waiting and waiting[0][0] <= durable_offset:
            waiters.append(waiting.popleft()[1])

    def overdue(self, durable_offset: int, next_offset: int, now_ms: int, since_ms: int) -> list[Hashable]:
        """Removes all that were there at `since_ms`, as far as calls of this have seen: it is called again and again.
        Returns the tokens and the waiters, each in order.
        """
        behind = self._behind
        if durable_offset == next_offset:
            behind.clear()
            return []
        behind.append((now_ms, next_offset))
        offset = durable_offset
        while behind and behind[0][0] <= since_ms:
            offset = behind.popleft()[1]
        replies: list[Reply] = []
        waiters: list[Waiter] = []
        self.release(offset, replies, waiters)
        return [*(reply.token for reply in replies), *waiters]

    def drain(self) -> list[Hashable]:
        """Removes all and returns the tokens and the waiters, each in order."""
        tokens: list[Hashable] = [reply.token for _, reply in self._replies]
        tokens += [waiter for _, waiter in self._waiters]
        self._replies.clear()
        self._waiters.clear()
        self._behind.clear()
        return tokens


@dataclass(slots=True)
class Append:
    """Whole batches with final offsets, `base_offset` up to before `next_offset`, for the log of one shard."""

    shard_id: int
    base_offset: int
    next_offset: int
    data: bytes


@dataclass(slots=True)
class Statistics:
    """What the shards of one runtime did, for metrics."""

    records_appended: int = 0
    batches_appended: int = 0
    bytes_appended: int = 0
    operations_failed: int = 0
    timers_fired: int = 0
    records_loaded: int = 0
    records_skipped: int = 0


@dataclass(slots=True)
class Outbox:
    """What the shards of one runtime have for the next `poll`."""

    replies: list[Reply] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    tasks: list[tuple[int, Task]] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    writable: list[int] = field(default_factory=list)
