# SPDX-License-Identifier: Apache-2.0
"""SyncGroup, Heartbeat and LeaveGroup of a classic group."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.classic.rebalance import Rebalance, sync_response
from kcoord.coordinator.group.group import GroupState, GroupTimer, heartbeat_timer
from kcoord.runtime.result import PENDING, CoordinatorResult, OperationContext, TimerKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import HeartbeatResponse, LeaveGroupResponse, SyncGroupResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import HeartbeatRequest, LeaveGroupRequest, SyncGroupRequest


def check_member(group: ClassicGroup, member_id: str, instance_id: str | None) -> ClassicMember:
    """Returns the member; raises UNKNOWN_MEMBER_ID or FENCED_INSTANCE_ID."""
    error = group.error_of_member(member_id, instance_id)
    if error is Errors.FENCED_INSTANCE_ID:
        raise KafkaError(error, f"Instance id {instance_id} of group {group.group_id} belongs to another member now.")
    if error is not Errors.NONE:
        raise KafkaError(error, f"Group {group.group_id} has no member {member_id}.")
    return group.members[member_id]


def check_generation(group: ClassicGroup, generation: int) -> None:
    if generation != group.generation:
        raise KafkaError(
            Errors.ILLEGAL_GENERATION, f"Group {group.group_id} is at generation {group.generation}, not {generation}."
        )


def sync(
    rebalance: Rebalance, context: OperationContext, request: SyncGroupRequest
) -> CoordinatorResult[SyncGroupResponse]:
    """Serves SyncGroup. The leader's request has the assignments and completes the generation; other members wait."""
    group = rebalance.group
    member = check_member(group, request.member_id, request.group_instance_id)
    check_generation(group, request.generation_id)
    if request.protocol_type not in (None, group.protocol_type) or request.protocol_name not in (None, group.protocol):
        raise KafkaError(
            Errors.INCONSISTENT_GROUP_PROTOCOL,
            f"Group {group.group_id} uses protocol {group.protocol} of type {group.protocol_type}.",
        )
    if group.state is GroupState.PREPARING_REBALANCE:
        raise KafkaError(Errors.REBALANCE_IN_PROGRESS, f"Group {group.group_id} is rebalancing.")
    group.pending_sync.discard(member.member_id)
    if group.state is GroupState.STABLE:
        if not group.pending_sync:
            rebalance.cancel(TimerKey(GroupTimer.CLASSIC_SYNC, group.group_id))
        rebalance.reset_heartbeat(member)
        return rebalance.respond(sync_response(group.protocol_type, group.protocol, member.assignment))
    if member.sync_token != context.token:
        rebalance.complete(member.sync_token, SyncGroupResponse(error_code=Errors.REBALANCE_IN_PROGRESS))
    member.sync_token = context.token
    if member.member_id == group.leader:
        rebalance.complete_generation({entry.member_id: entry.assignment for entry in request.assignments})
    return rebalance.respond(cast("SyncGroupResponse", PENDING))


def heartbeat(rebalance: Rebalance, request: HeartbeatRequest) -> CoordinatorResult[HeartbeatResponse]:
    """Keeps the member alive; returns REBALANCE_IN_PROGRESS during a join phase, so that the member rejoins."""
    group = rebalance.group
    member = check_member(group, request.member_id, request.group_instance_id)
    check_generation(group, request.generation_id)
    rebalance.reset_heartbeat(member)
    preparing = group.state is GroupState.PREPARING_REBALANCE
    return rebalance.respond(HeartbeatResponse(error_code=Errors.REBALANCE_IN_PROGRESS if preparing else Errors.NONE))


def leave(rebalance: Rebalance, request: LeaveGroupRequest) -> CoordinatorResult[LeaveGroupResponse]:
    """Removes the members of the request, with one error code each; the remaining group rebalances once."""
    response = LeaveGroupResponse()
    removed = False
    for identity in request.members:
        error = _remove_identity(rebalance, identity)
        removed = removed or error is Errors.NONE
        response.members.append(
            LeaveGroupResponse.MemberResponse(
                member_id=identity.member_id, group_instance_id=identity.group_instance_id, error_code=error
            )
        )
    if removed:
        rebalance.rebalance_after_removal()
    return rebalance.respond(response)


def _remove_identity(rebalance: Rebalance, identity: LeaveGroupRequest.MemberIdentity) -> Errors:
    """Removes one member or pending member. Admin clients identify a static member by its instance id alone."""
    group = rebalance.group
    member_id = identity.member_id
    if not member_id and identity.group_instance_id is not None:
        member_id = group.static_members.get(identity.group_instance_id, "")
    if member_id and member_id in group.pending_members:
        group.pending_members.remove(member_id)
        rebalance.cancel(heartbeat_timer(group.group_id, member_id))
        return Errors.NONE
    error = group.error_of_member(member_id, identity.group_instance_id)
    if error is Errors.NONE:
        rebalance.remove(group.members[member_id])
    return error
