# SPDX-License-Identifier: Apache-2.0
"""One shard of the group coordinator: every group whose id maps to one partition of `__consumer_offsets`.

One method per operation, each from state and request to a CoordinatorResult; `replay` alone changes hard state. The
methods decide which group is meant, and which protocol it speaks, with the conversion of a group from one to the other
(KIP-848). What a group does then is in `consumer`, `classic`, `offsets` and `describe`. Methods named `packed` are the
fast paths of `packed_commit` and `packed_fetch`; `*_verification` and timers are soft state.

Limits keep strangers from filling the memory of a coordinator. Kafka has none of them; the defaults are beyond what an
honest client asks for. They hold for what is to be made, so a group that is older than a limit can still be used and
deleted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import describe, migration, records, snapshot
from kcoord.coordinator.group.classic import join as classic_join
from kcoord.coordinator.group.classic import operations as classic_operations
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import Rebalance, refused_join
from kcoord.coordinator.group.consumer import assignment, classic_members, heartbeat, removal
from kcoord.coordinator.group.consumer.assignment import ComputedTarget, TargetInput
from kcoord.coordinator.group.consumer.group import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ConsumerGroup,
    MemberState,
)
from kcoord.coordinator.group.consumer.resolved_regexes import update_resolved_regexes
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.deletion import Deletion
from kcoord.coordinator.group.group import MEMBER_TIMERS, OFFSETS_EXPIRATION, Group, GroupTimer
from kcoord.coordinator.group.loading import timers_after_load
from kcoord.coordinator.group.offsets import operations as offset_operations
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffsets
from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES, Expiration
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
from kcoord.coordinator.group.offsets.records import OffsetCommitReader
from kcoord.coordinator.group.offsets.transactional_offsets import TransactionalOffsets
from kcoord.coordinator.group.records import TombstoneReason
from kcoord.coordinator.group.regex import ResolvedRegexes
from kcoord.coordinator.group.replay import GroupReplay
from kcoord.coordinator.group.steady import SteadyHeartbeat, steady_heartbeat
from kcoord.metadata.delta import TopicDelta
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Producer,
    Schedule,
    Task,
    TimerKey,
    new_end_transaction_marker,
)
from kcoord.runtime.snapshot import PackedState, SnapshotPart
from kcoord.runtime.verification import Verifications
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        ConsumerGroupDescribeResponse,
        ConsumerGroupHeartbeatRequest,
        ConsumerGroupHeartbeatResponse,
        DeleteGroupsResponse,
        DescribeGroupsResponse,
        HeartbeatRequest,
        HeartbeatResponse,
        JoinGroupRequest,
        JoinGroupResponse,
        LeaveGroupRequest,
        LeaveGroupResponse,
        ListGroupsResponse,
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetDeleteRequest,
        OffsetDeleteResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
        SyncGroupRequest,
        SyncGroupResponse,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
    )


def _unknown_member(group_id: str, member_id: str) -> KafkaError:
    return KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Group {group_id} has no member {member_id}.")


class GroupCoordinatorShard:
    """The state machine of one partition of `__consumer_offsets`. Implements `StateMachine` of the runtime."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, counters: GroupCounters | None = None) -> None:
        self._config = config
        self._image = image
        self.image_epoch = image.epoch
        self._groups: dict[str, Group] = {}
        self._offsets = CommittedOffsets()
        self._pending = TransactionalOffsets()
        self._deletion = Deletion(self._offsets, self._pending)
        self._replay = GroupReplay(self._groups, self._offsets, self._pending)
        self.counters = GroupCounters() if counters is None else counters
        self._verifications = Verifications()
        self.clock_gain_ms = 0
        """Soft: by how much the clock may have run too fast. Nothing expires early by it (KIP-211)."""

    # The state machine.

    def replay(self, record: CoordinatorRecord) -> None:
        self._replay.apply(record)

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        return OffsetCommitReader(self._groups, self._offsets, self._pending).replay

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """Pending offsets of a transaction are told by the log alone."""
        return None if self._pending else snapshot.parts(self._groups, self._offsets)

    def restore(self, part: PackedState) -> bool:
        if part.kind != snapshot.OFFSETS:
            return False
        snapshot.restore_offsets(self._groups, self._offsets, part.data)
        return True

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        self._replay.counters = self.counters
        timers = timers_after_load(self._config, self._image, self._groups.values(), context.now_ms)
        return CoordinatorResult(None, timers=[self._next_expiration(context), *timers])

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """A member was silent or slow and is removed, or a barrier of a classic group opens."""
        if key == OFFSETS_EXPIRATION:
            return self.expire_offsets(context)
        group = self._groups.get(key.group_id)
        if isinstance(group, ClassicGroup):
            rebalance = Rebalance(self._config, group, context.now_ms)
            rebalance.timer_fired(key)
            return rebalance.answer(None)
        if isinstance(group, ConsumerGroup):
            if key.kind in MEMBER_TIMERS:
                return self._member_timer_fired(context, group, key)
            if migration.can_downgrade(self._config, group):
                return migration.downgrade(self._config, self._image, group, context.now_ms)
        return CoordinatorResult(None)

    def _member_timer_fired(
        self, context: OperationContext, group: ConsumerGroup, key: TimerKey
    ) -> CoordinatorResult[None]:
        """KIP-848 Session and Rebalance Timeouts; classic members are also given a time to rejoin and to sync."""
        member = group.members.get(key.member_id)
        if member is None:
            return CoordinatorResult(None)
        if key.kind == GroupTimer.REBALANCE and member.state is not MemberState.UNREVOKED_PARTITIONS:
            return CoordinatorResult(None)
        return self._removal(context)(group, [member], records.EpochReason.FENCED)

    def target_input(self, group_id: str) -> TargetInput | None:
        """What a ComputeTarget task of the group works on, as of now; None where it needs no new target any more."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup) or group.group_epoch == group.assignment_epoch:
            return None
        assignor = group.preferred_server_assignor(self._config.consumer_assignors)
        return assignment.target_input(group, group.group_epoch, assignor, self._image)

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """The topics that a group's regular expressions match were found, or its target was computed; a failed task is
        tried again by a later heartbeat.
        """
        group = self._groups.get(task.key.group_id)
        if isinstance(group, ConsumerGroup) and isinstance(value, ResolvedRegexes):
            group.regex_refreshed_at_ms = context.now_ms
            group.regex_stale = value.version < self._image.epoch
            return update_resolved_regexes(self._image, group, value, context.now_ms)
        if isinstance(group, ConsumerGroup) and isinstance(value, ComputedTarget):
            return assignment.install(group, value, context.now_ms)
        return CoordinatorResult(None)

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """Groups that depend on a changed topic look again at their next heartbeat; offsets of deleted topics go.

        If brokers have other racks, all groups look again.

        `delta` leads to `image`; it helps where it begins at the image that this shard has.
        """
        old, self._image = self._image, image
        self.image_epoch = image.epoch
        if delta is None or delta.old is not old:
            delta = TopicDelta.between(old, image)
        if not delta.changed and not delta.racks_changed:
            return CoordinatorResult(None)
        for group in self._groups.values():
            if isinstance(group, ConsumerGroup):
                group.note_metadata(delta)
        return CoordinatorResult(
            None, [tombstone for topic in delta.gone for tombstone in self._deletion.of_topic(topic)]
        )

    # Metrics.

    def count_groups(self) -> Mapping[tuple[str, str], int]:
        """Groups by protocol and state, in Kafka's words."""
        return Counter((group.type.value.lower(), group.state.value) for group in self._groups.values())

    # Groups of both types.

    def describe_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DescribeGroupsResponse.DescribedGroup]]:
        """DescribeGroups: classic groups, one per id, in that order; other groups are Dead to this API."""
        return CoordinatorResult(
            [describe.classic_group(self._groups, group_id, context.api_version) for group_id in group_ids]
        )

    def consumer_group_describe(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[ConsumerGroupDescribeResponse.DescribedGroup]]:
        """One described group per id, in that order; GROUP_ID_NOT_FOUND for what is no consumer group."""
        assignors = self._config.consumer_assignors
        return CoordinatorResult(
            [describe.consumer_group(self._groups, group_id, self._image, assignors) for group_id in group_ids]
        )

    def list_groups(
        self, context: OperationContext, states_filter: list[str], types_filter: list[str]
    ) -> CoordinatorResult[list[ListGroupsResponse.ListedGroup]]:
        """All groups that match both filters; an empty filter matches all."""
        return CoordinatorResult(describe.listed_groups(self._groups, states_filter, types_filter))

    def delete_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
        return self._deletion.of_groups(self._groups, group_ids)

    @property
    def image(self) -> MetadataImage:
        """The newest metadata image that the shard was given."""
        return self._image

    @property
    def latest_creation_time_ms(self) -> int:
        """Of any group so far (KIP-1327), -1 where there was none."""
        return self._replay.latest_creation_time_ms

    # For tests and checkers.

    def group(self, group_id: str) -> Group | None:
        """The group itself, to look at."""
        return self._groups.get(group_id)

    def hard_state(self) -> Mapping[str, object]:
        """All that the log has brought about, in a form that compares equal exactly where the states are equal."""
        return self._replay.hard_state()

    # Consumer groups.

    def consumer_group_heartbeat(
        self, context: OperationContext, request: ConsumerGroupHeartbeatRequest
    ) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """KIP-848 ConsumerGroupHeartbeat API; see `consumer.heartbeat`."""
        heartbeat.validate_request(request, context.api_version, self._config.consumer_assignors)
        if request.member_epoch in (LEAVE_GROUP_MEMBER_EPOCH, LEAVE_GROUP_STATIC_MEMBER_EPOCH):
            return removal.leave(self._consumer_group(request.group_id), request, self._removal(context))
        conversion = CoordinatorResult[object](None)
        if request.member_epoch == JOIN_GROUP_EPOCH:
            self._check_new_member(request.member_id, request.instance_id)
            group = self._consumer_group_to_join(request.group_id, context, conversion)
        else:
            group = self._consumer_group(request.group_id)
        return heartbeat.ConsumerHeartbeat(self._config, self._image, group, context, request, conversion).run()

    def _consumer_group(self, group_id: str) -> ConsumerGroup:
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            return group
        raise KafkaError(Errors.GROUP_ID_NOT_FOUND, f"Consumer group {group_id} not found.")

    def _consumer_group_to_join(
        self, group_id: str, context: OperationContext, conversion: CoordinatorResult[object]
    ) -> ConsumerGroup:
        """The group, or a new one whose records are still to come. A classic group is converted (KIP-848 Upgrade)."""
        group = self._present_or_admitted(group_id)
        if isinstance(group, ConsumerGroup):
            return group
        # KIP-1327: a group that is made later never has an earlier creation time, even if the clock went back.
        # It is not before any partition that is known, nor after one that is being made (`metadata.creation_order`).
        now_ms = min(context.now_ms, context.creation_limit_ms)
        creation_time_ms = max(now_ms, self._replay.latest_creation_time_ms, self._image.last_creation_time_ms)
        if isinstance(group, ClassicGroup) and not group.is_empty():
            new, upgraded = migration.upgrade(self._config, self._image, group, context.now_ms, creation_time_ms)
            conversion.records += upgraded.records
            conversion.timers += upgraded.timers
            conversion.completions += upgraded.completions
            return new
        if group is not None:
            conversion.records.append(records.new_classic_group_tombstone(group_id, TombstoneReason.MIGRATION))
        new = ConsumerGroup(group_id)
        new.creation_time_ms = creation_time_ms
        return new

    def _removal(self, context: OperationContext) -> removal.RemoveMembers:
        return partial(migration.remove_members, self._config, self._image, context.now_ms)

    # Classic members, of classic and of consumer groups.

    def join_group(self, context: OperationContext, request: JoinGroupRequest) -> CoordinatorResult[JoinGroupResponse]:
        """The response is PENDING until the others have joined too."""
        try:
            classic_join.validate_request(self._config, request)
        except KafkaError as error:
            return CoordinatorResult(refused_join(error.error, request.member_id))
        self._check_new_member(request.member_id, request.group_instance_id)
        group = self._present_or_admitted(request.group_id)
        if isinstance(group, ConsumerGroup) and not group.is_empty():
            result = classic_members.join(self._config, self._image, group, context, request)
        else:
            result = self._join_classic_group(context, request, group)
        return cast("CoordinatorResult[JoinGroupResponse]", result)

    def _join_classic_group(
        self, context: OperationContext, request: JoinGroupRequest, present: Group | None
    ) -> CoordinatorResult[object]:
        """A group may be made by this request; an empty consumer group makes room for it, but not for its offsets.

        Here, other than in a consumer group, a refused member sees the id that it has sent.
        """
        group = present if isinstance(present, ClassicGroup) else ClassicGroup(request.group_id)
        try:
            if group is not present and request.member_id:
                raise _unknown_member(request.group_id, request.member_id)
            rebalance = Rebalance(self._config, group, context.now_ms)
            result = classic_join.ClassicJoin(self._config, group, context, request, rebalance).run()
        except KafkaError as error:
            return CoordinatorResult(refused_join(error.error, request.member_id))
        if isinstance(present, ConsumerGroup):
            result.records[:0] = records.new_consumer_group_tombstones(
                request.group_id, present.resolved_regexes, TombstoneReason.MIGRATION
            )
        self._groups[request.group_id] = group
        return result

    def sync_group(self, context: OperationContext, request: SyncGroupRequest) -> CoordinatorResult[SyncGroupResponse]:
        """The response is PENDING until the leader has brought the assignments."""
        group = self._group_of_member(request.group_id, request.member_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.sync(group, self._image, context, request)
        return classic_operations.sync(Rebalance(self._config, group, context.now_ms), context, request)

    def heartbeat(self, context: OperationContext, request: HeartbeatRequest) -> CoordinatorResult[HeartbeatResponse]:
        """Keeps a classic member alive, or tells it to rejoin."""
        group = self._group_of_member(request.group_id, request.member_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.heartbeat(group, context, request)
        return classic_operations.heartbeat(Rebalance(self._config, group, context.now_ms), request)

    def leave_group(
        self, context: OperationContext, request: LeaveGroupRequest
    ) -> CoordinatorResult[LeaveGroupResponse]:
        """One answer per member; an unknown group knows none of them."""
        if not request.group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        group = self._groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.leave(group, request, self._removal(context))
        classic = group if isinstance(group, ClassicGroup) else ClassicGroup(request.group_id)
        return classic_operations.leave(Rebalance(self._config, classic, context.now_ms), request)

    def _group_of_member(self, group_id: str, member_id: str) -> ConsumerGroup | ClassicGroup:
        if not group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup | ClassicGroup):
            raise _unknown_member(group_id, member_id)
        return group

    # Members of both types.

    def steady_heartbeat(self, group_id: str, member_id: str) -> SteadyHeartbeat | None:
        """Asked after a heartbeat of the member was answered without error: will the answer be the same again?"""
        group = self._groups.get(group_id)
        return steady_heartbeat(self._config, self._image, group, member_id) if group is not None else None

    # Offsets.

    def commit_offset(
        self, context: OperationContext, request: OffsetCommitRequest
    ) -> CoordinatorResult[OffsetCommitResponse]:
        group = self._present_or_admitted(request.group_id)
        return offset_operations.commit_offset(self._config, self._image, group, context, request)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._groups

    def commit_packed(self, plan: CommitPlan, cells: Sequence[bytes], now_ms: int) -> bool:
        """As `commit_offset` for a request whose plan is known, which then stands for the result; False where that has
        to be asked.
        """
        if self._pending.open:
            return False
        return plan.prepare(self._groups, self._offsets, self._image, cells, now_ms)

    def fetch_packed(self, fetch: PackedFetch, require_stable: bool) -> bytes | None:
        """As `fetch_offsets`, encoded; None where that has to be asked."""
        if require_stable and self._pending.open:
            return None
        return fetch.encode(self._groups.get(fetch.group_id), self._offsets, self._image)

    def fetch_offsets(
        self, context: OperationContext, request: OffsetFetchRequest.OffsetFetchRequestGroup, require_stable: bool
    ) -> CoordinatorResult[OffsetFetchResponse.OffsetFetchResponseGroup]:
        group = self._groups.get(request.group_id)
        pending = self._pending if require_stable else None
        return CoordinatorResult(offset_operations.fetch_offsets(group, self._offsets, pending, request))

    def delete_offsets(
        self, context: OperationContext, request: OffsetDeleteRequest
    ) -> CoordinatorResult[OffsetDeleteResponse]:
        group = self._groups.get(request.group_id)
        return offset_operations.delete_offsets(self._image, group, self._offsets, self._pending, request)

    # Within transactions.

    def start_verification(self, producer: Producer) -> int | None:
        """A ticket for a producer whose first commit of a transaction has to be agreed with the transaction
        coordinator; None where its transaction is open in this log. Soft state, so no operation.
        """
        if self._pending.epoch_of(producer.producer_id) == producer.producer_epoch:
            return None
        return self._verifications.start(producer.producer_id)

    def finish_verification(self, producer: Producer, ticket: int) -> None:
        self._verifications.finish(producer.producer_id, ticket)

    def commit_transactional_offsets(
        self, context: OperationContext, request: TxnOffsetCommitRequest, ticket: int | None
    ) -> CoordinatorResult[TxnOffsetCommitResponse]:
        """The offsets are pending until `end_transaction`."""
        offset_operations.check_transaction(self._pending, self._verifications, request, ticket)
        group = self._present_or_admitted(request.group_id)
        return offset_operations.commit_transactional_offsets(self._config, self._image, group, context, request)

    def end_transaction(
        self, context: OperationContext, producer: Producer, coordinator_epoch: int, *, committed: bool
    ) -> CoordinatorResult[None]:
        """The marker makes pending offsets count, or drops them. Nothing is written where nothing is open."""
        epoch = self._pending.check_epoch(producer.producer_id, producer.producer_epoch)
        self._verifications.end(producer.producer_id)
        if epoch is None:
            return CoordinatorResult(None)
        return CoordinatorResult(None, [new_end_transaction_marker(producer, coordinator_epoch, committed=committed)])

    # Time.

    def expire_offsets(self, context: OperationContext) -> CoordinatorResult[None]:
        """KIP-211: what has expired goes, and with its last offset an empty group; a long list goes in portions."""
        expiration = Expiration(self._config, self._image, context.now_ms, self.clock_gain_ms)
        tombstones = self._deletion.of_all_expired(expiration, self._groups.values())
        is_portion = len(tombstones) >= MAX_TOMBSTONES
        next_one = Schedule(OFFSETS_EXPIRATION, context.now_ms) if is_portion else self._next_expiration(context)
        return CoordinatorResult(None, tombstones, [next_one])

    def _next_expiration(self, context: OperationContext) -> Schedule:
        return Schedule(OFFSETS_EXPIRATION, context.now_ms + self._config.offsets_retention_check_interval_ms)

    # What may be made.

    def _present_or_admitted(self, group_id: str) -> Group | None:
        """The group, or None if it may be made. Raises INVALID_GROUP_ID beyond kcoord.max.id.bytes, and
        POLICY_VIOLATION beyond kcoord.partition.max.groups.
        """
        group = self._groups.get(group_id)
        if group is None:
            self._check_length("group id", group_id, Errors.INVALID_GROUP_ID)
            limit = self._config.kcoord_partition_max_groups
            if len(self._groups) >= limit:
                raise KafkaError(
                    Errors.POLICY_VIOLATION,
                    f"This coordinator partition has kcoord.partition.max.groups={limit} groups.",
                )
        return group

    def _check_new_member(self, member_id: str, instance_id: str | None) -> None:
        self._check_length("member id", member_id, Errors.INVALID_REQUEST)
        self._check_length("group instance id", instance_id or "", Errors.INVALID_REQUEST)

    def _check_length(self, name: str, text: str, error: Errors) -> None:
        limit = self._config.kcoord_max_id_bytes
        if len(text) > limit or (not text.isascii() and len(text.encode()) > limit):
            raise KafkaError(error, f"The {name} is longer than kcoord.max.id.bytes={limit}.")
