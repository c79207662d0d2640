# SPDX-License-Identifier: Apache-2.0
"""Members of a consumer group that speak the classic protocol (KIP-848 Online Migration).

The coordinator maps the classic APIs to the states of a member (`group`), without the barriers of a classic group:

* JoinGroup runs the steps of a heartbeat with the subscription from the request. Its generation is the member epoch.
* SyncGroup returns the current assignment. If there is a newer target and the member has nothing to revoke, it fails
  with REBALANCE_IN_PROGRESS.
* Heartbeat returns REBALANCE_IN_PROGRESS if the member has to rejoin: to reach a newer epoch, to confirm a revocation,
  or to take partitions that other members have released.

If a member of the consumer protocol computes the target with a client-side assignor, that assignor is the protocol of
the classic members, too. It reads the user data of their subscriptions, and gives them user data in their assignments.
Such a computation takes time, so they rejoin only when it has ended.

A cooperative member lists the partitions it still owns in JoinGroup; an eager member has revoked all of them before.

Three timers per member remove it. The session timer always runs. The join timer runs from the response that asks the
member to rejoin to its JoinGroup; the sync timer from there to its SyncGroup. Both run for its rebalance timeout. They
are soft state: after a restart only the session timer runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.classic.join import (
    KNOWN_MEMBER_ID_VERSION,
    new_member_id,
    protocols_of,
    rebalance_timeout_of,
)
from kcoord.coordinator.group.classic.rebalance import refused_join
from kcoord.coordinator.group.consumer.assignment import OwnedPartitions, owned_by_topic
from kcoord.coordinator.group.consumer.group import (
    ClassicMemberMetadata,
    ConsumerGroup,
    ConsumerGroupMember,
    EpochAssignment,
    MemberState,
)
from kcoord.coordinator.group.consumer.heartbeat import MemberTransition
from kcoord.coordinator.group.consumer.removal import RemoveMembers, find_member
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.group import (
    cancel_member_timers,
    classic_join_timer,
    classic_sync_timer,
    downgrade_timer,
    rebalance_timer,
    session_timer,
)
from kcoord.coordinator.group.records import EpochReason
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import Cancel, CoordinatorResult, OperationContext, Schedule, TimerEffect
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import HeartbeatResponse, JoinGroupResponse, LeaveGroupResponse, SyncGroupResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        ConsumerProtocolSubscription,
        HeartbeatRequest,
        JoinGroupRequest,
        LeaveGroupRequest,
        SyncGroupRequest,
    )


def join(
    config: BrokerConfig,
    image: MetadataImage,
    group: ConsumerGroup,
    context: OperationContext,
    request: JoinGroupRequest,
    counters: GroupCounters,
) -> CoordinatorResult[object]:
    """Returns the response to JoinGroup; its generation is the member's epoch."""
    transition = MemberTransition(config, image, group, context.now_ms, counters)
    transition.check_size(request.member_id, request.group_instance_id)
    protocols = protocols_of(request)
    _check_protocols(config, group, request.protocol_type, protocols)
    member_id = request.member_id or new_member_id(context, request.group_instance_id)
    if not request.member_id and request.group_instance_id is None and context.api_version >= KNOWN_MEMBER_ID_VERSION:
        return CoordinatorResult(refused_join(Errors.MEMBER_ID_REQUIRED, member_id))
    subscription = _subscription(config, group, member_id, protocols)
    if request.member_id and request.group_instance_id is not None:
        # Only a member without an id may take over an instance id (KIP-345). The former holder, which sends its id,
        # is fenced here.
        member = find_member(group, member_id, request.group_instance_id)
    else:
        member = transition.find_joining(member_id, request.group_instance_id, classic=True)
    updated = member.with_subscription(
        instance_id=request.group_instance_id,
        rack_id=subscription.rack_id or None,
        client_id=context.client_id,
        client_host=context.client_host,
        subscribed_topic_names=tuple(sorted(set(subscription.topics))),
        subscribed_topic_regex=None,
        server_assignor=None,
        client_assignors=(),
        rebalance_timeout_ms=rebalance_timeout_of(request),
        classic=ClassicMemberMetadata(request.session_timeout_ms, tuple(protocols)),
    )
    reconciled = transition.advance(member, member if updated == member else updated, _owned(subscription, image))
    response = JoinGroupResponse(
        member_id=member_id,
        generation_id=reconciled.member_epoch,
        protocol_type=consumer_protocol.PROTOCOL_TYPE,
        protocol_name=_protocol_in_use(group, protocols),
    )
    result: CoordinatorResult[object] = CoordinatorResult(
        response, transition.records, tasks=transition.tasks, is_of_group=True
    )
    predecessor = transition.predecessor
    if predecessor is not None and predecessor.member_id != member_id:
        result.timers += cancel_member_timers(group.group_id, predecessor.member_id)
    replaced = group.replaced_by(updated)
    if replaced is not None and replaced.classic is None:
        result.timers.append(Cancel(rebalance_timer(group.group_id, member_id)))
        result.timers.append(Schedule(downgrade_timer(group.group_id), context.now_ms))
    group.asked_to_rejoin.discard(member_id)
    result.timers += [
        Schedule(session_timer(group.group_id, member_id), context.now_ms + request.session_timeout_ms),
        Cancel(classic_join_timer(group.group_id, member_id)),
        Schedule(classic_sync_timer(group.group_id, member_id), context.now_ms + updated.rebalance_timeout_ms),
    ]
    return result


