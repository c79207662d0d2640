# SPDX-License-Identifier: Apache-2.0
"""One heartbeat of a member, or one JoinGroup of a classic member: how it changes its consumer group.

A heartbeat runs four steps (KIP-848 "Heartbeat Processing"):

1. The member: its new subscription is recorded. A static member may replace its predecessor.
2. The group epoch: it grows by one if the subscribed topics, their metadata or the preferred assignor changed.
3. The target assignment: it is computed if the group epoch is above the assignment epoch, but at most once per
   assignment interval. A computation that takes long becomes a background task; the member then continues with the
   old target. So it does if a member computes the target (`client_computation`).
4. The current assignment: the member makes one step towards its target, see `assignment`.

Each step reads the group and appends records; it never changes the group. The shard replays all records at the end,
so later steps see the change only through `updated`, which is the member as it will be.

`MemberTransition` has the steps, which both protocols share. `ConsumerHeartbeat` serves a member of the consumer
protocol that joins or stays (ConsumerGroupHeartbeat API); `removal` serves one that leaves.

**Lost responses.** A member that missed a response repeats its older epoch. The coordinator accepts the previous epoch
of a member that owns no more than it was assigned. It fences any other epoch, and the member joins again with epoch 0.

The order of checks and the epochs are as observed in Kafka 4.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records, regex
from kcoord.coordinator.group.assignor import ASSIGNORS
from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.consumer import client_computation
from kcoord.coordinator.group.consumer.assignment import (
    ComputeTarget,
    CurrentAssignmentBuilder,
    OwnedPartitions,
    compute,
    metadata_hash,
    needs_racks,
    owned_by_topic,
    takes_long,
    target_input,
    topic_ids_of,
)
from kcoord.coordinator.group.consumer.client_assignors import (
    ClientAssignor,
    asks_for_an_assignment,
    check_client_assignors,
    check_joining,
)
from kcoord.coordinator.group.consumer.client_computation import ComputedBy
from kcoord.coordinator.group.consumer.group import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    NO_METADATA,
    Assignment,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
    GroupSettings,
    MemberState,
    TargetMetadata,
    metadata_bytes,
    offer_of,
)
from kcoord.coordinator.group.consumer.removal import find_member
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.group import GroupTimer, cancel_member_timers, rebalance_timer, session_timer
from kcoord.coordinator.group.records import EpochReason, TombstoneReason
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    Cancel,
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Schedule,
    Task,
    TimerKey,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest


@dataclass(slots=True)
class MemberTransition:
    """The steps of one heartbeat, the records that they append, and the member's part of the target.

    `predecessor` is the static member that this member replaces, under the same or another member id.
    `displaced` is the older self of this member if it replaces a member with another id; it is removed.
    `joins` is True if the request joins. `should_compute` is True if the member has to compute the next target.
    """

    config: BrokerConfig
    image: MetadataImage
    group: ConsumerGroup
    now_ms: int
    counters: GroupCounters
    joins: bool = True
    records: list[CoordinatorRecord] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    should_compute: bool = False
    target: Assignment = field(default_factory=dict)
    _new_metadata: TargetMetadata = NO_METADATA
    predecessor: ConsumerGroupMember | None = None
    displaced: ConsumerGroupMember | None = None

    @property
    def settings(self) -> GroupSettings:
        return GroupSettings(self.config, self.image, self.group.group_id)

    def check_size(self, member_id: str, instance_id: str | None) -> None:
        """Raises GROUP_MAX_SIZE_REACHED if the group is full and the member is new.

        A static member replaces the holder of its instance id, so a full group has room for it. Kafka refuses it.
        """
        group, limit = self.group, self.config.group_consumer_max_size
        has_place = member_id in group.members or instance_id in group.static_members
        if len(group.members) >= limit and not has_place:
            raise KafkaError(
                Errors.GROUP_MAX_SIZE_REACHED, f"Group {group.group_id} has its maximum of {limit} members."
            )

    def find_joining(self, member_id: str, instance_id: str | None, *, classic: bool) -> ConsumerGroupMember:
        """Returns the joining member: the present one or a new one. A static member inherits from its predecessor.

        Raises GROUP_MAX_SIZE_REACHED. Raises UNRELEASED_INSTANCE_ID if another member of the consumer protocol holds
        the instance id. A classic member has a new member id and fences the holder.
        """
        self.check_size(member_id, instance_id)
        group = self.group
        existing = group.static_member(instance_id) if instance_id is not None else None
        if existing is None:
            return group.members.get(member_id) or ConsumerGroupMember(member_id)
        if not classic and existing.classic is None and existing.member_epoch != LEAVE_GROUP_STATIC_MEMBER_EPOCH:
            raise KafkaError(
                Errors.UNRELEASED_INSTANCE_ID,
                f"Static member {member_id} with instance id {instance_id} cannot join the group because the instance "
                f"id is owned by {existing.member_id} member.",
            )
        self.predecessor = existing
        if existing.member_id != member_id:
            self.displaced = group.members.get(member_id)
        epoch = self._epoch_of_classic_successor(existing) if classic else 0
        return replace(existing, member_id=member_id, member_epoch=epoch, previous_member_epoch=0)

    def _epoch_of_classic_successor(self, existing: ConsumerGroupMember) -> int:
        """Returns the group's assignment epoch, or the predecessor's epoch if that has not reached its target.

        A STABLE member at the assignment epoch is never reconciled again, so it would keep a wrong assignment.
        """
        target = self.group.target_assignment_of(existing.member_id)
        assigned = {topic_id: frozenset(partitions) for topic_id, partitions in existing.assigned.items()}
        is_behind = existing.state is MemberState.STABLE and assigned != target
        return max(existing.member_epoch, 0) if is_behind else self.group.assignment_epoch

    def advance(
        self, member: ConsumerGroupMember, updated: ConsumerGroupMember, owned: OwnedPartitions | None
    ) -> ConsumerGroupMember:
        """Runs all steps and returns the member after them.

        `owned` are the partitions that the request lists as owned; None if the request has no list.
        """
        # 1. The member, and what changed in its subscription. Most heartbeats change nothing.
        reason, subscription_changed = None, False
        if updated is not member or self.predecessor is not None or member.member_id not in self.group.members:
            reason, subscription_changed = self._update_subscription(member, updated)
        # 2. The group epoch.
        group_epoch = self._group_epoch(member, updated, reason)
        # 3. The target assignment, at most once per assignment interval.
        target_epoch, self.target = self._advance_target(updated, group_epoch)
        # 4. The member's next step towards its target.
        return self._reconcile(updated, target_epoch, owned, subscription_changed)

    # 1. The member.

    def _update_subscription(
        self, member: ConsumerGroupMember, updated: ConsumerGroupMember
    ) -> tuple[EpochReason | None, bool]:
        """Records the member. Returns why the group epoch grows, and whether the subscribed topics changed."""
        bump = updated.subscribed_topic_names != member.subscribed_topic_names or self.displaced is not None
        regex_changed, regex_bump = self._update_regex(member, updated)
        if regex_changed or self.displaced is not None:
            self._drop_regexes(member, updated)
        if self.predecessor is not None:
            self._replace_static_member(member, updated)
        else:
            self.records.append(records.new_member_subscription_record(self.group.group_id, updated))
        reason = EpochReason.SUBSCRIPTION if bump or regex_bump else None
        if reason is None and self._changes_assignor(member, updated):
            reason = EpochReason.ASSIGNOR
        if reason is None and self._changes_rack(member, updated):
            reason = EpochReason.RACK
        return reason, bump or regex_changed

    def _update_regex(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> tuple[bool, bool]:
        """Returns whether the regular expression changed, and whether that changes the subscribed topics at once."""
        old, new = member.subscribed_topic_regex or "", updated.subscribed_topic_regex or ""
        if old == new:
            return False, False
        group = self.group
        if new and not group.regex_subscribers(new):
            regex.validate(new)
        bump = bool(new) and new in group.resolved_regexes
        if old and old in group.resolved_regexes:
            bump = bump or bool(group.resolved_regexes[old].topics)
        return True, bump

    def _drop_regexes(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> None:
        """Deletes resolved regular expressions to which no member subscribes any more."""
        group = self.group
        left = [former.subscribed_topic_regex for former in (member, self.displaced) if former is not None]
        for old in dict.fromkeys(left):
            if not old or old == updated.subscribed_topic_regex or old not in group.resolved_regexes:
                continue
            if group.regex_subscribers(old) == left.count(old):
                self.records.append(
                    records.new_regular_expression_tombstone(group.group_id, old, TombstoneReason.UNSUBSCRIBED)
                )

    def _replace_static_member(self, copy: ConsumerGroupMember, updated: ConsumerGroupMember) -> None:
        predecessor = self.predecessor
        assert predecessor is not None
        group_id = self.group.group_id
        if predecessor.member_id != copy.member_id:
            self.records += records.new_member_tombstones(group_id, predecessor.member_id, TombstoneReason.REPLACED)
            target = self.group.target_assignment_of(predecessor.member_id)
            metadata = self.group.target_metadata_of(predecessor.member_id)
            self.records.append(records.new_member_subscription_record(group_id, updated))
            self.records.append(records.new_target_assignment_record(group_id, updated.member_id, target, metadata))
            self.records.append(records.new_current_assignment_record(group_id, updated))
        elif updated is not copy:
            self.records.append(records.new_member_subscription_record(group_id, updated))

    # 2. The group epoch.

    def _changes_assignor(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> bool:
        """True if the member changes its client-side assignors, or which server-side assignor most members ask for.

        Since Kafka 4.4 the latter starts a new group epoch, unless the member joins by the classic protocol.
        """
        if updated.client_assignors is not member.client_assignors and asks_for_an_assignment(
            member.client_assignors, updated.client_assignors
        ):
            return True
        if updated.classic is not None and self._changes_user_data(member, updated):
            return True
        is_unchanged = updated is member and member.member_id in self.group.members
        if is_unchanged or updated.classic is not None or not self.config.is_kafka_4_4:
            return False
        assignors = self.config.consumer_assignors
        present = self.group.preferred_server_assignor(assignors)
        return self.group.preferred_server_assignor(assignors, changed=updated) != present

    def _changes_user_data(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> bool:
        """True if a classic member rejoins of its own accord to give other user data to client-side assignors.

        A member that has to rejoin is behind the group epoch. The user data of sticky assignors has what the member
        owned up to now. A new epoch for that would make it rejoin without an end.
        """
        if updated is member or member.classic is None or updated.classic is None:
            return False
        group = self.group
        if not group.has_client_assignors or not member.is_reconciled_to(group.group_epoch):
            return False
        old, new = member.classic.protocols, updated.classic.protocols
        return old != new and _user_data(old) != _user_data(new)

    def _changes_rack(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> bool:
        """True if the member changes its rack and the group's assignor looks at racks. Kafka's assignors do not."""
        if updated.rack_id == member.rack_id:
            return False
        return needs_racks(self.group.preferred_server_assignor(self.config.consumer_assignors, changed=updated))

    def _group_epoch(
        self, member: ConsumerGroupMember, updated: ConsumerGroupMember, reason: EpochReason | None
    ) -> int:
        """Returns the group epoch after this heartbeat and appends its record if it grows.

        `reason` is what the member changed; None if the change does not raise the epoch.

        A new group starts at 1. Its first subscription adds 1 (observed in Kafka 4.3.1), and so does its first
        assignor if that is not the default (observed in Kafka 4.4.0).
        """
        group = self.group
        bump = reason is not None
        epoch = group.group_epoch
        new_hash = group.metadata_hash
        reason = EpochReason.JOIN if group.replaced_by(member) is None else reason or EpochReason.METADATA
        if bump or group.metadata_stale:
            new_hash = metadata_hash(self.image, group.subscribed_topic_names(changed=updated))
            if new_hash == group.metadata_hash:
                group.metadata_stale = False
            elif epoch:
                bump = True
        if epoch == 0:
            epoch += 1
            self.records.append(records.next_group_epoch_record(group, epoch + bump, new_hash, reason))
        elif bump:
            self.records.append(records.next_group_epoch_record(group, epoch + 1, new_hash, reason))
        return epoch + bump

    # 3. The target assignment.

    def _advance_target(self, updated: ConsumerGroupMember, group_epoch: int) -> tuple[int, Assignment]:
        """Returns the epoch of the target and the member's part of it: of a new target, if it is time for one."""
        group, interval_ms = self.group, self.settings.assignment_interval_ms
        present = (group.assignment_epoch, self._present_target(updated))
        if group_epoch <= group.assignment_epoch or self.now_ms < group.assignment_timestamp_ms + interval_ms:
            return present
        is_enabled = self.config.kcoord_client_assignors_enable
        if is_enabled and (updated.client_assignors or group.has_client_assignors):
            decision = self._decide(updated, group_epoch)
            if decision in (ComputedBy.THIS_MEMBER, ComputedBy.OTHER_MEMBER):
                return present if group.assignment_epoch else self._empty_target(updated, group_epoch)
            if decision is ComputedBy.FALLBACK:
                self._new_metadata = TargetMetadata(client_computation.FALLBACK_ERROR)
        work = ComputeTarget(group.group_id, self._new_metadata)
        task = Task(TimerKey(GroupTimer.COMPUTE_TARGET, group.group_id), work)
        assignor = group.preferred_server_assignor(self.config.consumer_assignors, changed=updated)
        if assignor not in ASSIGNORS:
            failed = group.failed_computations
            if failed is None or failed.assignor != assignor or self.now_ms >= failed.retry_at_ms:
                self.tasks.append(task)
            return present if group.assignment_epoch else self._empty_target(updated, group_epoch)
        if self.settings.assignor_offload_enable and takes_long(
            group, assignor, self.image, updated, interval_ms, self.config.kcoord_assignor_inline_ms
        ):
            self.tasks.append(task)
            return present
        return group_epoch, self._new_target(updated, assignor, group_epoch)

    def _decide(self, updated: ConsumerGroupMember, group_epoch: int) -> ComputedBy:
        """Returns who computes the target. If this member does, its response says so, and its time begins."""
        decision = client_computation.decide(
            self.group,
            updated,
            group_epoch,
            self.now_ms,
            self.counters,
            joins=self.joins,
            falls_back=self.settings.client_assignor_falls_back,
        )
        self.should_compute = decision is ComputedBy.THIS_MEMBER
        return decision

    def _empty_target(self, updated: ConsumerGroupMember, group_epoch: int) -> tuple[int, Assignment]:
        """Records an empty first target one epoch before the group's, so that the member has an epoch above 0.

        Its time is 0, so the assignment interval does not delay the first real target.
        """
        target_epoch = max(group_epoch - 1, 1)
        group_id = self.group.group_id
        self.records.append(records.new_target_assignment_record(group_id, updated.member_id, {}))
        self.records.append(records.next_assignment_epoch_record(group_id, target_epoch, group_epoch, 0))
        return target_epoch, {}

    def _present_target(self, updated: ConsumerGroupMember) -> Assignment:
        source = self.group.replaced_by(updated)
        return {} if source is None else self.group.target_assignment_of(source.member_id)

    def _new_target(self, updated: ConsumerGroupMember, assignor: str, group_epoch: int) -> Assignment:
        work = target_input(self.group, group_epoch, assignor, self.image, updated, self._new_metadata)
        computed = compute(work)
        self.records += computed.records
        self.records.append(
            records.next_assignment_epoch_record(work.group_id, work.group_epoch, group_epoch, self.now_ms)
        )
        return computed.changed.get(updated.member_id, work.target_of(updated.member_id))

    # 4. The member's next step.

    def _reconcile(
        self,
        updated: ConsumerGroupMember,
        target_epoch: int,
        owned: OwnedPartitions | None,
        subscription_changed: bool,
    ) -> ConsumerGroupMember:
        if not subscription_changed and updated.is_reconciled_to(target_epoch):
            reconciled = updated
        else:
            metadata = NO_METADATA
            if target_epoch > self.group.assignment_epoch:
                metadata = self._new_metadata
            elif self.group.target_metadata:
                metadata = self._present_metadata(updated)
            reconciled = CurrentAssignmentBuilder(
                updated,
                target_epoch,
                self.target,
                metadata,
                self.group.owners_of,
                topic_ids_of(updated, self.group.resolved_regexes, self.image),
                subscription_changed,
                owned,
            ).build()
        if reconciled is not updated:
            self._check_step(updated, reconciled, target_epoch)
            self.records.append(records.new_current_assignment_record(self.group.group_id, reconciled))
        return reconciled

    def _present_metadata(self, updated: ConsumerGroupMember) -> TargetMetadata:
        source = self.group.replaced_by(updated)
        return NO_METADATA if source is None else self.group.target_metadata_of(source.member_id)

    def _check_step(self, before: ConsumerGroupMember, after: ConsumerGroupMember, target_epoch: int) -> None:
        """Asserts the invariants of a member's step."""
        epoch = before.member_epoch
        assert min(epoch, target_epoch) <= after.member_epoch <= max(epoch, target_epoch), (
            f"G-3: member {after.member_id} goes from epoch {epoch} to {after.member_epoch}, with target {target_epoch}"
        )
        for topic_id, partitions in after.assigned.items():
            kept = before.assigned.get(topic_id, {})
            if not partitions.keys() <= kept.keys() and (owners := self.group.owners_of(topic_id)):
                gained = set(partitions).difference(kept, before.pending_revocation.get(topic_id, {}))
                of_others = gained & owners.keys()
                assert not of_others, (
                    f"G-4: member {after.member_id} gets partition {min(of_others)} of member {owners[min(of_others)]}"
                )
            assert partitions.keys().isdisjoint(after.pending_revocation.get(topic_id, {})), (
                f"G-5: member {after.member_id} has partitions both assigned and pending revocation"
            )


