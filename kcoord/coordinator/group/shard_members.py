# SPDX-License-Identifier: Apache-2.0
"""Members of a shard's groups: they join, are heard from, and leave or are removed, under either protocol.

One method per operation, each from state and request to a CoordinatorResult. Which protocol a group speaks is decided
here, with the conversion of a group from one to the other (KIP-848); what it does then is in `consumer` and `classic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from kcoord.coordinator.group import migration, records
from kcoord.coordinator.group.admission import check_new_member
from kcoord.coordinator.group.classic import join as classic_join
from kcoord.coordinator.group.classic import operations as classic_operations
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import Rebalance, refused_join
from kcoord.coordinator.group.consumer import classic_members, heartbeat, removal
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.consumer.member import (
    JOIN_GROUP_EPOCH,
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ConsumerGroupMember,
    MemberState,
)
from kcoord.coordinator.group.consumer.settings import GroupSettings
from kcoord.coordinator.group.group import Group, GroupState
from kcoord.coordinator.group.records import TombstoneReason
from kcoord.coordinator.group.shard_state import ShardState
from kcoord.coordinator.group.steady import SteadyHeartbeat
from kcoord.coordinator.group.timers import MEMBER_TIMERS, GroupTimer, heartbeat_timer, rebalance_timer, session_timer
from kcoord.runtime.result import Cancel, CoordinatorResult, OperationContext, Schedule, TimerKey
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        ConsumerGroupHeartbeatRequest,
        ConsumerGroupHeartbeatResponse,
        HeartbeatRequest,
        HeartbeatResponse,
        JoinGroupRequest,
        JoinGroupResponse,
        LeaveGroupRequest,
        LeaveGroupResponse,
        SyncGroupRequest,
        SyncGroupResponse,
    )


def _unknown_member(group_id: str, member_id: str) -> KafkaError:
    return KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Group {group_id} has no member {member_id}.")


class ShardMembers(ShardState):
    """The operations of members, and the timers that remove them."""

    # Consumer groups.

    def consumer_group_heartbeat(
        self, context: OperationContext, request: ConsumerGroupHeartbeatRequest
    ) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
        """KIP-848 ConsumerGroupHeartbeat API; see `consumer.heartbeat`."""
        heartbeat.validate_request(request, context.api_version, self._config.consumer_assignors)
        if request.member_epoch in (LEAVE_GROUP_MEMBER_EPOCH, LEAVE_GROUP_STATIC_MEMBER_EPOCH):
            return removal.leave(
                self._consumer_group(request.group_id), request, partial(self._remove_members, context)
            )
        conversion = CoordinatorResult[object](None)
        if request.member_epoch == JOIN_GROUP_EPOCH:
            check_new_member(self._config, request.member_id, request.instance_id)
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

    def _remove_members(
        self,
        context: OperationContext,
        group: ConsumerGroup,
        members: Sequence[ConsumerGroupMember],
        reason: records.EpochReason,
    ) -> CoordinatorResult[None]:
        """They go alone, or the group becomes a classic one with them (KIP-848 Downgrade)."""
        if migration.can_downgrade(self._config, group, members):
            return migration.downgrade(self._config, self._image, group, context.now_ms, members)
        return removal.remove_members(self._config, self._image, group, members, reason, context.now_ms)

    # Classic members, of classic and of consumer groups.

    def join_group(self, context: OperationContext, request: JoinGroupRequest) -> CoordinatorResult[JoinGroupResponse]:
        """The response is PENDING until the others have joined too."""
        try:
            classic_join.validate_request(self._config, request)
        except KafkaError as error:
            return CoordinatorResult(refused_join(error.error, request.member_id))
        check_new_member(self._config, request.member_id, request.group_instance_id)
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
        rebalance = Rebalance(self._config, group, context.now_ms)
        classic_operations.sync(rebalance, context, request)
        return cast("CoordinatorResult[SyncGroupResponse]", rebalance.result)

    def heartbeat(self, context: OperationContext, request: HeartbeatRequest) -> CoordinatorResult[HeartbeatResponse]:
        """Keeps a classic member alive, or tells it to rejoin."""
        group = self._group_of_member(request.group_id, request.member_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.heartbeat(group, context, request)
        rebalance = Rebalance(self._config, group, context.now_ms)
        response = classic_operations.heartbeat(rebalance, request)
        return CoordinatorResult(response, timers=rebalance.result.timers)

    def leave_group(
        self, context: OperationContext, request: LeaveGroupRequest
    ) -> CoordinatorResult[LeaveGroupResponse]:
        """One answer per member; an unknown group knows none of them."""
        if not request.group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        group = self._groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return classic_members.leave(group, request, partial(self._remove_members, context))
        known = group if isinstance(group, ClassicGroup) else ClassicGroup(request.group_id)
        rebalance = Rebalance(self._config, known, context.now_ms)
        response = classic_operations.leave(rebalance, request)
        effects = rebalance.result
        return CoordinatorResult(response, effects.records, effects.timers, completions=effects.completions)

    def _group_of_member(self, group_id: str, member_id: str) -> ConsumerGroup | ClassicGroup:
        if not group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup | ClassicGroup):
            raise _unknown_member(group_id, member_id)
        return group

    # Members of both types, and time.

    def steady_heartbeat(self, group_id: str, member_id: str) -> SteadyHeartbeat | None:
        """Asked after a heartbeat of the member was answered without error: will the answer be the same again?"""
        group = self._groups.get(group_id)
        if isinstance(group, ConsumerGroup):
            member = group.members.get(member_id)
            if member is None or not group.is_steady_for(member):
                return None
            key, timeout_ms = session_timer(group_id, member_id), self._session_timeout_ms(group_id)
            return SteadyHeartbeat(group, group.version, self._image.epoch, key, timeout_ms)
        if isinstance(group, ClassicGroup):
            classic_member = group.members.get(member_id)
            if classic_member is None or group.state is not GroupState.STABLE:
                return None
            key, timeout_ms = heartbeat_timer(group_id, member_id), classic_member.session_timeout_ms
            return SteadyHeartbeat(group, group.version, self._image.epoch, key, timeout_ms)
        return None

    def _session_timeout_ms(self, group_id: str) -> int:
        return GroupSettings(self._config, self._image, group_id).session_timeout_ms

    def _timers_after_load(self, now_ms: int) -> Iterator[Schedule | Cancel]:
        """Every member gets a whole session timeout, and one that was revoking its whole rebalance timeout.

        A downgrade that a crash interrupted continues.
        """
        for group in self._groups.values():
            if not isinstance(group, ConsumerGroup | ClassicGroup):
                continue
            downgrade = migration.unfinished(self._config, group, now_ms)
            if downgrade is not None:
                yield downgrade
            if isinstance(group, ConsumerGroup):
                yield from self._consumer_timers(group, now_ms)
            else:
                rebalance = Rebalance(self._config, group, now_ms)
                for classic_member in group.members.values():
                    rebalance.reset_heartbeat(classic_member)
                yield from rebalance.result.timers

    def _consumer_timers(self, group: ConsumerGroup, now_ms: int) -> Iterator[Schedule]:
        group_id = group.group_id
        session_timeout_ms = self._session_timeout_ms(group_id)
        for member in group.members.values():
            timeout_ms = session_timeout_ms if member.classic is None else member.classic.session_timeout_ms
            yield Schedule(session_timer(group_id, member.member_id), now_ms + timeout_ms)
            if member.state is MemberState.UNREVOKED_PARTITIONS and member.classic is None:
                deadline_ms = now_ms + member.rebalance_timeout_ms
                yield Schedule(rebalance_timer(group_id, member.member_id), deadline_ms)

    def _group_timer_fired(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        group = self._groups.get(key.group_id)
        if isinstance(group, ConsumerGroup) and key.kind in MEMBER_TIMERS:
            return self._consumer_timer_fired(context, group, key)
        if isinstance(group, ClassicGroup):
            rebalance = Rebalance(self._config, group, context.now_ms)
            rebalance.timer_fired(key)
            effects = rebalance.result
            return CoordinatorResult(None, effects.records, effects.timers, completions=effects.completions)
        if isinstance(group, ConsumerGroup) and migration.can_downgrade(self._config, group):
            return migration.downgrade(self._config, self._image, group, context.now_ms)
        return CoordinatorResult(None)

    def _consumer_timer_fired(
        self, context: OperationContext, group: ConsumerGroup, key: TimerKey
    ) -> CoordinatorResult[None]:
        """KIP-848 Session and Rebalance Timeouts; classic members are also given a time to rejoin and to sync."""
        member = group.members.get(key.member_id)
        if member is None:
            return CoordinatorResult(None)
        if key.kind == GroupTimer.REBALANCE and member.state is not MemberState.UNREVOKED_PARTITIONS:
            return CoordinatorResult(None)
        return self._remove_members(context, group, [member], records.EpochReason.FENCED)
