# SPDX-License-Identifier: Apache-2.0
"""How late a new group may claim to be created while partitions are being made (KIP-1327). Pure.

See `kcoord.metadata.creation_order` for the whole; this is the part of a process that coordinates groups.
"""

from __future__ import annotations

from kcoord.runtime.result import NO_CREATION_LIMIT


class CreationLimits:
    """One limit for each operation under way that makes partitions, named by a ticket."""

    __slots__ = ("_limits", "limit_ms")

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        self.limit_ms = NO_CREATION_LIMIT
        """The latest creation time that a new group may have, unless it knows of newer partitions. Every request reads
        it, while limits rarely change.
        """

    def hold(self, ticket: int, limit_ms: int) -> None:
        """Partitions of a later time are being made, which the groups of this process cannot know yet."""
        self._limits[ticket] = limit_ms
        self.limit_ms = min(self._limits.values())

    def release(self, ticket: int) -> None:
        """The process knows these partitions, or they will not be made."""
        self._limits.pop(ticket, None)
        self.limit_ms = min(self._limits.values(), default=NO_CREATION_LIMIT)

    @property
    def tickets(self) -> set[int]:
        return set(self._limits)