def _check_protocols(
    config: BrokerConfig, group: ConsumerGroup, protocol_type: str, protocols: Sequence[tuple[str, bytes]]
) -> None:
    """Raises INCONSISTENT_GROUP_PROTOCOL if the group accepts no classic member with these protocols."""
    if config.group_consumer_migration_policy.lower() == "disabled":
        raise KafkaError(
            Errors.INCONSISTENT_GROUP_PROTOCOL,
            f"Group {group.group_id} accepts no classic members: group.consumer.migration.policy is disabled.",
        )
    if not group.supports_classic_protocols(protocol_type, {name for name, _ in protocols}):
        raise KafkaError(
            Errors.INCONSISTENT_GROUP_PROTOCOL,
            f"Group {group.group_id} accepts only classic members of protocol type consumer that share a protocol.",
        )


def _subscription(
    config: BrokerConfig, group: ConsumerGroup, member_id: str, protocols: list[tuple[str, bytes]]
) -> ConsumerProtocolSubscription:
    subscription = consumer_protocol.read_subscription(protocols[0][1])
    if subscription is None:
        # Observed in Kafka 4.3.1 and 4.4.0 (recorded dialogue mixed-refusals).
        raise KafkaError(
            Errors.INCONSISTENT_GROUP_PROTOCOL if config.is_kafka_4_4 else Errors.UNKNOWN_SERVER_ERROR,
            f"The subscription of member {member_id} in group {group.group_id} is malformed.",
        )
    return subscription


def _owned(subscription: ConsumerProtocolSubscription, image: MetadataImage) -> OwnedPartitions:
    """Returns the partitions that a cooperative member still owns; an eager one revokes all before it joins."""
    topics = ((image.topics.get(topic.topic), topic.partitions) for topic in subscription.owned_partitions)
    return owned_by_topic((topic.id, partitions) for topic, partitions in topics if topic is not None)


def sync(
    group: ConsumerGroup, image: MetadataImage, context: OperationContext, request: SyncGroupRequest
) -> CoordinatorResult[SyncGroupResponse]:
    """Returns the member's assignment, or REBALANCE_IN_PROGRESS if there is a newer target and it should rejoin."""
    member, classic = _classic_member(group, request.member_id, request.group_instance_id)
    _check_generation(group, member, request.generation_id)
    protocol = _protocol_in_use(group, classic.protocols)
    expected = {None, protocol}
    if group.has_client_assignors:
        # Since the member joined, a target of another assignor may have been installed.
        expected.update(name for name, _ in classic.protocols)
    if request.protocol_type not in (None, consumer_protocol.PROTOCOL_TYPE) or request.protocol_name not in expected:
        raise KafkaError(Errors.INCONSISTENT_GROUP_PROTOCOL, f"Member {member.member_id} uses protocol {protocol}.")
    if group.assignment_epoch > member.member_epoch and member.state is not MemberState.UNREVOKED_PARTITIONS:
        response = SyncGroupResponse(error_code=Errors.REBALANCE_IN_PROGRESS)
        return CoordinatorResult(response, timers=_join_deadline(group, member, context))
    version = consumer_protocol.read_version(classic.protocols[0][1]) or 0
    result: CoordinatorResult[SyncGroupResponse] = CoordinatorResult(
        SyncGroupResponse(
            protocol_type=consumer_protocol.PROTOCOL_TYPE,
            protocol_name=request.protocol_name or protocol,
            assignment=consumer_protocol.write_assignment(
                _by_name(member.assigned, image), version, member.metadata.user_data
            ),
        )
    )
    result.timers.append(Cancel(classic_sync_timer(group.group_id, member.member_id)))
    result.timers.append(_session(group, member, classic, context))
    return result


