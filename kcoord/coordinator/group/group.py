# SPDX-License-Identifier: Apache-2.0
"""What groups of both protocols have in common: id, type, state, and the keys of their timers and background tasks.

Scheduling a timer with the same key again replaces it. Every timer of a consumer group's member removes the member.
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
    """The interface of a group of any type to its shard."""

    group_id: str
    version: object
    """Becomes another object with every change that may change the response to a heartbeat or commit.

    Compared by identity.
    """

    @property
    def type(self) -> GroupType: ...

    @property
    def state(self) -> GroupState: ...

    @property
    def protocol_type(self) -> str:
        """`consumer`, another classic protocol type, or "" for a group that only holds offsets."""

    def is_empty(self) -> bool:
        """True if the group has no members, so that it may be deleted (KIP-229)."""

    def is_subscribed_to(self, topic: str) -> bool:
        """True if a member subscribes to `topic`, so that its offsets may not be deleted (KIP-496)."""


class GroupTimer(TimerKind):
    """Timers and tasks of both group protocols."""

    SESSION = "consumer-session"
    REBALANCE = "consumer-rebalance"
    CLASSIC_MEMBER_JOIN = "consumer-classic-join"
    CLASSIC_MEMBER_SYNC = "consumer-classic-sync"
    DOWNGRADE = "consumer-downgrade"
    COMPUTE_TARGET = "consumer-target"
    RESOLVE_REGEX = "consumer-regex"
    CLIENT_ASSIGNOR = "consumer-assignor"
    PREPARE_ASSIGNMENT = "consumer-prepare"
    INSTALL_ASSIGNMENT = "consumer-install"
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
"""The timer of the expiry check, every offsets.retention.check.interval.ms."""

# Functions of (group id, member id), or of the group id alone. Every heartbeat makes a key, and `partial` makes it
# without calling a Python function.
session_timer: Final = partial(TimerKey, GroupTimer.SESSION)
"""The member has been silent for its session timeout."""
rebalance_timer: Final = partial(TimerKey, GroupTimer.REBALANCE)
"""The member has not revoked its partitions within its rebalance timeout."""
classic_join_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_MEMBER_JOIN)
"""The classic member was asked to rejoin and has not done so within its rebalance timeout."""
classic_sync_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_MEMBER_SYNC)
"""The classic member has joined and has not sent SyncGroup within its rebalance timeout."""
downgrade_timer: Final = partial(TimerKey, GroupTimer.DOWNGRADE)
"""Checks whether only classic members are left; fires at once, after the records of the operation are replayed."""
heartbeat_timer: Final = partial(TimerKey, GroupTimer.CLASSIC_HEARTBEAT)
"""The member of a classic group has been silent for its session timeout."""


def cancel_member_timers(group_id: str, member_id: str) -> list[Schedule | Cancel]:
    return [Cancel(TimerKey(kind, group_id, member_id)) for kind in MEMBER_TIMERS]
