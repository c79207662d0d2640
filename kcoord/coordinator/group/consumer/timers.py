# SPDX-License-Identifier: Apache-2.0
"""The timers of a consumer group's members; whichever fires, the member is removed."""

from __future__ import annotations

from typing import Final

from kcoord.runtime.result import Cancel, Schedule, TimerKey

SESSION_TIMER: Final = "consumer-session"
REBALANCE_TIMER: Final = "consumer-rebalance"
CLASSIC_JOIN_TIMER: Final = "consumer-classic-join"
CLASSIC_SYNC_TIMER: Final = "consumer-classic-sync"

DOWNGRADE_TIMER: Final = "consumer-downgrade"

MEMBER_TIMERS: Final = (SESSION_TIMER, REBALANCE_TIMER, CLASSIC_JOIN_TIMER, CLASSIC_SYNC_TIMER)


def session_timer(group_id: str, member_id: str) -> TimerKey:
    """The member has been silent for its session timeout."""
    return TimerKey(SESSION_TIMER, group_id, member_id)


def rebalance_timer(group_id: str, member_id: str) -> TimerKey:
    """The member has not revoked its partitions within its rebalance timeout."""
    return TimerKey(REBALANCE_TIMER, group_id, member_id)


def classic_join_timer(group_id: str, member_id: str) -> TimerKey:
    """The classic member was told to rejoin and has not done so within its rebalance timeout."""
    return TimerKey(CLASSIC_JOIN_TIMER, group_id, member_id)


def classic_sync_timer(group_id: str, member_id: str) -> TimerKey:
    """The classic member has joined and not fetched its assignment within its rebalance timeout."""
    return TimerKey(CLASSIC_SYNC_TIMER, group_id, member_id)


def downgrade_timer(group_id: str) -> TimerKey:
    """Only classic members may be left: the group follows them once what is under way is replayed."""
    return TimerKey(DOWNGRADE_TIMER, group_id)


def cancel_member_timers(group_id: str, member_id: str) -> list[Schedule | Cancel]:
    return [Cancel(TimerKey(kind, group_id, member_id)) for kind in MEMBER_TIMERS]
