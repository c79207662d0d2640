# SPDX-License-Identifier: Apache-2.0
"""What every group has: id, type, state; and which state may follow which."""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class GroupType(Enum):
    """Group types as ListGroups v5 spells them."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


class GroupState(Enum):
    """Group states, spelled as on the wire."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    ASSIGNING = "Assigning"
    RECONCILING = "Reconciling"
    STABLE = "Stable"
    DEAD = "Dead"


class Group(Protocol):
    """What the shard asks of a group of any type."""

    group_id: str
    version: int
    """Grows with every change that the answer to a heartbeat or commit could show."""

    @property
    def type(self) -> GroupType: ...

    @property
    def state(self) -> GroupState: ...

    @property
    def protocol_type(self) -> str:
        """`consumer`, another classic protocol type, or "" for a group that only holds offsets."""

    def is_empty(self) -> bool:
        """Whether the group has no members, so that it may be deleted (KIP-229)."""

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether a live member consumes `topic`, so that its offsets may not be deleted (KIP-496)."""