def _protocol_in_use(group: ConsumerGroup, protocols: Sequence[tuple[str, bytes]]) -> str:
    """Returns the client-side assignor that computed the group's target; else the member's first protocol."""
    names = [name for name, _ in protocols]
    return group.target_assignor if group.target_assignor in names else names[0]


def _by_name(assigned: EpochAssignment, image: MetadataImage) -> dict[str, list[int]]:
    """Returns the partitions by topic name. Deleted topics have no name; the next rebalance revokes them."""
    topics = ((image.topics_by_id.get(topic_id), partitions) for topic_id, partitions in assigned.items())
    return {topic.name: sorted(partitions) for topic, partitions in topics if topic is not None}


def heartbeat(
    group: ConsumerGroup, context: OperationContext, request: HeartbeatRequest
) -> CoordinatorResult[HeartbeatResponse]:
    """Returns REBALANCE_IN_PROGRESS if the member should rejoin.

    It should if the group epoch is newer, if it has a revocation to confirm, or if partitions of its target are free.
    If members may compute the target, it should only when there is a newer target: an eager member that rejoins revokes
    all its partitions.
    """
    member, classic = _classic_member(group, request.member_id, request.group_instance_id)
    _check_generation(group, member, request.generation_id)
    result: CoordinatorResult[HeartbeatResponse] = CoordinatorResult(
        HeartbeatResponse(), timers=[_session(group, member, classic, context)]
    )
    newest_epoch = group.assignment_epoch if group.may_members_compute else group.group_epoch
    if (
        member.member_epoch < newest_epoch
        or member.state is MemberState.UNREVOKED_PARTITIONS
        or (member.state is MemberState.UNRELEASED_PARTITIONS and not group.waits_for_release(member))
    ):
        result.response = HeartbeatResponse(error_code=Errors.REBALANCE_IN_PROGRESS)
        result.timers += _join_deadline(group, member, context)
    return result


def leave(
    group: ConsumerGroup, request: LeaveGroupRequest, remove: RemoveMembers
) -> CoordinatorResult[LeaveGroupResponse]:
    """Removes the members of the request; members of the consumer protocol may be removed too.

    The response has one error code per member, and an unknown member does not affect the rest.
    """
    response = LeaveGroupResponse()
    leaving: dict[str, ConsumerGroupMember] = {}
    for identity in request.members:
        error = Errors.NONE
        holder = group.static_member(identity.group_instance_id) if identity.group_instance_id is not None else None
        try:
            if not identity.member_id and holder is not None:
                member = holder
            else:
                member = find_member(group, identity.member_id, identity.group_instance_id)
            leaving[member.member_id] = member
        except KafkaError as refused:
            error = refused.error
        response.members.append(
            LeaveGroupResponse.MemberResponse(
                member_id=identity.member_id, group_instance_id=identity.group_instance_id, error_code=error
            )
        )
    if not leaving:
        return CoordinatorResult(response)
    removal = remove(group, list(leaving.values()), EpochReason.LEAVE)
    return CoordinatorResult(response, removal.records, removal.timers, is_of_group=True)


def _classic_member(
    group: ConsumerGroup, member_id: str, instance_id: str | None
) -> tuple[ConsumerGroupMember, ClassicMemberMetadata]:
    """Returns the member; raises UNKNOWN_MEMBER_ID also for a member of the consumer protocol."""
    member = find_member(group, member_id, instance_id)
    if member.classic is None:
        raise KafkaError(
            Errors.UNKNOWN_MEMBER_ID, f"Member {member_id} of group {group.group_id} uses the consumer protocol."
        )
    return member, member.classic


def _check_generation(group: ConsumerGroup, member: ConsumerGroupMember, generation: int) -> None:
    if generation != member.member_epoch:
        raise KafkaError(
            Errors.ILLEGAL_GENERATION,
            f"Member {member.member_id} of group {group.group_id} is at epoch {member.member_epoch}, not {generation}.",
        )


def _session(
    group: ConsumerGroup, member: ConsumerGroupMember, classic: ClassicMemberMetadata, context: OperationContext
) -> Schedule:
    return Schedule(session_timer(group.group_id, member.member_id), context.now_ms + classic.session_timeout_ms)


def _join_deadline(group: ConsumerGroup, member: ConsumerGroupMember, context: OperationContext) -> list[TimerEffect]:
    """Starts the join timer, unless it runs already: a further heartbeat does not extend the time to rejoin."""
    if member.member_id in group.asked_to_rejoin:
        return []
    group.asked_to_rejoin.add(member.member_id)
    key = classic_join_timer(group.group_id, member.member_id)
    return [Schedule(key, context.now_ms + member.rebalance_timeout_ms)]
