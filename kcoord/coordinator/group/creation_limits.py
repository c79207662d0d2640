# SPDX-License-Identifier: Apache-2.0
"""The latest creation time that a new group may get while partitions are being created (KIP-1327). Pure.

`kcoord.metadata.creation_order` describes the whole protocol; this is the part of a process that coordinates groups.
"""

from __future__ import annotations

from kcoord.runtime.result import NO_CREATION_LIMIT


class CreationLimits:
    """One limit, identified by a ticket, for each operation that is creating partitions now."""

    __slots__ = ("_limits", "limit_ms")

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        self.limit_ms = NO_CREATION_LIMIT
        """The latest creation time of a new group, unless it knows newer partitions. It is the minimum of the limits,
        kept because every request reads it and limits rarely change.
        """

    def hold(self, ticket: int, limit_ms: int) -> None:
        """Adds a limit for partitions that are being created.

        Partitions with a later creation time are being created, and this process has no image of them yet.
        """
        self._limits[ticket] = limit_ms
        self.limit_ms = min(self._limits.values())

    def release(self, ticket: int) -> None:
        """Removes a limit: the process has an image with these partitions, or they will not be created."""
        self._limits.pop(ticket, None)
        self.limit_ms = min(self._limits.values(), default=NO_CREATION_LIMIT)

    @property
    def tickets(self) -> set[int]:
        return set(self._limits)
