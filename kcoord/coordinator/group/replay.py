# SPDX-License-Identifier: Apache-2.0
"""Applies coordinator records to a shard's groups and offsets: the only way in which hard state changes.

The same code runs live and when a log is loaded. It makes no decisions and rejects no record. A compacted log may lack
any superseded record. So a tombstone for something absent is ignored, and a group is created by its first record,
whichever that is. Replaying the same records once more, in the same order, gives the same state.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.coordinator.group import records
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.client_assignors import ClientComputation
from kcoord.coordinator.group.consumer.group import (
    NO_METADATA,
    ConsumerGroup,
    ConsumerGroupMember,
    MemberState,
    ResolvedRegularExpression,
)
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, CommittedOffsets
from kcoord.coordinator.group.offsets.transactional_offsets import OffsetKey, TransactionalOffsets
from kcoord.runtime.result import CoordinatorRecord, Producer
from kcoord_protocol.control_records import ControlRecordType
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    ControlRecordTypeSchema,
    EndTxnMarker,
    GroupImportKey,
    GroupImportValue,
    GroupMetadataKey,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetCommitValue,
)

_KNOWN_STATES = frozenset(MemberState)
_EXPIRED = records.TombstoneReason.EXPIRED.value
_OFFSET_DELETE = records.TombstoneReason.OFFSET_DELETE.value


class GroupReplay:
    """Replays records into the shard's `groups`, `offsets` and `pending` offsets of open transactions."""

    def __init__(self, groups: dict[str, Group], offsets: CommittedOffsets, pending: TransactionalOffsets) -> None:
        self._groups = groups
        self._offsets = offsets
        self._pending = pending
        self.imports: set[str] = set()
        """The groups whose offsets are not imported any more (`kcoord.coordinator.group.imports`)."""
        self.latest_creation_time_ms = -1
        self.counters = GroupCounters()
        self.computations: dict[str, ClientComputation] = {}
        """Soft: what members of groups compute whose first records are not replayed yet."""

    def apply(self, record: CoordinatorRecord) -> None:
        """Replays one record. Every record of a group changes its version, so that steady heartbeats end."""
        match record.key, record.value:
            case OffsetCommitKey() as key, (OffsetCommitValue() | None) as value:
                self._offset_commit(key, value, record.producer, record.ticket)
                if value is None:
                    self._count_tombstone(record.reason)
            case ConsumerGroupCurrentMemberAssignmentKey() as key, (
                ConsumerGroupCurrentMemberAssignmentValue() | None
            ) as value:
                self._current_assignment(key, value)
            case ConsumerGroupMetadataKey() as key, (ConsumerGroupMetadataValue() | None) as value:
                self._group_epoch(key, value)
            case ConsumerGroupMemberMetadataKey() as key, (ConsumerGroupMemberMetadataValue() | None) as value:
                self._member(key, value)
            case ConsumerGroupTargetAssignmentMemberKey() as key, (
                ConsumerGroupTargetAssignmentMemberValue() | None
            ) as value:
                self._target_assignment(key, value)
            case ConsumerGroupTargetAssignmentMetadataKey() as key, (
                ConsumerGroupTargetAssignmentMetadataValue() | None
            ) as value:
                self._target_assignment_epoch(key, value)
            case ConsumerGroupRegularExpressionKey() as key, (ConsumerGroupRegularExpressionValue() | None) as value:
                self._regular_expression(key, value)
            case GroupMetadataKey() as key, (GroupMetadataValue() | None) as value:
                self._classic_group(key, value)
            case GroupImportKey() as key, GroupImportValue():
                self.imports.add(key.group)
            case GroupImportKey() as key, None:
                self.imports.discard(key.group)
            case ControlRecordTypeSchema() as key, EndTxnMarker() if record.producer is not None:
                self._end_transaction(record.producer, committed=key.type == ControlRecordType.COMMIT)
            case _:
                # Record types of share and streams groups, which kcoord does not serve, and the superseded type 4.
                return

    def _count_tombstone(self, reason: str) -> None:
        """Counts a deleted offset. Only live records have a reason, so loading counts none."""
        if reason == _EXPIRED:
            self.counters.offset_expirations += 1
        elif reason == _OFFSET_DELETE:
            self.counters.offset_deletions += 1

    def _offset_commit(
        self, key: OffsetCommitKey, value: OffsetCommitValue | None, producer: Producer | None, ticket: int
    ) -> None:
        """Replays an offset commit. An offset of a transaction is pending until its marker."""
        if value is None:
            self._offsets.remove(key.group, key.topic, key.partition)
            if self._pending:
                self._pending.note(OffsetKey(key.group, key.topic, key.partition), None, producer)
            return
        self.counters.offset_commits += 1
        if key.group not in self._groups:
            self._groups[key.group] = ClassicGroup(key.group)
        offset = CommittedOffset(
            value.offset,
            value.leader_epoch,
            value.metadata,
            value.commit_timestamp,
            value.expire_timestamp,
            value.topic_id,
        )
        if producer is not None or self._pending:
            place = OffsetKey(key.group, key.topic, key.partition)
            if not self._pending.note(place, offset, producer, ticket):
                return
        self._offsets.put(key.group, key.topic, key.partition, offset)

    def _end_transaction(self, producer: Producer, *, committed: bool) -> None:
        for key, offset in self._pending.end(producer.producer_id, committed=committed):
            if key.group_id not in self._groups:
                self._groups[key.group_id] = ClassicGroup(key.group_id)
            self._offsets.put(*key, offset)

    def _group_epoch(self, key: ConsumerGroupMetadataKey, value: ConsumerGroupMetadataValue | None) -> None:
        if value is None:
            if (gone := self._present(key.group_id)) is not None:
                self._remove(gone)
            return
        group = self._consumer_group(key.group_id)
        self.counters.consumer_group_rebalances += value.epoch > group.group_epoch
        group.group_epoch = value.epoch
        group.metadata_hash = value.metadata_hash
        group.creation_time_ms = value.creation_time_ms
        group.empty_since_ms = records.empty_since_from(value)
        if records.is_migration(value):
            # The members keep their assignments, so no rebalance ends here.
            group.completed_epoch = value.epoch
        self.latest_creation_time_ms = max(self.latest_creation_time_ms, value.creation_time_ms)

    def _member(self, key: ConsumerGroupMemberMetadataKey, value: ConsumerGroupMemberMetadataValue | None) -> None:
        if value is None:
            if (present := self._present(key.group_id)) is not None:
                present.remove_member(key.member_id)
            return
        group = self._consumer_group(key.group_id)
        group.put_member(
            (group.members.get(key.member_id) or ConsumerGroupMember(key.member_id)).with_subscription(
                instance_id=value.instance_id,
                rack_id=value.rack_id,
                client_id=value.client_id,
                client_host=value.client_host,
                subscribed_topic_names=tuple(sorted(value.subscribed_topic_names)),
                subscribed_topic_regex=value.subscribed_topic_regex,
                server_assignor=value.server_assignor,
                client_assignors=records.client_assignors_from(value.client_assignors),
                rebalance_timeout_ms=value.rebalance_timeout_ms,
                classic=records.classic_metadata_from(value),
            )
        )

    def _current_assignment(
        self, key: ConsumerGroupCurrentMemberAssignmentKey, value: ConsumerGroupCurrentMemberAssignmentValue | None
    ) -> None:
        group = self._present(key.group_id) if value is None else self._consumer_group(key.group_id)
        member = group.members.get(key.member_id) if group is not None else None
        if value is None:
            if group is not None and member is not None:
                group.put_member(member.with_assignment(MemberState.STABLE, 0, 0, {}, {}, NO_METADATA))
            return
        assert group is not None
        group.put_member(
            (member or ConsumerGroupMember(key.member_id)).with_assignment(
                MemberState(value.state) if value.state in _KNOWN_STATES else MemberState.UNKNOWN,
                value.member_epoch,
                value.previous_member_epoch,
                records.epoch_assignment_from(value.assigned_partitions, value.member_epoch),
                records.epoch_assignment_from(value.partitions_pending_revocation, value.member_epoch),
                records.assignment_metadata_from(value),
            )
        )
        if group.is_converged and group.completed_epoch < group.group_epoch:
            group.completed_epoch = group.group_epoch
            self.counters.consumer_rebalances_completed += 1

    def _target_assignment(
        self, key: ConsumerGroupTargetAssignmentMemberKey, value: ConsumerGroupTargetAssignmentMemberValue | None
    ) -> None:
        if value is not None:
            target, metadata = records.target_assignment_from(value), records.assignment_metadata_from(value)
            self._consumer_group(key.group_id).put_target(key.member_id, target, metadata)
        elif (present := self._present(key.group_id)) is not None:
            present.target_assignment.pop(key.member_id, None)
            present.target_metadata.pop(key.member_id, None)

    def _target_assignment_epoch(
        self, key: ConsumerGroupTargetAssignmentMetadataKey, value: ConsumerGroupTargetAssignmentMetadataValue | None
    ) -> None:
        if value is not None:
            group = self._consumer_group(key.group_id)
            group.assignment_epoch = value.assignment_epoch
            group.assignment_timestamp_ms = value.assignment_timestamp
            group.target_assignor = value.assignor
            group.assigned_by = value.assigned_by
            if group.client_computation is not None or group.failed_computations is not None:
                self.counters.client_computations["gone"] += group.end_computation(value.assignment_epoch)
        elif (present := self._present(key.group_id)) is not None:
            present.assignment_epoch = 0
            present.assignment_timestamp_ms = 0
            present.target_assignor = present.assigned_by = ""

    def _regular_expression(
        self, key: ConsumerGroupRegularExpressionKey, value: ConsumerGroupRegularExpressionValue | None
    ) -> None:
        if value is not None:
            resolved = ResolvedRegularExpression(frozenset(value.topics), value.version, value.timestamp)
            self._consumer_group(key.group_id).resolved_regexes[key.regular_expression] = resolved
        elif (present := self._present(key.group_id)) is not None:
            present.resolved_regexes.pop(key.regular_expression, None)

    def _classic_group(self, key: GroupMetadataKey, value: GroupMetadataValue | None) -> None:
        if value is not None:
            group = self._groups.get(key.group)
            if not isinstance(group, ClassicGroup):
                group = self._groups[key.group] = ClassicGroup(key.group)
            if group.persisted is value:
                # The record of a conversion (`migration.replace_empty`). Since then, the group has got a member.
                return
            is_new_generation = group.persisted is None or group.persisted.generation != value.generation
            if value.members and group.members and is_new_generation:
                # If the group had no members before, it is converted or loaded by this record, and no rebalance ends.
                self.counters.classic_rebalances_completed += 1
            group.apply(value)
        elif isinstance(gone := self._groups.get(key.group), ClassicGroup):
            self._remove(gone)

    def _remove(self, group: Group) -> None:
        """Removes the group; if offsets remain, a group without members replaces it.

        Requests and expiry find offsets only through their group.
        """
        group.version = object()
        if self._offsets.packed(group.group_id) or self._pending.has_group(group.group_id):
            self._groups[group.group_id] = ClassicGroup(group.group_id)
        else:
            del self._groups[group.group_id]

    def _present(self, group_id: str) -> ConsumerGroup | None:
        """Returns the consumer group that a record is about to change; None if there is none."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            return None
        group.version = object()
        return group

    def _consumer_group(self, group_id: str) -> ConsumerGroup:
        """Returns the consumer group, and creates it if necessary, also in place of a group that only held offsets."""
        group = self._present(group_id)
        if group is None:
            group = self._groups[group_id] = ConsumerGroup(group_id)
            group.client_computation = self.computations.pop(group_id, None)
        return group

    def hard_state(self) -> Mapping[str, object]:
        """Returns all hard state as nested values that can be compared."""
        groups = {
            group_id: self._group_state(group)
            for group_id, group in sorted(self._groups.items())
            if isinstance(group, ConsumerGroup) or (isinstance(group, ClassicGroup) and group.persisted is not None)
        }
        offsets = {
            (group_id, topic, partition): offset
            for group_id in self._offsets.group_ids()
            for topic, partitions in self._offsets.of_group(group_id).items()
            for partition, offset in partitions.items()
        }
        return {
            "groups": groups,
            "offsets": offsets,
            "pending": self._pending.hard_state(),
            "imports": frozenset(self.imports),
        }

    @staticmethod
    def _group_state(group: Group) -> object:
        if isinstance(group, ConsumerGroup):
            return (
                group.group_epoch,
                group.metadata_hash,
                group.creation_time_ms,
                group.assignment_epoch,
                group.assignment_timestamp_ms,
                dict(group.members),
                dict(group.target_assignment),
                dict(group.target_metadata),
                (group.target_assignor, group.assigned_by),
                dict(group.resolved_regexes),
                dict(group.static_members),
            )
        return group.persisted if isinstance(group, ClassicGroup) else None
