# SPDX-License-Identifier: Apache-2.0
"""The timers and background tasks of group coordinator shards, and the keys under which they are armed and started.

Whichever timer of a consumer group's member fires, the member is removed.
"""

from __future__ import annotations

from typing import Final

from kcoord.runtime.result import Cancel, Schedule, TimerKey, TimerKind


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

# Every heartbeat makes such a key, and a member of an enum class takes ten times as long to look up as a global name.
_SESSION: Final = GroupTimer.SESSION
_CLASSIC_HEARTBEAT: Final = GroupTimer.CLASSIC_HEARTBEAT


def session_timer(group_id: str, member_id: str) -> TimerKey:
    """The member has been silent for its session timeout."""
    return TimerKey(_SESSION, group_id, member_id)


def rebalance_timer(group_id: str, member_id: str) -> TimerKey:
    """The member has not revoked its partitions within its rebalance timeout."""
    return TimerKey(GroupTimer.REBALANCE, group_id, member_id)


def classic_join_timer(group_id: str, member_id: str) -> TimerKey:
    """The classic member was told to rejoin and has not done so within its rebalance timeout."""
    return TimerKey(GroupTimer.CLASSIC_MEMBER_JOIN, group_id, member_id)


def classic_sync_timer(group_id: str, member_id: str) -> TimerKey:
    """The classic member has joined and not fetched its assignment within its rebalance timeout."""
    return TimerKey(GroupTimer.CLASSIC_MEMBER_SYNC, group_id, member_id)


def downgrade_timer(group_id: str) -> TimerKey:
    """Only classic members may be left: the group follows them once what is under way is replayed."""
    return TimerKey(GroupTimer.DOWNGRADE, group_id)


def heartbeat_timer(group_id: str, member_id: str) -> TimerKey:
    """The member of a classic group has been silent for its session timeout."""
    return TimerKey(_CLASSIC_HEARTBEAT, group_id, member_id)


def cancel_member_timers(group_id: str, member_id: str) -> list[Schedule | Cancel]:
    return [Cancel(TimerKey(kind, group_id, member_id)) for kind in MEMBER_TIMERS]
