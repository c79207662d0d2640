# SPDX-License-Identifier: Apache-2.0
"""Hands out producer ids from blocks that the metadata log reserves.

A block is reserved durably before its first id is given out, so no id is given twice. A restart skips the ids that are
left of a block.
"""

from __future__ import annotations

from collections.abc import Awaitable


class ProducerIds:
    """The ids that are left of the reserved block."""

    __slots__ = ("_end", "_next", "pending")

    def __init__(self) -> None:
        self._next = 0
        self._end = 0
        self.pending: Awaitable[object] | None = None
        """The caller's wait for a new block, shared by all requests that need it."""

    def take(self) -> int | None:
        """Returns the next id, None if a new block is needed first."""
        if self._next == self._end:
            return None
        producer_id = self._next
        self._next += 1
        return producer_id

    def add_block(self, first_id: int, size: int) -> None:
        """Continues with a block that is durably reserved."""
        self._next, self._end = first_id, first_id + size
