# SPDX-License-Identifier: Apache-2.0
"""The states of a group member with the legal transitions, and the steps of a rebalance. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from kcoord.client.types import TopicIdPartition

Partitions = frozenset[TopicIdPartition]
NO_PARTITIONS: Final[Partitions] = frozenset()


class MemberState(Enum):
    """Where the member is."""

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
    {MemberState.JOINING, MemberState.RECONCILING, MemberState.ACKNOWLEDGING, MemberState.STABLE}
)
_ENDS: Final = frozenset({MemberState.FENCED, MemberState.PREPARE_LEAVING, MemberState.STALE, MemberState.FATAL})

TRANSITIONS: Final[dict[MemberState, frozenset[MemberState]]] = {
    MemberState.UNSUBSCRIBED: frozenset({MemberState.JOINING}),
    MemberState.JOINING: _ENDS | {MemberState.RECONCILING, MemberState.STABLE},
    MemberState.RECONCILING: _ENDS | {MemberState.ACKNOWLEDGING, MemberState.STABLE},
    MemberState.ACKNOWLEDGING: _ENDS | {MemberState.RECONCILING, MemberState.STABLE},
    MemberState.STABLE: _ENDS | {MemberState.RECONCILING, MemberState.ACKNOWLEDGING},
    MemberState.FENCED: frozenset({MemberState.JOINING, MemberState.PREPARE_LEAVING}),
    MemberState.PREPARE_LEAVING: frozenset({MemberState.LEAVING}),
    MemberState.LEAVING: frozenset({MemberState.UNSUBSCRIBED}),
    MemberState.STALE: frozenset({MemberState.JOINING, MemberState.PREPARE_LEAVING, MemberState.FATAL}),
    MemberState.FATAL: frozenset({MemberState.PREPARE_LEAVING}),
}


class StepKind(Enum):
    """What a rebalance step does with its partitions."""

    REVOKE = "revoke"
    ASSIGN = "assign"
    LOSE = "lose"


class Step(NamedTuple):
    """To be carried out and then reported by `step_done`; there is one at a time."""

    kind: StepKind
    partitions: Partitions
