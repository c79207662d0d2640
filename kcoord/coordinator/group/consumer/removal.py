# SPDX-License-Identifier: Apache-2.0
"""Removing members of a consumer group: they leave, or their session or rebalance timeout expires."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.group import (
    LEAVE_GROUP_MEMBER_EPOCH,
    LEAVE_GROUP_STATIC_MEMBER_EPOCH,
    ConsumerGroup,
    ConsumerGroupMember,
    MemberState,
)
from kcoord.coordinator.group.group import cancel_member_timers, rebalance_timer
from kcoord.coordinator.group.records import EpochReason
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import Cancel, CoordinatorResult
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest

RemoveMembers: TypeAlias = Callable[
    [ConsumerGroup, Sequence[ConsumerGroupMember], EpochReason], CoordinatorResult[None]
]
"""Removes members; may also downgrade the group to the classic protocol (see `migration`)."""


def find_member(group: ConsumerGroup, member_id: str, instance_id: str | None) -> ConsumerGroupMember:
    """Returns the member of a request that does not join; raises UNKNOWN_MEMBER_ID or FENCED_INSTANCE_ID."""
    if instance_id is not None:
        holder = group.static_member(instance_id)
        if holder is None:
            raise KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Instance id {instance_id} is unknown.")
        if holder.member_id != member_id:
            raise KafkaError(
                Errors.FENCED_INSTANCE_ID,
                f"Static member {member_id} with instance id {instance_id} was fenced by member {holder.member_id}.",
            )
        return holder
    member = group.members.get(member_id)
    if member is None:
        raise KafkaError(Errors.UNKNOWN_MEMBER_ID, f"Member {member_id} is not a member of group {group.group_id}.")
    return member


def leave(
    group: ConsumerGroup, request: ConsumerGroupHeartbeatRequest, remove: RemoveMembers
) -> CoordinatorResult[ConsumerGroupHeartbeatResponse]:
    """Serves a heartbeat that leaves.

    Epoch -1 removes the member. With epoch -2 a static member leaves but will return within its session timeout: it
    keeps its partitions.
    """
    member = find_member(group, request.member_id, request.instance_id)
    response = ConsumerGroupHeartbeatResponse(
        member_id=member.member_id,
        member_epoch=request.member_epoch,
        heartbeat_interval_ms=0,
        group_creation_time_ms=group.creation_time_ms,
    )
    if request.member_epoch == LEAVE_GROUP_MEMBER_EPOCH:
        removal = remove(group, [member], EpochReason.LEAVE)
        return CoordinatorResult(response, removal.records, removal.timers, is_of_group=True)
    released = replace(
        member,
        state=MemberState.STABLE,
        member_epoch=LEAVE_GROUP_STATIC_MEMBER_EPOCH,
        pending_revocation={},
    )
    # The session timer keeps running: it limits how long the partitions wait for the member's return.
    return CoordinatorResult(
        response,
        [records.new_current_assignment_record(group.group_id, released)],
        [Cancel(rebalance_timer(group.group_id, member.member_id))],
        is_of_group=True,
    )


def remove_members(
    config: BrokerConfig,
    image: MetadataImage,
    group: ConsumerGroup,
    members: Sequence[ConsumerGroupMember],
    reason: EpochReason,
    now_ms: int,
) -> CoordinatorResult[None]:
    """Removes all records of the members and raises the group epoch once; the next heartbeat computes the new target.

    Since Kafka 4.4, removing the last member also raises the assignment epoch, because nothing is left to assign.
    """
    group_id, why = group.group_id, records.TombstoneReason(reason.value)
    result = CoordinatorResult(None)
    for member in members:
        result.records += records.new_member_tombstones(group_id, member.member_id, why)
        result.timers += cancel_member_timers(group_id, member.member_id)
    leaving = Counter(member.subscribed_topic_regex or "" for member in members)
    for regex in sorted(leaving.keys() & group.resolved_regexes.keys()):
        if group.regex_subscribers(regex) == leaving[regex]:
            result.records.append(records.new_regular_expression_tombstone(group_id, regex, why))
    new_hash = metadata_hash(image, group.subscribed_topic_names(removed=members))
    epoch, is_last = group.group_epoch + 1, len(members) == len(group.members)
    empty_since_ms = now_ms if is_last else -1
    result.records.append(records.next_group_epoch_record(group, epoch, new_hash, reason, empty_since_ms))
    if is_last and config.is_kafka_4_4:
        result.records.append(records.next_assignment_epoch_record(group_id, epoch, epoch, 0))
    return result
