# SPDX-License-Identifier: Apache-2.0
"""The states of a group member, the allowed transitions, and the steps of a rebalance. Pure.

The module `membership` explains the states.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kcoord.client.types import TopicIdPartition

Partitions = frozenset[TopicIdPartition]
NO_PARTITIONS: Final[Partitions] = frozenset()


class MembershipState(Enum):
    """The state of a member."""

    UNSUBSCRIBED = "unsubscribed"
    JOINING = "joining"
    RECONCILING = "reconciling"
    ACKNOWLEDGING = "acknowledging"
    STABLE = "stable"
    FENCED = "fenced"
    PREPARE_LEAVING = "prepare leaving"
    LEAVING = "leaving"
    STALE = "stale"
    FATAL = "fatal"


IN_GROUP: Final = frozenset(
    {MembershipState.JOINING, MembershipState.RECONCILING, MembershipState.ACKNOWLEDGING, MembershipState.STABLE}
)
_ENDS: Final = frozenset(
    {MembershipState.FENCED, MembershipState.PREPARE_LEAVING, MembershipState.STALE, MembershipState.FATAL}
)

TRANSITIONS: Final[dict[MembershipState, frozenset[MembershipState]]] = {
    MembershipState.UNSUBSCRIBED: frozenset({MembershipState.JOINING}),
    MembershipState.JOINING: _ENDS | {MembershipState.RECONCILING, MembershipState.STABLE},
    MembershipState.RECONCILING: _ENDS | {MembershipState.ACKNOWLEDGING, MembershipState.STABLE},
    MembershipState.ACKNOWLEDGING: _ENDS | {MembershipState.RECONCILING, MembershipState.STABLE},
    MembershipState.STABLE: _ENDS | {MembershipState.RECONCILING, MembershipState.ACKNOWLEDGING},
    MembershipState.FENCED: frozenset({MembershipState.JOINING, MembershipState.PREPARE_LEAVING}),
    MembershipState.PREPARE_LEAVING: frozenset({MembershipState.LEAVING}),
    MembershipState.LEAVING: frozenset({MembershipState.UNSUBSCRIBED}),
    MembershipState.STALE: frozenset({MembershipState.JOINING, MembershipState.PREPARE_LEAVING, MembershipState.FATAL}),
    MembershipState.FATAL: frozenset({MembershipState.PREPARE_LEAVING}),
}


class StepKind(Enum):
    """The action of a rebalance step: the member revokes, takes or loses the partitions."""

    REVOKE = "revoke"
    ASSIGN = "assign"
    LOSE = "lose"


class RebalanceStep(NamedTuple):
    """A step that the consumer carries out and then reports with `step_done`. There is one step at a time."""

    kind: StepKind
    partitions: Partitions
