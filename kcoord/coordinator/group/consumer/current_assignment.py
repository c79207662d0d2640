# SPDX-License-Identifier: Apache-2.0
"""Moves one member towards its target assignment: revocation first, then the epoch, then what others have released.

KIP-848 "Member Assignment State Machine", with the assignment epoch of each partition as Kafka 4.3 records it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kcoord.coordinator.group.consumer.member import Assignment, ConsumerGroupMember, EpochAssignment, MemberState
from kcoord_protocol.errors import Errors, KafkaError

OwnedPartitions = Mapping[bytes, frozenset[int]]


@dataclass(slots=True)
class CurrentAssignmentBuilder:
    """Everything the next step of a member depends on.

    `owned` is what the member says it owns, None where it did not say. `subscribed_topic_ids` are the topics it
    subscribes to now: others are taken from it even if the target assignment is older than its subscription.
    """

    member: ConsumerGroupMember
    target_epoch: int
    target: Assignment
    is_free: Callable[[bytes, int], bool]
    subscribed_topic_ids: frozenset[bytes]
    subscription_changed: bool
    owned: OwnedPartitions | None

    def build(self) -> ConsumerGroupMember:
        """The member after this heartbeat; the same object where nothing changes."""
        member = self.member
        if member.state is MemberState.STABLE:
            if member.member_epoch != self.target_epoch:
                return self._next(member.member_epoch)
            return self._drop_unsubscribed() if self.subscription_changed else member
        if member.state is MemberState.UNREVOKED_PARTITIONS:
            if self._still_owns(member.pending_revocation):
                return self._drop_unsubscribed() if self.subscription_changed else member
            return self._next(member.member_epoch)
        if member.state is MemberState.UNRELEASED_PARTITIONS:
            return self._next(member.member_epoch)
        # A state written by a later version: only a member that owns nothing can be brought to the target safely.
        if self.owned is None or self.owned:
            raise KafkaError(
                Errors.FENCED_MEMBER_EPOCH, "The member is in a state that is not known here; it must rejoin."
            )
        return self._next(self.target_epoch)

    def _still_owns(self, partitions: EpochAssignment) -> bool:
        """Whether the member may still own some of them; without its word it does."""
        if self.owned is None:
            return True
        return any(not self.owned.get(topic_id, frozenset()).isdisjoint(ps) for topic_id, ps in partitions.items())

    def _next(self, member_epoch: int) -> ConsumerGroupMember:
        """One step: keep what is in the target, revoke the rest, and only with nothing to revoke take what is free."""
        member = self.member
        kept: dict[bytes, Mapping[int, int]] = {}
        revoked: dict[bytes, Mapping[int, int]] = {}
        taken: dict[bytes, list[int]] = {}
        unreleased = False
        for topic_id in sorted(member.assigned.keys() | self.target.keys()):
            target = self.target.get(topic_id, frozenset()) if topic_id in self.subscribed_topic_ids else frozenset()
            assigned = member.assigned.get(topic_id, {})
            if stay := {p: epoch for p, epoch in assigned.items() if p in target}:
                kept[topic_id] = stay
            if leave := {p: epoch for p, epoch in assigned.items() if p not in target}:
                revoked[topic_id] = leave
            wanted = sorted(p for p in target if p not in assigned)
            # What the member has just revoked, and is to have again, is still noted as its own.
            given_up = member.pending_revocation.get(topic_id, {})
            free = [p for p in wanted if p in given_up or self.is_free(topic_id, p)]
            unreleased = unreleased or len(free) < len(wanted)
            if free:
                taken[topic_id] = free
        if revoked and self._still_owns(revoked):
            return member.with_progress(MemberState.UNREVOKED_PARTITIONS, member_epoch, kept, revoked)
        for topic_id, partitions in taken.items():
            kept[topic_id] = {**kept.get(topic_id, {}), **dict.fromkeys(partitions, self.target_epoch)}
        state = MemberState.UNRELEASED_PARTITIONS if unreleased else MemberState.STABLE
        if (
            state is member.state
            and member.member_epoch == self.target_epoch
            and kept == member.assigned
            and not member.pending_revocation
        ):
            return member
        return member.with_progress(state, self.target_epoch, kept, {})

    def _drop_unsubscribed(self) -> ConsumerGroupMember:
        """The target is not newer, but the member has left topics behind: they must be revoked all the same."""
        member = self.member
        gone = {t: ps for t, ps in member.assigned.items() if t not in self.subscribed_topic_ids}
        if not gone:
            return member
        kept = {t: ps for t, ps in member.assigned.items() if t not in gone}
        if member.state is MemberState.STABLE and not self._still_owns(gone):
            return member.with_progress(MemberState.STABLE, member.member_epoch, kept, {})
        pending = dict(member.pending_revocation)
        for topic_id, partitions in gone.items():
            pending[topic_id] = {**pending.get(topic_id, {}), **partitions}
        return member.with_progress(MemberState.UNREVOKED_PARTITIONS, member.member_epoch, kept, pending)
