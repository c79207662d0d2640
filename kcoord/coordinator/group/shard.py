# SPDX-License-Identifier: Apache-2.0
"""One shard of the group coordinator: every group whose id maps to one partition of `__consumer_offsets`.

**Operations.** There is one method per operation. It reads state and request and returns a CoordinatorResult with
response, records and timers. It finds the group and its protocol, and converts the group if a member of the other
protocol joins (KIP-848). The work of a group is in `consumer`, `classic`, `offsets` and `describe`. Methods named
`packed` are the fast paths of `packed_commit` and `packed_fetch`.

**State.** Only `replay` changes hard state. An operation that raises KafkaError has changed nothing hard. Soft state
(classic rebalances, verifications, timers, flags to look again) may change in operations and is lost with a crash.

**Order.** The runtime runs the operations of a shard one after the other in the event loop. It replays the records of
an operation before the next operation starts, and sends the response when the log has them. If a write fails, the
runtime drops the shard and loads a new one from the log, so replayed records that were not written disappear.

**Limits.** Limits on groups and ids keep clients from filling the memory of a coordinator. Kafka has none of these; the
defaults are beyond what an honest client needs. They apply only to what is created, so a group that is older than a
limit can still be used and deleted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import describe, imports, migration, records, snapshot
from kcoord.coordinator.group.classic import join as classic_join
from kcoord.coordinator.group.classic import operations as classic_operations
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import Rebalance, refused_join
from kcoord.coordinator.group.consumer import assignment, classic_members, client_computation, heartbeat, removal
from kcoord.coordinator.group.consumer.assignment import (
    ComputedTarget,
    ComputeTarget,
    FailedComputation,
    TargetInput,
)
from kcoord.coordinator.group.consumer.group import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ConsumerGroup,
    FailedComputations,
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
from kcoord.metadata.delta import MetadataChange, TopicDelta
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Producer,
    Provisional,
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
        ConsumerGroupHeartbeatRequest,
        ConsumerGroupHeartbeatResponse,
        ConsumerGroupInstallAssignmentRequest,
        ConsumerGroupInstallAssignmentResponse,
        ConsumerGroupPrepareAssignmentRequest,
        ConsumerGroupPrepareAssignmentResponse,
        DeleteGroupsResponse,
        HeartbeatRequest,
        HeartbeatResponse,
        JoinGroupRequest,
        JoinGroupResponse,
        LeaveGroupRequest,
        LeaveGroupResponse,
        ListGroupsResponse,
        Message,
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


_MOST_CHANGES: Final = 64
"""A group that missed more changes of the metadata checks its metadata anyway, which changes nothing else."""


class GroupCoordinatorShard:
    """The state machine of one partition of `__consumer_offsets`. Implements `StateMachine` of the runtime.

    `deleted_topics`: the ids of topics that were deleted. All shards of a process share it, as they share `counters`.
    """

    def __init__(
        self,
        config: BrokerConfig,
        image: MetadataImage,
        counters: GroupCounters | None = None,
        deleted_topics: Collection[bytes] = (),
    ) -> None:
        self._config = config
        self._image = image
        self.image_epoch = image.epoch
        self._changes: deque[MetadataChange] = deque(maxlen=_MOST_CHANGES)
        """The newest changes of the metadata, for groups that were not used since."""
        self._change_count = 0
        self._groups: dict[str, Group] = {}
        self._offsets = CommittedOffsets()
        self._pending = TransactionalOffsets()
        self._deletion = Deletion(self._offsets, self._pending)
        self._replay = GroupReplay(self._groups, self._offsets, self._pending)
        self.counters = GroupCounters() if counters is None else counters
        self._deleted_topics = deleted_topics
        self._verifications = Verifications()
        self._last_ticket = 0
        self.clock_gain_ms = 0
        """Soft: by how much the clock may be ahead of real time. Expiry subtracts it (KIP-211)."""

    # The state machine.

    def replay(self, record: CoordinatorRecord) -> None:
        self._replay.apply(record)

    def batch_replay(self) -> Callable[[bytes, int], bool]:
        return OffsetCommitReader(self._groups, self._offsets, self._pending).replay

    def snapshot(self) -> Iterator[SnapshotPart] | None:
        """Returns the parts of a snapshot; None while an open transaction has pending offsets, which have no part."""
        return None if self._pending else snapshot.parts(self._groups, self._offsets, self._replay.imports)

    def restore(self, part: PackedState) -> bool:
        if part.kind != snapshot.OFFSETS:
            return False
        snapshot.restore_offsets(self._groups, self._offsets, part.data)
        return True

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        self._replay.counters = self.counters
        timers = timers_after_load(self._config, self._image, self._groups.values(), context.now_ms)
        # The last owner may have ended before it deleted the offsets of these topics.
        tombstones = self._deletion.of_topic_ids(self._deleted_topics)
        return CoordinatorResult(None, tombstones, timers=[self._expiration_after(tombstones, context), *timers])

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """Handles a timer: expires offsets, ends a phase of a classic group, or removes a member of a consumer group.

        The downgrade timer converts the group if only classic members are left.
        """
        if key == OFFSETS_EXPIRATION:
            return self.expire_offsets(context)
        group = self._groups.get(key.group_id)
        if isinstance(group, ClassicGroup):
            rebalance = Rebalance(self._config, group, context.now_ms)
            rebalance.timer_fired(key)
            return rebalance.respond(None)
        if isinstance(group, ConsumerGroup):
            if key.kind in MEMBER_TIMERS:
                return self._member_timer_fired(context, group, key)
            if key.kind == GroupTimer.CLIENT_ASSIGNOR:
                client_computation.time_is_over(group, context.now_ms, self.counters)
                return CoordinatorResult(None)
            if migration.can_downgrade(self._config, group):
                return migration.downgrade(self._config, self._image, group, context.now_ms)
        return CoordinatorResult(None)

    def _member_timer_fired(
        self, context: OperationContext, group: ConsumerGroup, key: TimerKey
    ) -> CoordinatorResult[None]:
        """Removes the member after its session, rebalance, join or sync timeout, unless the timer is out of date."""
        member = group.members.get(key.member_id)
        if member is None:
            return CoordinatorResult(None)
        if key.kind == GroupTimer.REBALANCE and member.state is not MemberState.UNREVOKED_PARTITIONS:
            return CoordinatorResult(None)
        return self._removal(context)(group, [member], records.EpochReason.FENCED)

    def target_input(self, work: ComputeTarget) -> TargetInput | None:
        """Returns the input of the task; None if the group needs no new target any more."""
        group = self._groups.get(work.group_id)
        if not isinstance(group, ConsumerGroup) or group.group_epoch == group.assignment_epoch:
            return None
        assignor = group.preferred_server_assignor(self._config.consumer_assignors)
        return assignment.target_input(group, group.group_epoch, assignor, self._image, metadata=work.metadata)

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        """Installs resolved regular expressions or a computed target, or responds to a member that computes a target.

        A later heartbeat asks again for a task that failed, after a pause if the assignor is not built in.
        """
        present = self._informed(self._groups.get(task.key.group_id))
        group = present if isinstance(present, ConsumerGroup) else None
        if isinstance(task.work, client_computation.PrepareAssignment | client_computation.InstallAssignment):
            return client_computation.complete_task(group, task.work, value, context.now_ms, self.counters)
        if group is None:
            return CoordinatorResult(None)
        if isinstance(value, ResolvedRegexes):
            group.regex_refreshed_at_ms = context.now_ms
            group.regex_stale = value.version < self._image.epoch
            return update_resolved_regexes(self._image, group, value, context.now_ms)
        if isinstance(value, ComputedTarget):
            group.failed_computations = None
            return assignment.install(group, value, context.now_ms)
        if isinstance(value, FailedComputation):
            self.counters.assignor_failures[value.assignor] += 1
            group.failed_computations = FailedComputations.after(
                group.failed_computations, value.assignor, value.reason, context.now_ms
            )
        return CoordinatorResult(None)

    def on_metadata_update(
        self, context: OperationContext, image: MetadataImage, delta: TopicDelta | None = None
    ) -> CoordinatorResult[None]:
        """Installs a new metadata image and deletes the offsets of deleted topics.

        Groups that depend on a changed topic check their metadata at the next heartbeat (`_informed`); if brokers have
        other racks, all groups do. `delta` leads to `image`; it is used if it begins at the image of this shard.
        """
        old, self._image = self._image, image
        self.image_epoch = image.epoch
        if delta is None or delta.old is not old:
            delta = TopicDelta.between(old, image)
        if not delta.change.changed and not delta.change.racks_changed:
            return CoordinatorResult(None)
        self._changes.append(delta.change)
        self._change_count += 1
        # Any number of groups may have offsets of the topics, so the tombstones need not fit into one batch.
        tombstones = [tombstone for topic in delta.gone for tombstone in self._deletion.of_topic(topic)]
        return CoordinatorResult(None, tombstones, is_atomic=False)

    def _informed(self, group: Group | None) -> Group | None:
        """Returns the group, which now knows all changes of the metadata.

        A group gets to know a change when it is used next. So a change costs the same for any number of groups.
        """
        if isinstance(group, ConsumerGroup) and group.noted_changes != self._change_count:
            missed = self._change_count - group.noted_changes
            group.noted_changes = self._change_count
            if missed > len(self._changes):
                group.metadata_stale = group.regex_stale = True
            else:
                for change in islice(reversed(self._changes), missed):
                    group.note_metadata(change)
        return group

    @property
    def group_count(self) -> int:
        return len(self._groups)

    # Metrics.

    def count_groups(self) -> Mapping[tuple[str, str], int]:
        """Returns (protocol, state) -> number of groups, with Kafka's names."""
        return Counter((group.type.value.lower(), group.state.value) for group in self._groups.values())

    def count_computations(self) -> int:
        """Returns the number of groups in which a member computes a target assignment now."""
        consumer_groups = (group for group in self._groups.values() if isinstance(group, ConsumerGroup))
        computations = (group.client_computation for group in consumer_groups)
        return sum(computation is not None and computation.asked is not None for computation in computations)

    # Groups of both types.

    def describe_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[describe.ClassicDescription]]:
        """DescribeGroups: classic groups, one per id, in that order; other groups are Dead to this API."""
        return CoordinatorResult(
            [describe.classic_group(self._groups, group_id, context.api_version) for group_id in group_ids]
        )

    def consumer_group_describe(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[describe.GroupDescription]]:
        """One described group per id, in that order; GROUP_ID_NOT_FOUND for an id without a consumer group."""
        config = self._config
        return CoordinatorResult(
            [
                describe.consumer_group(
                    self._groups,
                    group_id,
                    self._image,
                    config.consumer_assignors,
                    has_client_assignors=config.kcoord_client_assignors_enable,
                )
                for group_id in group_ids
            ]
        )

    def group_ids(self) -> list[str]:
        """Returns the ids of all groups, in no order."""
        return list(self._groups)

    def list_groups(
        self,
        context: OperationContext,
        states_filter: list[str],
        types_filter: list[str],
        group_ids: Iterable[str] | None = None,
    ) -> CoordinatorResult[list[ListGroupsResponse.ListedGroup]]:
        """Returns those of the groups that match both filters: by default all groups, with descending ids.

        An empty filter matches all groups.
        """
        ids = sorted(self._groups, reverse=True) if group_ids is None else group_ids
        groups = (self._groups[group_id] for group_id in ids if group_id in self._groups)
        return CoordinatorResult(describe.listed_groups(groups, states_filter, types_filter))

    def delete_groups(
        self, context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DeleteGroupsResponse.DeletableGroupResult]]:
        return self._deletion.of_groups(self._groups, group_ids, context.principal)

    @property
    def image(self) -> MetadataImage:
        """The shard's newest metadata image."""
        return self._image

    @property
    def latest_creation_time_ms(self) -> int:
        """The latest creation time of any consumer group so far (KIP-1327); -1 if there was none."""
        return self._replay.latest_creation_time_ms

    # For tests and checkers.

    def group(self, group_id: str) -> Group | None:
        """Returns the group. The caller must not change it."""
        return self._groups.get(group_id)

    def hard_state(self) -> Mapping[str, object]:
        """Returns all hard state. Two results are equal if and only if the states are."""
        return self._replay.hard_state()

    # Consumer groups.

    def consumer_group_heartbeat(
        self, context: OperationContext, request: ConsumerGroupHeartbeatRequest
    ) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """Serves ConsumerGroupHeartbeat (KIP-848); see `consumer.heartbeat`."""
        if not self._config.kcoord_client_assignors_enable:
            request.client_assignors = None
        heartbeat.validate_request(request, context.api_version, self._config)
        if request.member_epoch in (LEAVE_GROUP_MEMBER_EPOCH, LEAVE_GROUP_STATIC_MEMBER_EPOCH):
            return removal.leave(self._consumer_group(request.group_id, "Group"), request, self._removal(context))
        if request.member_epoch == JOIN_GROUP_EPOCH:
            self._check_new_member(request.member_id, request.instance_id)
            group, conversion = self._consumer_group_to_join(context, request)
        else:
            group, conversion = self._consumer_group(request.group_id), CoordinatorResult[object](None)
        result = heartbeat.ConsumerHeartbeat(
            self._config, self._image, group, context, request, conversion, self.counters
        ).run()
        if group.client_computation is not None and self._groups.get(group.group_id) is not group:
            self._replay.computations[group.group_id] = group.client_computation
        return result

    def prepare_assignment(
        self, context: OperationContext, request: ConsumerGroupPrepareAssignmentRequest
    ) -> CoordinatorResult[ConsumerGroupPrepareAssignmentResponse]:
        """Serves ConsumerGroupPrepareAssignment (KIP-848). The response waits for a task."""
        client_computation.validate_request(request)
        group = self._consumer_group(request.group_id)
        result = client_computation.prepare(group, self._image, context, request, self.counters)
        return cast("CoordinatorResult[ConsumerGroupPrepareAssignmentResponse]", result)

    def install_assignment(
        self, context: OperationContext, request: ConsumerGroupInstallAssignmentRequest
    ) -> CoordinatorResult[ConsumerGroupInstallAssignmentResponse]:
        """Serves ConsumerGroupInstallAssignment (KIP-848). The response waits for a task."""
        client_computation.validate_request(request)
        group = self._consumer_group(request.group_id)
        max_bytes = self._config.kcoord_client_assignor_metadata_max_bytes
        result = client_computation.begin_install(group, context, request, self.counters, max_bytes)
        return cast("CoordinatorResult[ConsumerGroupInstallAssignmentResponse]", result)

    def _consumer_group(self, group_id: str, noun: str = "Consumer group") -> ConsumerGroup:
        """Returns the group; raises GROUP_ID_NOT_FOUND. `noun` begins the text about an unknown group."""
        group = self._informed(self._groups.get(group_id))
        if isinstance(group, ConsumerGroup):
            return group
        text = f"{noun} {group_id} not found." if group is None else f"Group {group_id} is not a consumer group."
        raise KafkaError(Errors.GROUP_ID_NOT_FOUND, text)

    def _consumer_group_to_join(
        self, context: OperationContext, request: ConsumerGroupHeartbeatRequest
    ) -> tuple[ConsumerGroup, CoordinatorResult[object]]:
        """Returns the group, or a new one that is not replayed yet, and the conversion of a classic group.

        The conversion (KIP-848 Upgrade) is a result without response. It is empty if there was no classic group.
        """
        group_id = request.group_id
        group, conversion = self._present_or_admitted(group_id), CoordinatorResult[object](None)
        if isinstance(group, ConsumerGroup):
            return group, conversion
        # KIP-1327: a later group never has an earlier creation time, even if the clock went back. The group is not
        # older than any partition of the image, and not younger than a partition that is being created
        # (`metadata.creation_order`).
        now_ms = min(context.now_ms, context.creation_limit_ms)
        creation_time_ms = max(now_ms, self._replay.latest_creation_time_ms, self._image.last_creation_time_ms)
        if isinstance(group, ClassicGroup) and not group.is_empty():
            assignors = records.client_assignors_from(request.client_assignors)
            return migration.upgrade(self._config, self._image, group, assignors, context.now_ms, creation_time_ms)
        if group is not None:
            conversion.records.append(records.new_classic_group_tombstone(group_id, TombstoneReason.MIGRATION))
        new = ConsumerGroup(group_id)
        new.creation_time_ms = creation_time_ms
        return new, conversion

    def _removal(self, context: OperationContext) -> removal.RemoveMembers:
        return partial(migration.remove_members, self._config, self._image, context.now_ms)

    # Classic members, of classic and of consumer groups.

    def join_group(self, context: OperationContext, request: JoinGroupRequest) -> CoordinatorResult[JoinGroupResponse]:
        """Serves JoinGroup. In a classic group the response is PENDING until the join phase ends."""
        try:
            classic_join.validate_request(self._config, request)
        except KafkaError as error:
            return CoordinatorResult(refused_join(error.error, request.member_id))
        self._check_new_member(request.member_id, request.group_instance_id)
        group = self._present_or_admitted(request.group_id)
        if isinstance(group, ConsumerGroup) and not group.is_empty():
            result = classic_members.join(self._config, self._image, group, context, request, self.counters)
        else:
            result = self._join_classic_group(context, request, group)
        return cast("CoordinatorResult[JoinGroupResponse]", result)

    def _join_classic_group(
        self, context: OperationContext, request: JoinGroupRequest, present: Group | None
    ) -> CoordinatorResult[object]:
        """Serves JoinGroup of a classic group, which it creates if necessary.

        An empty consumer group becomes an empty classic group first. An error response has the member id of the
        request; that of a consumer group does not.
        """
        group = present if isinstance(present, ClassicGroup) else ClassicGroup(request.group_id)
        conversion: list[CoordinatorRecord] = []
        try:
            if group is not present and request.member_id:
                raise _unknown_member(request.group_id, request.member_id)
            if isinstance(present, ConsumerGroup):
                conversion = migration.replace_empty(present, group, context.now_ms)
            rebalance = Rebalance(self._config, group, context.now_ms)
            result = classic_join.ClassicJoin(self._config, group, context, request, rebalance).run()
        except KafkaError as error:
            return CoordinatorResult(refused_join(error.error, request.member_id))
        result.records[:0] = conversion
        self._groups[request.group_id] = group
        return result

    def sync_group(self, context: OperationContext, request: SyncGroupRequest) -> CoordinatorResult[SyncGroupResponse]:
        """Serves SyncGroup. In a classic group the response is PENDING until the leader has sent the assignments."""
        group = self._group_of_member(request.group_id, request.member_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.sync(group, self._image, context, request)
        return classic_operations.sync(Rebalance(self._config, group, context.now_ms), context, request)

    def heartbeat(self, context: OperationContext, request: HeartbeatRequest) -> CoordinatorResult[HeartbeatResponse]:
        """Serves Heartbeat: keeps a classic member alive, or returns REBALANCE_IN_PROGRESS so that it rejoins."""
        group = self._group_of_member(request.group_id, request.member_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.heartbeat(group, context, request)
        return classic_operations.heartbeat(Rebalance(self._config, group, context.now_ms), request)

    def leave_group(
        self, context: OperationContext, request: LeaveGroupRequest
    ) -> CoordinatorResult[LeaveGroupResponse]:
        """Serves LeaveGroup with one error code per member; in an unknown group all members are unknown."""
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
        """Returns None if the next response may differ. Called after a heartbeat of the member succeeded."""
        group = self._informed(self._groups.get(group_id))
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
        """Prepares `commit_offset` with a plan, which then is the result; False if the general path has to be taken."""
        if self._pending.open:
            return False
        return plan.prepare(self._groups, self._offsets, self._image, cells, now_ms)

    def fetch_packed(self, fetch: PackedFetch, require_stable: bool) -> bytes | None:
        """Returns the encoded response of `fetch_offsets`; None if the general path has to be taken."""
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
        principal = context.principal
        return offset_operations.delete_offsets(self._image, group, self._offsets, self._pending, request, principal)

    # Groups that come from another coordinator.

    def has_import(self, group_id: str) -> bool:
        """Returns whether the group has an import record."""
        return group_id in self._replay.imports

    def departed_groups(self) -> list[str]:
        """Returns the groups with an import record that do not exist any more."""
        return [group_id for group_id in self._replay.imports if group_id not in self._groups]

    def import_offsets(
        self, context: OperationContext, request: imports.ImportRequest
    ) -> CoordinatorResult[imports.ImportOutcome]:
        """Imports the offsets of a group, if that is still possible; see `imports`."""
        group = self._present_or_admitted(request.group_id)
        return imports.import_offsets(request, group, self._replay.imports, self._image, context.now_ms)

    def forget_imports(self, context: OperationContext, group_ids: list[str]) -> CoordinatorResult[list[str]]:
        """Deletes the import records of departed groups. Returns the ids of these groups."""
        return imports.forget(group_ids, self._groups, self._replay.imports)

    # Within transactions.

    def start_verification(self, producer: Producer) -> int | None:
        """Returns a ticket for the producer's first commit of a transaction, which needs verification (KIP-890).

        Returns None if its transaction is open in this log. Changes only soft state, so it is no operation.
        """
        if self._pending.epoch_of(producer.producer_id) == producer.producer_epoch:
            return None
        return self._verifications.start(producer.producer_id)

    def finish_verification(self, producer: Producer, ticket: int) -> None:
        self._verifications.finish(producer.producer_id, ticket)

    def commit_transactional_offsets(
        self, context: OperationContext, request: TxnOffsetCommitRequest, ticket: int | None
    ) -> CoordinatorResult[TxnOffsetCommitResponse]:
        """Serves TxnOffsetCommit. The offsets of a producer are pending until `end_transaction`."""
        offset_operations.check_transaction(self._pending, self._verifications, request, ticket)
        group = self._present_or_admitted(request.group_id)
        return offset_operations.commit_transactional_offsets(self._config, self._image, group, context, request)

    def commit_provisionally(
        self, context: OperationContext, request: TxnOffsetCommitRequest
    ) -> CoordinatorResult[TxnOffsetCommitResponse]:
        """Serves TxnOffsetCommit if the log is in an upstream, whose transaction coordinator has the transaction.

        The upstream verifies the transaction when the records are written. Markers come with the log. The request has
        a producer.
        """
        self._pending.check_epoch(request.producer_id, request.producer_epoch)
        group = self._present_or_admitted(request.group_id)
        result = offset_operations.commit_transactional_offsets(self._config, self._image, group, context, request)
        self._last_ticket += 1
        for record in result.records:
            record.ticket = self._last_ticket
        result.provisional = Provisional(request.transactional_id, self._last_ticket) if result.records else None
        return result

    def decide(self, ticket: int, *, accepted: bool) -> None:
        """Implements HasProvisionalRecords."""
        self._pending.decide(ticket, accepted=accepted)

    def rewrite(self, context: OperationContext, keys: Iterable[Message]) -> CoordinatorResult[None]:
        """Implements HasProvisionalRecords."""
        return CoordinatorResult(None, offset_operations.present_records(self._offsets, self._pending, keys))

    def end_transaction(
        self, context: OperationContext, producer: Producer, coordinator_epoch: int, *, committed: bool
    ) -> CoordinatorResult[None]:
        """Writes the marker, which commits or drops the producer's pending offsets.

        Writes nothing if the producer has no open transaction in this log.
        """
        epoch = self._pending.check_epoch(producer.producer_id, producer.producer_epoch)
        self._verifications.end(producer.producer_id)
        if epoch is None:
            return CoordinatorResult(None)
        return CoordinatorResult(None, [new_end_transaction_marker(producer, coordinator_epoch, committed=committed)])

    # Time.

    def expire_offsets(self, context: OperationContext) -> CoordinatorResult[None]:
        """Deletes expired offsets, and empty groups without any left (KIP-211). A long list takes several rounds.

        Offsets of deleted topics that are left come first.
        """
        tombstones = self._deletion.of_topic_ids(self._deleted_topics)
        if not tombstones:
            expiration = Expiration(self._config, self._image, context.now_ms, self.clock_gain_ms)
            tombstones = self._deletion.of_all_expired(expiration, self._groups.values())
        return CoordinatorResult(None, tombstones, [self._expiration_after(tombstones, context)])

    def _expiration_after(self, tombstones: Sequence[CoordinatorRecord], context: OperationContext) -> Schedule:
        """Returns the next check. It follows at once if there may be more to delete."""
        is_portion = len(tombstones) >= MAX_TOMBSTONES
        delay_ms = 0 if is_portion else self._config.offsets_retention_check_interval_ms
        return Schedule(OFFSETS_EXPIRATION, context.now_ms + delay_ms)

    # Limits.

    def _present_or_admitted(self, group_id: str) -> Group | None:
        """Returns the group, or None if it may be created.

        Raises INVALID_GROUP_ID if a new id is longer than kcoord.max.id.bytes, and POLICY_VIOLATION if the shard has
        kcoord.partition.max.groups already.
        """
        group = self._informed(self._groups.get(group_id))
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
