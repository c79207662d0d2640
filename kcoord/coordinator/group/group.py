# SPDX-License-Identifier: Apache-2.0
"""What groups of both protocols have in common: id, type, state; the limits on new groups; timers and background tasks.

The limits keep strangers from filling the memory of a coordinator. Kafka has none of them; the defaults are beyond what
an honest client asks for. They hold for what is to be made, so that a group that is older than a limit can still be
used and deleted.

Timers and tasks have keys, under which they are armed and started. Whichever timer of a consumer group's member fires,
the member is removed.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from kcoord.runtime.result import Cancel, Schedule, TimerKey, TimerKind
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig


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


def check_new_group(config: BrokerConfig, group_id: str, present_groups: int) -> None:
    """INVALID_GROUP_ID beyond kcoord.max.id.bytes, POLICY_VIOLATION beyond kcoord.partition.max.groups."""
    if _is_too_long(config, group_id):
        raise KafkaError(
            Errors.INVALID_GROUP_ID, f"The group id is longer than kcoord.max.id.bytes={config.kcoord_max_id_bytes}."
        )
    limit = config.kcoord_partition_max_groups
    if present_groups >= limit:
        raise KafkaError(
            Errors.POLICY_VIOLATION, f"This coordinator partition has kcoord.partition.max.groups={limit} groups."
        )


def check_new_member(config: BrokerConfig, member_id: str, instance_id: str | None) -> None:
    """INVALID_REQUEST where an id is longer than kcoord.max.id.bytes."""
    for name, text in (("member id", member_id), ("group instance id", instance_id or "")):
        if _is_too_long(config, text):
            raise KafkaError(
                Errors.INVALID_REQUEST, f"The {name} is longer than kcoord.max.id.bytes={config.kcoord_max_id_bytes}."
            )


def _is_too_long(config: BrokerConfig, text: str) -> bool:
    limit = config.kcoord_max_id_bytes
    return len(text) > limit or (not text.isascii() and len(text.encode()) > limit)


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
