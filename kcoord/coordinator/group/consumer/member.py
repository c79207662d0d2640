# SPDX-License-Identifier: Apache-2.0
"""One member of a consumer group, as its records describe it. Members are values: an update is a changed copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias

JOIN_GROUP_EPOCH = 0
"""The member epoch of a heartbeat that joins (KIP-848 ConsumerGroupHeartbeat API)."""
LEAVE_GROUP_MEMBER_EPOCH = -1
"""The member epoch of a heartbeat that leaves for good."""
LEAVE_GROUP_STATIC_MEMBER_EPOCH = -2
"""The member epoch of a static member that leaves and will return; also the epoch it keeps meanwhile."""

Assignment: TypeAlias = Mapping[bytes, frozenset[int]]
"""Topic id -> partitions."""
EpochAssignment: TypeAlias = Mapping[bytes, Mapping[int, int]]
"""Topic id -> partition -> the group epoch at which the partition was assigned to the member."""


class MemberState(IntEnum):
    """How far a member is with its target assignment; the numbers are those of the current assignment record."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    UNRELEASED_PARTITIONS = 2
    UNKNOWN = 127


@dataclass(slots=True)
class ClassicMemberMetadata:
    """What a member that speaks the classic protocol has beyond the others; `protocols` are (name, metadata)."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]


@dataclass(slots=True)
class ConsumerGroupMember:
    """Subscription (member metadata record) and progress (current assignment record) of a member.

    `subscribed_topic_names` is sorted and free of duplicates. `subscribed_topic_regex` is None or "" where the
    member subscribes to no regular expression. A partition in `assigned` or `pending_revocation` is owned.
    """

    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    subscribed_topic_names: tuple[str, ...] = ()
    subscribed_topic_regex: str | None = None
    server_assignor: str | None = None
    rebalance_timeout_ms: int = -1
    classic: ClassicMemberMetadata | None = None
    """Set for a member that speaks the classic protocol (KIP-848 Online Migration)."""
    member_epoch: int = 0
    previous_member_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: EpochAssignment = field(default_factory=dict)
    pending_revocation: EpochAssignment = field(default_factory=dict)

    def is_reconciled_to(self, assignment_epoch: int) -> bool:
        return self.state is MemberState.STABLE and self.member_epoch == assignment_epoch

    def with_progress(
        self, state: MemberState, member_epoch: int, assigned: EpochAssignment, pending_revocation: EpochAssignment
    ) -> ConsumerGroupMember:
        """A copy that has moved on; the epoch it comes from becomes its previous epoch."""
        return replace(
            self,
            state=state,
            previous_member_epoch=self.member_epoch,
            member_epoch=member_epoch,
            assigned=assigned,
            pending_revocation=pending_revocation,
        )

    def assignment_epoch_of(self, topic_id: bytes, partition: int) -> int | None:
        """The epoch since which the member owns the partition; None where it does not own it."""
        for owned in (self.assigned, self.pending_revocation):
            epoch = owned.get(topic_id, {}).get(partition)
            if epoch is not None:
                return epoch
        return None
