# SPDX-License-Identifier: Apache-2.0
"""Replies that wait until everything their operation could have seen is on disk.

Offsets only grow, so a queue in arrival order is also a queue in order of offsets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass


class Waiter:
    """A token that takes its reply itself, for answers that are known before they may leave."""

    __slots__ = ()

    def settle(self, error: object) -> None:
        """What was waited for is durable, or `error` is the KafkaError that came instead of it; else it is None."""
        raise NotImplementedError


@dataclass(slots=True)
class Reply:
    """The answer to the operation whose caller gave `token`; a `KafkaError` as `value` is an expected failure."""

    token: Hashable
    value: object


class DeferredReplies:
    """The replies of one shard that wait for its log."""

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Reply]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, offset: int, reply: Reply) -> None:
        """`reply` may leave once everything before `offset` is durable."""
        assert not self._queue or self._queue[-1][0] <= offset, "replies are added in the order of their offsets"
        self._queue.append((offset, reply))

    def release(self, durable_offset: int, into: list[Reply]) -> None:
        """Moves every reply that waited for at most `durable_offset`, in order."""
        queue = self._queue
        while queue and queue[0][0] <= durable_offset:
            into.append(queue.popleft()[1])

    def drain(self) -> list[Hashable]:
        """Removes all replies and returns their tokens, in order."""
        tokens = [reply.token for _, reply in self._queue]
        self._queue.clear()
        return tokens
