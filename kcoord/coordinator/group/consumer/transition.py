# SPDX-License-Identifier: Apache-2.0
"""What one member's heartbeat, or a classic member's JoinGroup, does to its consumer group, step by step.

KIP-848 Heartbeat Processing: the member, the group epoch, the target assignment, the member's next step. Each step
reads the group and appends records; `updated` is the member as it will be, long before they are replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records, regex
from kcoord.coordinator.group.consumer.current_assignment import CurrentAssignmentBuilder, OwnedPartitions
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.consumer.member import (
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    Assignment,
    ConsumerGroupMember,
    MemberState,
)
from kcoord.coordinator.group.consumer.settings import GroupSettings
from kcoord.coordinator.group.consumer.target_assignment import (
    ComputeTarget,
    compute,
    epoch_record,
    takes_long,
    target_input,
    topic_ids_of,
)
from kcoord.coordinator.group.records import EpochReason, TombstoneReason
from kcoord.coordinator.group.timers import GroupTimer
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.topic_hash import metadata_hash
from kcoord.runtime.result import CoordinatorRecord, Task, TimerKey
from kcoord_protocol.errors import Errors, KafkaError


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