def _user_data(protocols: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    return [(name, consumer_protocol.read_user_data(metadata)) for name, metadata in protocols]


_UNCHANGED: Final = (None, None, None)
_BLANK: Final = "".join(map(chr, range(33)))
"""The characters that Kafka strips from a text before it checks whether the text is empty."""


def validate_request(request: ConsumerGroupHeartbeatRequest, api_version: int, config: BrokerConfig) -> None:
    """Checks the fields that need no state, in Kafka's order; raises INVALID_REQUEST or UNSUPPORTED_ASSIGNOR.

    In version 0 the coordinator makes the id of a joining member; from version 1 the member makes it (KIP-1082).
    """
    epoch = request.member_epoch
    needs_id = api_version >= 1 or epoch > JOIN_GROUP_EPOCH or epoch == LEAVE_GROUP_MEMBER_EPOCH
    if needs_id and not request.member_id.strip(_BLANK):
        raise _invalid("MemberId can't be empty.")
    if not request.group_id.strip(_BLANK):
        raise _invalid("GroupId can't be empty.")
    if request.instance_id is not None and not request.instance_id.strip(_BLANK):
        raise _invalid("InstanceId can't be empty.")
    if request.rack_id is not None and not request.rack_id.strip(_BLANK):
        raise _invalid("RackId can't be empty.")
    if epoch == JOIN_GROUP_EPOCH:
        if request.rebalance_timeout_ms <= 0:
            raise _invalid("RebalanceTimeoutMs must be provided in first request.")
        if request.topic_partitions is None or request.topic_partitions:
            raise _invalid("TopicPartitions must be empty when (re-)joining.")
        if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
            raise _invalid("Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.")
    elif epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH and request.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif epoch < LEAVE_GROUP_STATIC_MEMBER_EPOCH:
        raise _invalid("MemberEpoch is invalid.")
    if request.client_assignors:
        if request.server_assignor is not None:
            raise _invalid("ServerAssignor and ClientAssignors can't both be set.")
        assignors = records.client_assignors_from(request.client_assignors)
        check_client_assignors(assignors, config.kcoord_client_assignor_metadata_max_bytes)
    supported = config.consumer_assignors
    if request.server_assignor is not None and request.server_assignor not in supported:
        raise KafkaError(
            Errors.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: {', '.join(supported)}.",
        )


def _invalid(text: str) -> KafkaError:
    return KafkaError(Errors.INVALID_REQUEST, text)


@dataclass(slots=True)
class ConsumerHeartbeat:
    """One heartbeat of one member, from request to result.

    `conversion` has the records and timers that replace a classic group of the same id, if there was one.
    """

    config: BrokerConfig
    image: MetadataImage
    group: ConsumerGroup
    context: OperationContext
    request: ConsumerGroupHeartbeatRequest
    conversion: CoordinatorResult[object]
    counters: GroupCounters
    _transition: MemberTransition = field(init=False)

    def run(self) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """Finds the member, updates it from the request, and runs the steps of `MemberTransition`."""
        joins = self.request.member_epoch == JOIN_GROUP_EPOCH
        self._transition = MemberTransition(
            self.config, self.image, self.group, self.context.now_ms, self.counters, joins
        )
        member = self._find_member()
        updated = self._update_member(member)
        if updated.client_assignors != member.client_assignors:
            self._check_client_assignors(member, updated)
        owned = _owned_partitions(self.request)
        return self._result(member, self._transition.advance(member, updated, owned), owned)

    def _find_member(self) -> ConsumerGroupMember:
        request = self.request
        member_id = request.member_id or self.context.candidate_id
        if request.member_epoch == JOIN_GROUP_EPOCH:
            return self._transition.find_joining(member_id, request.instance_id, classic=False)
        member = find_member(self.group, member_id, request.instance_id)
        self._check_epoch(member)
        return member

    def _check_epoch(self, member: ConsumerGroupMember) -> None:
        """Raises FENCED_MEMBER_EPOCH unless the request has the member's epoch.

        The previous epoch is accepted too if the owned partitions show that the member only missed a response. The
        previous epoch of a static member that has left is above its epoch, -2.
        """
        received, expected = self.request.member_epoch, member.member_epoch
        if received == expected:
            return
        owned = _owned_partitions(self.request)
        has_missed_response = received == member.previous_member_epoch < expected
        if has_missed_response and owned is not None and _is_subset(owned, member.assigned):
            return
        relation = "greater" if received > expected else "smaller"
        raise KafkaError(
            Errors.FENCED_MEMBER_EPOCH,
            f"The consumer group member has a {relation} member epoch ({received}) than the one known by the group "
            f"coordinator ({expected}). The member must abandon all its partitions and rejoin.",
        )

    def _update_member(self, member: ConsumerGroupMember) -> ConsumerGroupMember:
        """Returns the member with the fields of the request; the same object if nothing changes."""
        request, context = self.request, self.context
        client_assignors = member.client_assignors
        if client_assignors or request.client_assignors is not None:
            client_assignors = self._client_assignors_of(member)
        # Most heartbeats change nothing. Making a copy only to compare it would be a tenth of their cost.
        if (
            (request.subscribed_topic_names, request.subscribed_topic_regex, request.server_assignor) == _UNCHANGED
            and request.rebalance_timeout_ms == -1
            and request.instance_id in (None, member.instance_id)
            and request.rack_id in (None, member.rack_id)
            and client_assignors is member.client_assignors
            and (context.client_id, context.client_host) == (member.client_id, member.client_host)
            and member.classic is None
        ):
            return member
        names, server_assignor = request.subscribed_topic_names, request.server_assignor
        if server_assignor is None and not request.client_assignors:
            server_assignor = member.server_assignor
        updated = member.with_subscription(
            instance_id=member.instance_id if request.instance_id is None else request.instance_id,
            rack_id=member.rack_id if request.rack_id is None else request.rack_id,
            client_id=context.client_id,
            client_host=context.client_host,
            subscribed_topic_names=member.subscribed_topic_names if names is None else tuple(sorted(set(names))),
            subscribed_topic_regex=(
                member.subscribed_topic_regex
                if request.subscribed_topic_regex is None
                else request.subscribed_topic_regex
            ),
            server_assignor=server_assignor,
            client_assignors=client_assignors,
            rebalance_timeout_ms=(
                member.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms
            ),
            classic=None,
        )
        return member if updated == member else updated

    def _client_assignors_of(self, member: ConsumerGroupMember) -> tuple[ClientAssignor, ...]:
        """Returns the client-side assignors after this request. Null means none in a join, and no change otherwise.

        A server assignor replaces them. The member loses them if they are switched off since they were recorded.
        """
        request = self.request
        if request.client_assignors is not None:
            return records.client_assignors_from(request.client_assignors)
        keeps = request.member_epoch != JOIN_GROUP_EPOCH and request.server_assignor is None
        return member.client_assignors if keeps and self.config.kcoord_client_assignors_enable else ()

    def _check_client_assignors(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> None:
        """Raises POLICY_VIOLATION if the group's metadata grows too large, and UNSUPPORTED_ASSIGNOR."""
        group, limit = self.group, self.config.kcoord_client_assignor_group_metadata_max_bytes
        replaced = group.replaced_by(member)
        size = group.client_assignor_bytes - metadata_bytes(replaced) + metadata_bytes(updated)
        if size > limit and size > group.client_assignor_bytes:
            raise KafkaError(
                Errors.POLICY_VIOLATION,
                f"The members of group {group.group_id} would give {size} bytes to client assignors, more than "
                f"kcoord.client.assignor.group.metadata.max.bytes={limit}.",
            )
        offer = offer_of(updated)
        if offer is not None:
            offers = group.offers(changed=updated)
            offers[offer] -= 1
            check_joining(+offers, offer)

    def _result(
        self, member: ConsumerGroupMember, reconciled: ConsumerGroupMember, owned: OwnedPartitions | None
    ) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        group, now_ms = self.group, self.context.now_ms
        settings, predecessor = self._transition.settings, self._transition.predecessor
        response = ConsumerGroupHeartbeatResponse(
            member_id=reconciled.member_id,
            member_epoch=reconciled.member_epoch,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            group_creation_time_ms=group.creation_time_ms,
        )
        if reconciled.client_assignors:
            response.should_compute_assignment = self._transition.should_compute
            response.assignment = self._assignment_with_metadata(member, reconciled, owned)
        elif self._is_full(owned) or reconciled.assigned != member.assigned or self._has_missed(member, owned):
            response.assignment = _assignment(reconciled.assigned)
        result = CoordinatorResult(
            response,
            self.conversion.records + self._transition.records,
            list(self.conversion.timers),
            completions=self.conversion.completions,
            is_refusable=not self.conversion.records,
            is_of_group=True,
        )
        if self._transition.displaced is not None or member.classic is not None:
            # The timers of a classic member would remove it, since it sends no JoinGroup or SyncGroup any more.
            result.timers += cancel_member_timers(group.group_id, reconciled.member_id)
        session = session_timer(group.group_id, reconciled.member_id)
        result.timers.append(Schedule(session, now_ms + settings.session_timeout_ms))
        if predecessor is not None and predecessor.member_id != reconciled.member_id:
            result.timers += cancel_member_timers(group.group_id, predecessor.member_id)
        if reconciled.state is MemberState.UNREVOKED_PARTITIONS:
            if member.state is not reconciled.state or member.pending_revocation != reconciled.pending_revocation:
                rebalance = rebalance_timer(group.group_id, reconciled.member_id)
                result.timers.append(Schedule(rebalance, now_ms + reconciled.rebalance_timeout_ms))
        elif member.state is MemberState.UNREVOKED_PARTITIONS:
            result.timers.append(Cancel(rebalance_timer(group.group_id, reconciled.member_id)))
        if self._transition.should_compute:
            result.timers.append(client_computation.deadline(group))
        result.tasks += self._transition.tasks
        result.tasks += self._regex_tasks(reconciled)
        return result

    def _assignment_with_metadata(
        self, member: ConsumerGroupMember, reconciled: ConsumerGroupMember, owned: OwnedPartitions | None
    ) -> ConsumerGroupHeartbeatResponse.Assignment | None:
        """Returns what a member with client-side assignors has to know; None if it knows that already.

        Its assignors learn each epoch, and what else the member will get, so the response has its assignment more often
        than that of other members.
        """
        before = self.group.replaced_by(member)
        reported = {} if before is None else self._pending(self.group.target_assignment_of(before.member_id), before)
        pending = self._pending(self._transition.target, reconciled)
        if not (
            self._is_full(owned)
            or reconciled.assigned != member.assigned
            or reconciled.member_epoch != self.request.member_epoch
            or pending != reported
            or self._has_missed(member, owned)
        ):
            return None
        assignment = _assignment(reconciled.assigned)
        assignment.pending_topic_partitions = [
            ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=sorted(partitions))
            for topic_id, partitions in sorted(pending.items())
        ]
        assignment.error = reconciled.metadata.error
        assignment.metadata_version = reconciled.metadata.version
        assignment.metadata_bytes = reconciled.metadata.data
        # The group knows the assignor of its present target only, so a member that is behind does not get a name.
        if reconciled.member_epoch == self.group.assignment_epoch:
            assignment.assignor_name = self.group.target_assignor
        return assignment

    def _pending(self, target: Assignment, member: ConsumerGroupMember) -> Assignment:
        """Returns the partitions of the target, of topics that the member subscribes to, which it does not have yet."""
        topic_ids = topic_ids_of(member, self.group.resolved_regexes, self.image)
        missing = {
            topic_id: partitions - member.assigned.get(topic_id, {}).keys()
            for topic_id, partitions in target.items()
            if topic_id in topic_ids
        }
        return {topic_id: partitions for topic_id, partitions in missing.items() if partitions}

    def _is_full(self, owned: OwnedPartitions | None) -> bool:
        """True if the member joins, or repeats all its fields after an error.

        The response then has its assignment even if that is unchanged.
        """
        request = self.request
        return request.member_epoch == JOIN_GROUP_EPOCH or (
            owned is not None
            and request.rebalance_timeout_ms != -1
            and (request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None)
        )

    def _has_missed(self, member: ConsumerGroupMember, owned: OwnedPartitions | None) -> bool:
        """True if the member missed an assignment because the response was lost.

        This happens if a join was sent twice and the second one arrived first. The member then sends an older epoch
        and does not list the assigned partitions. Kafka leaves it without them until the next rebalance.
        """
        if owned is None or self.request.member_epoch == member.member_epoch:
            return False
        return any(
            not partitions.keys() <= owned.get(topic_id, frozenset())
            for topic_id, partitions in member.assigned.items()
        )

    def _regex_tasks(self, updated: ConsumerGroupMember) -> list[Task]:
        group = self.group
        regexes = set(group.regexes)
        if updated.subscribed_topic_regex:
            regexes.add(updated.subscribed_topic_regex)
        if not regexes:
            return []
        due_ms = group.regex_refreshed_at_ms + self.config.group_consumer_regex_refresh_interval_ms
        if not (group.regex_stale or self.context.now_ms >= due_ms or not regexes <= group.resolved_regexes.keys()):
            return []
        work = regex.ResolveRegex(group.group_id, tuple(sorted(regexes)), self.image.epoch, self.context.describable)
        return [Task(TimerKey(GroupTimer.RESOLVE_REGEX, group.group_id), work)]


def _owned_partitions(request: ConsumerGroupHeartbeatRequest) -> OwnedPartitions | None:
    if request.topic_partitions is None:
        return None
    return owned_by_topic((topic.topic_id, topic.partitions) for topic in request.topic_partitions)


def _is_subset(owned: OwnedPartitions, assigned: EpochAssignment) -> bool:
    return all(partitions <= assigned.get(topic_id, {}).keys() for topic_id, partitions in owned.items())


def _assignment(assigned: EpochAssignment) -> ConsumerGroupHeartbeatResponse.Assignment:
    shared: dict[int, list[int]] = {}
    topics = [
        ConsumerGroupHeartbeatResponse.TopicPartitions(
            topic_id=topic_id, partitions=shared.get(id(epochs)) or shared.setdefault(id(epochs), sorted(epochs))
        )
        for topic_id, epochs in sorted(assigned.items())
    ]
    return ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=topics)
