# SPDX-License-Identifier: Apache-2.0
"""What groups of both protocols have in common: id, type, state; timers and background tasks.

Timers and tasks have keys, under which they are armed and started. Whichever timer of a consumer group's member fires,
the member is removed.
"""

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Final, Protocol

from kcoord.runtime.result import Cancel, Schedule, TimerKey, TimerKind


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
    version: object
    """Another object after every change that the answer to a heartbeat or commit could show; compared by identity."""

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


class GroupTimer(TimerKind):
    """Timers and tasks of both group protocols."""

    SESSION = "consumer-session"
    REBALANCE = "consumer-rebalance"
    CLASSIC_MEMBER_JOIN = "consumer-classic-join"
    CLASSIC_MEMBER_SYNC = "consumer-classic-sync"
    DOWNGRADE = "consumer-downgrade"
    COMPUTE_TARGET = "consumer-target"
    RESOLVE_REGEX = "consumer-regex"
    CLASSIC_HEARTBEAT = "classic-heartbeat"
    CLASSIC_JOIN = "classic-join"
    CLASSIC_SYNC = "classic-sync"
    CLASSIC_REBALANCE = "classic-rebalance"
    OFFSETS_EXPIRATION = "offsets-expiration"


MEMBER_TIMERS: Final = (
    GroupTimer.SESSION,
    GroupTimer.REBALANCE,
    GroupTimer.CLASSIC_MEMBER_JOIN,
    GroupTimer.CLASSIC_MEMBER_SYNC,
)
OFFSETS_EXPIRATION: Final = TimerKey(GroupTimer.OFFSETS_EXPIRATION)

# Functions of (group id, member id), or of the group id alone. `partial` makes a key without a Python function, and
# every heartbeat makes one.
session_timer: Final = partial(TimerKey, GroupTimer.SESSION)
"""The member has been silent for its session timeout."""
rebalance_timer: Final = partial(TimerKey, GroupTimer.REBALANCE)
"""The member has not revoked its partitions within its rebalance timeout."""
classic_join_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_MEMBER_JOIN)
"""The classic member was told to rejoin and has not done so within its rebalance timeout."""
classic_sync_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_MEMBER_SYNC)
"""The classic member has joined and not fetched its assignment within its rebalance timeout."""
downgrade_timer: Final = partial(TimerKey, GroupTimer.DOWNGRADE)
"""Only classic members may be left: the group follows them once what is under way is replayed."""
heartbeat_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_HEARTBEAT)
"""The member of a classic group has been silent for its session timeout."""


def cancel_member_timers(group_id: str, member_id: str) -> list[Schedule | Cancel]:
    return [Cancel(TimerKey(kind, group_id, member_id)) for kind in MEMBER_TIMERS]
