# SPDX-License-Identifier: Apache-2.0
"""What one heartbeat of a member, or a classic member's JoinGroup, does to its consumer group, step by step.

KIP-848 Heartbeat Processing: the member, the group epoch, the target assignment, the member's next step. Each step
reads the group and appends records; `updated` is the member as it will be, long before they are replayed.
`MemberTransition` has the steps that both protocols share. `ConsumerHeartbeat` serves a member of the consumer protocol
that joins or stays (ConsumerGroupHeartbeat API). Check order and epochs are as observed in Kafka 4.3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records, regex
from kcoord.coordinator.group.consumer.assignment import (
    ComputeTarget,
    CurrentAssignmentBuilder,
    OwnedPartitions,
    compute,
    epoch_record,
    metadata_hash,
    takes_long,
    target_input,
    topic_ids_of,
)
from kcoord.coordinator.group.consumer.group import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    Assignment,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
    GroupSettings,
    MemberState,
)
from kcoord.coordinator.group.consumer.removal import find_member
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
    """`predecessor` is the static member whose place the member takes, under the same or another member id.

    `displaced` is what the member itself was in this group before, if it takes the place of another: that ends.
    """

    config: BrokerConfig
    image: MetadataImage
    group: ConsumerGroup
    now_ms: int
    records: list[CoordinatorRecord] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    predecessor: ConsumerGroupMember | None = None
    displaced: ConsumerGroupMember | None = None

    @property
    def settings(self) -> GroupSettings:
        return GroupSettings(self.config, self.image, self.group.group_id)

    def check_size(self, member_id: str, instance_id: str | None) -> None:
        """Raises GROUP_MAX_SIZE_REACHED for one more member than the group may have.

        A static member takes the place that its instance id has, so a full group has room for it. Kafka refuses it.
        """
        group, limit = self.group, self.config.group_consumer_max_size
        has_place = member_id in group.members or instance_id in group.static_members
        if len(group.members) >= limit and not has_place:
            raise KafkaError(
                Errors.GROUP_MAX_SIZE_REACHED, f"Group {group.group_id} has its maximum of {limit} members."
            )

    def find_joining(self, member_id: str, instance_id: str | None, *, classic: bool) -> ConsumerGroupMember:
        """The member that joins, as it is or as a new one; a static member takes over what its instance id has.

        Raises GROUP_MAX_SIZE_REACHED, and UNRELEASED_INSTANCE_ID while a member of the consumer protocol holds the
        instance id and a second one asks for it. A classic member asks with an id that is new, and fences the holder.
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
        """The group's assignment epoch, unless the predecessor has not got as far: a member at that epoch that seems to
        be settled would neither be asked to give anything up nor be given anything.
        """
        target = self.group.target_assignment_of(existing.member_id)
        assigned = {topic_id: frozenset(partitions) for topic_id, partitions in existing.assigned.items()}
        is_behind = existing.state is MemberState.STABLE and assigned != target
        return max(existing.member_epoch, 0) if is_behind else self.group.assignment_epoch

    def advance(
        self, member: ConsumerGroupMember, updated: ConsumerGroupMember, owned: OwnedPartitions | None
    ) -> ConsumerGroupMember:
        """All steps; returns the member as it is after them. `owned` is what it says it owns, None where it did not."""
        group = self.group
        # 1. The member, and what changed in its subscription.
        bump = updated.subscribed_topic_names != member.subscribed_topic_names or self.displaced is not None
        regex_changed, regex_bump = self._update_regex(member, updated)
        if regex_changed or self.displaced is not None:
            self._drop_regexes(member, updated)
        if self.predecessor is not None:
            self._replace_static_member(member, updated)
        elif updated is not member or member.member_id not in group.members:
            self.records.append(records.new_member_subscription_record(group.group_id, updated))
        # 2. The group epoch.
        reason = EpochReason.SUBSCRIPTION if bump or regex_bump else None
        if reason is None and self._changes_assignor(member, updated):
            reason = EpochReason.ASSIGNOR
        group_epoch = self._group_epoch(member, updated, reason)
        # 3. The target assignment, at most once per assignment interval.
        target_epoch, target = group.assignment_epoch, self._present_target(updated)
        interval_ms = self.settings.assignment_interval_ms
        if group_epoch > target_epoch and self.now_ms >= group.assignment_timestamp_ms + interval_ms:
            if self.settings.assignor_offload_enable and takes_long(
                group, self.image, updated, interval_ms, self.config.kcoord_assignor_inline_ms
            ):
                key = TimerKey(GroupTimer.COMPUTE_TARGET, group.group_id)
                self.tasks.append(Task(key, ComputeTarget(group.group_id)))
            else:
                target_epoch, target = group_epoch, self._new_target(updated, group_epoch)
        # 4. The member's next step towards it.
        return self._reconcile(updated, target_epoch, target, owned, bump or regex_changed)

    # 1. The member.

    def _update_regex(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> tuple[bool, bool]:
        """Whether the regular expression changed, and whether that changes the subscribed topics at once."""
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
        """What is known of regular expressions that nobody subscribes to any more goes."""
        group = self.group
        left = [one.subscribed_topic_regex for one in (member, self.displaced) if one is not None]
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
            self.records.append(records.new_member_subscription_record(group_id, updated))
            self.records.append(records.new_target_assignment_record(group_id, updated.member_id, target))
            self.records.append(records.new_current_assignment_record(group_id, updated))
        elif updated is not copy:
            self.records.append(records.new_member_subscription_record(group_id, updated))

    # 2. The group epoch.

    def _changes_assignor(self, member: ConsumerGroupMember, updated: ConsumerGroupMember) -> bool:
        """True if the member makes another assignor the one that most members ask for.

        Since Kafka 4.4 that starts a new group epoch, unless the member joins by the classic protocol.
        """
        is_known = updated is member and member.member_id in self.group.members
        if is_known or updated.classic is not None or not self.config.is_kafka_4_4:
            return False
        assignors = self.config.consumer_assignors
        present = self.group.preferred_server_assignor(assignors)
        return self.group.preferred_server_assignor(assignors, changed=updated) != present

    def _group_epoch(
        self, member: ConsumerGroupMember, updated: ConsumerGroupMember, reason: EpochReason | None
    ) -> int:
        """Returns the group epoch after this heartbeat and appends its record if it grows.

        `reason` is what the member changed, None if nothing that matters to the group.

        A new group starts at 1, and the first subscription counts on top of that (observed in Kafka 4.3.1). So does
        the first assignor if it is not the default (observed in Kafka 4.4.0).
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
            self._append_epoch(epoch + bump, new_hash, reason)
        elif bump:
            self._append_epoch(epoch + 1, new_hash, reason)
        return epoch + bump

    def _append_epoch(self, epoch: int, new_hash: int, reason: EpochReason) -> None:
        group = self.group
        self.records.append(
            records.new_group_epoch_record(group.group_id, epoch, new_hash, group.creation_time_ms, reason)
        )

    # 3. The target assignment.

    def _present_target(self, updated: ConsumerGroupMember) -> Assignment:
        source = self.group.replaced_by(updated)
        return {} if source is None else self.group.target_assignment_of(source.member_id)

    def _new_target(self, updated: ConsumerGroupMember, group_epoch: int) -> Assignment:
        name = self.group.preferred_server_assignor(self.config.consumer_assignors, changed=updated)
        work = target_input(self.group, group_epoch, name, self.image, updated)
        computed = compute(work)
        self.records += computed.records
        self.records.append(epoch_record(work, self.now_ms))
        return computed.changed.get(updated.member_id, work.target_of(updated.member_id))

    # 4. The member's next step.

    def _reconcile(
        self,
        updated: ConsumerGroupMember,
        target_epoch: int,
        target: Assignment,
        owned: OwnedPartitions | None,
        subscription_changed: bool,
    ) -> ConsumerGroupMember:
        if not subscription_changed and updated.is_reconciled_to(target_epoch):
            reconciled = updated
        else:
            reconciled = CurrentAssignmentBuilder(
                updated,
                target_epoch,
                target,
                self.group.is_partition_free,
                topic_ids_of(updated, self.group.resolved_regexes, self.image),
                subscription_changed,
                owned,
            ).build()
        if reconciled is not updated:
            self.records.append(records.new_current_assignment_record(self.group.group_id, reconciled))
        return reconciled


_NOTHING_SAID: Final = (None, None, None)
_BLANK: Final = "".join(map(chr, range(33)))
"""What Kafka takes off both ends of a text before it asks whether it is empty."""


def validate_request(request: ConsumerGroupHeartbeatRequest, api_version: int, assignors: Sequence[str]) -> None:
    """Check the fields that need no state, in Kafka's order; raises INVALID_REQUEST or UNSUPPORTED_ASSIGNOR.

    Version 0 lets a joining member leave its id to the coordinator; from version 1 the member makes it (KIP-1082).
    """
    epoch = request.member_epoch
    if (api_version >= 1 or epoch != JOIN_GROUP_EPOCH) and not request.member_id.strip(_BLANK):
        raise _invalid("MemberId can't be empty.")
    if not request.group_id.strip(_BLANK):
        raise _invalid("GroupId can't be empty.")
    if request.instance_id is not None and not request.instance_id.strip(_BLANK):
        raise _invalid("InstanceId can't be empty.")
    if request.rack_id is not None and not request.rack_id.strip(_BLANK):
        raise _invalid("RackId can't be empty.")
    if epoch == JOIN_GROUP_EPOCH:
        if request.rebalance_timeout_ms <= 0:
            given = request.rebalance_timeout_ms
            raise _invalid(f"RebalanceTimeoutMs must be provided in first request, above zero and not {given}.")
        if request.topic_partitions is None or request.topic_partitions:
            raise _invalid("TopicPartitions must be empty when (re-)joining.")
        if request.subscribed_topic_names is None and request.subscribed_topic_regex is None:
            raise _invalid("Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when (re-)joining.")
    elif epoch == LEAVE_GROUP_STATIC_MEMBER_EPOCH and request.instance_id is None:
        raise _invalid("InstanceId can't be null.")
    elif epoch < LEAVE_GROUP_STATIC_MEMBER_EPOCH:
        raise _invalid("MemberEpoch is invalid.")
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise KafkaError(
            Errors.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {request.server_assignor} is not supported. Supported assignors: {', '.join(assignors)}.",
        )


def _invalid(text: str) -> KafkaError:
    return KafkaError(Errors.INVALID_REQUEST, text)


@dataclass(slots=True)
class ConsumerHeartbeat:
    """One heartbeat of one member, from request to result. `conversion` is what made room for the group, if
    anything.
    """

    config: BrokerConfig
    image: MetadataImage
    group: ConsumerGroup
    context: OperationContext
    request: ConsumerGroupHeartbeatRequest
    conversion: CoordinatorResult[object]
    _transition: MemberTransition = field(init=False)

    def run(self) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """Find the member, say what is new about it, and let the group and the member advance."""
        self._transition = MemberTransition(self.config, self.image, self.group, self.context.now_ms)
        member = self._find_member()
        updated = self._update_member(member)
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
        """The member's epoch, or the previous one where its owned partitions show that it has only missed the
        answer.
        """
        received, known = self.request.member_epoch, member.member_epoch
        if received == known:
            return
        owned = _owned_partitions(self.request)
        if received == member.previous_member_epoch and owned is not None and _is_subset(owned, member.assigned):
            return
        relation = "greater" if received > known else "smaller"
        raise KafkaError(
            Errors.FENCED_MEMBER_EPOCH,
            f"The consumer group member has a {relation} member epoch ({received}) than the one known by the group "
            f"coordinator ({known}). The member must abandon all its partitions and rejoin.",
        )

    def _update_member(self, member: ConsumerGroupMember) -> ConsumerGroupMember:
        """The member with what the request says; the same object where it says nothing new."""
        request, context = self.request, self.context
        if (
            (request.subscribed_topic_names, request.subscribed_topic_regex, request.server_assignor) == _NOTHING_SAID
            and request.rebalance_timeout_ms == -1
            and request.instance_id in (None, member.instance_id)
            and request.rack_id in (None, member.rack_id)
            and (context.client_id, context.client_host) == (member.client_id, member.client_host)
            and member.classic is None
        ):
            return member  # most heartbeats: a copy to compare with would be a tenth of their cost
        names = request.subscribed_topic_names
        updated = replace(
            member,
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
            server_assignor=member.server_assignor if request.server_assignor is None else request.server_assignor,
            rebalance_timeout_ms=(
                member.rebalance_timeout_ms if request.rebalance_timeout_ms == -1 else request.rebalance_timeout_ms
            ),
            classic=None,
        )
        return member if updated == member else updated

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
        if self._is_full(owned) or reconciled.assigned != member.assigned or self._has_missed(member, owned):
            response.assignment = _assignment(reconciled.assigned)
        result = CoordinatorResult(
            response,
            self.conversion.records + self._transition.records,
            list(self.conversion.timers),
            completions=self.conversion.completions,
            is_refusable=not self.conversion.records,
        )
        if self._transition.displaced is not None:
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
        result.tasks += self._transition.tasks
        result.tasks += self._regex_tasks(reconciled)
        return result

    def _is_full(self, owned: OwnedPartitions | None) -> bool:
        """A member that joins, or repeats everything after an error, is told its assignment even if it is unchanged."""
        request = self.request
        return request.member_epoch == JOIN_GROUP_EPOCH or (
            owned is not None
            and request.rebalance_timeout_ms != -1
            and (request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None)
        )

    def _has_missed(self, member: ConsumerGroupMember, owned: OwnedPartitions | None) -> bool:
        """Whether the member is behind and has never been told of partitions it was given: the answer went astray, and
        it does not know so (a join that was sent twice, of which the second arrived first). Kafka leaves it without
        them until the next rebalance.
        """
        if owned is None or self.request.member_epoch == member.member_epoch:
            return False
        return any(
            not partitions.keys() <= owned.get(topic_id, frozenset())
            for topic_id, partitions in member.assigned.items()
        )

    def _regex_tasks(self, updated: ConsumerGroupMember) -> list[Task]:
        group = self.group
        wanted = set(group.regexes)
        if updated.subscribed_topic_regex:
            wanted.add(updated.subscribed_topic_regex)
        if not wanted:
            return []
        due_ms = group.regex_refreshed_at_ms + self.config.group_consumer_regex_refresh_interval_ms
        if not (group.regex_stale or self.context.now_ms >= due_ms or not wanted <= group.resolved_regexes.keys()):
            return []
        work = regex.ResolveRegex(group.group_id, tuple(sorted(wanted)), self.image.epoch)
        return [Task(TimerKey(GroupTimer.RESOLVE_REGEX, group.group_id), work)]


def _owned_partitions(request: ConsumerGroupHeartbeatRequest) -> OwnedPartitions | None:
    if request.topic_partitions is None:
        return None
    return {topic.topic_id: frozenset(topic.partitions) for topic in request.topic_partitions}


def _is_subset(owned: OwnedPartitions, assigned: EpochAssignment) -> bool:
    return all(partitions <= assigned.get(topic_id, {}).keys() for topic_id, partitions in owned.items())


def _assignment(assigned: EpochAssignment) -> ConsumerGroupHeartbeatResponse.Assignment:
    topics = [
        ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=topic_id, partitions=sorted(partitions))
        for topic_id, partitions in sorted(assigned.items())
    ]
    return ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=topics)
