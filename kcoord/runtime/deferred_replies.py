# SPDX-License-Identifier: Apache-2.0
"""Replies that wait until everything their operation could have seen is on disk.

Offsets only grow, so a queue in arrival order is also a queue in order of offsets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcoord_protocol.errors import KafkaError


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
    """The replies and waiters of one shard that wait for its log."""

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
