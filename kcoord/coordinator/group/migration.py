# SPDX-License-Identifier: Apache-2.0
"""Online conversion of a group with members between the protocols (KIP-848 Supporting Online Consumer Group Upgrade).

**Upgrade.** A member of the consumer protocol joins a classic group. Its classic members become classic members of a
consumer group (`consumer.classic_members`). The group epoch continues from the generation, and each member keeps its
last assignment. A cooperative member may own partitions beyond that; it keeps them as pending revocation until it no
longer lists them as owned. Requests that wait at a barrier of the classic group fail with REBALANCE_IN_PROGRESS.

**Custom assignors.** User data that a classic assignor puts into subscriptions or assignments means nothing to the
coordinator. Such a group is converted only by a member with a client-side assignor of the group's protocol name that
reads version -1, the version of user data. The user data of an assignment becomes the metadata of the target.

**Downgrade.** The last member of the consumer protocol leaves, is removed, or joins again with the classic protocol.
The remaining members become a classic group with the group epoch as generation. What they own, with its user data, are
their assignments. If members left, or the group was not Stable, it rebalances at once.

**Order and crashes.** All records of a conversion are in one atomic batch, the tombstones of the old group first. So
after a crash the group has either protocol. Two steps of a downgrade come after a replay, by timers that fire at once.
One is the rebalance. The other is the conversion itself, if the last member joined again with the classic protocol.
Timers are lost in a crash; `unfinished` schedules them again when the shard is loaded.

**What must hold.** Epochs and generations never fall across a conversion. No member gets a partition that another one
may still own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records
from kcoord.coordinator.group.classic import consumer_protocol, rebalance
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.member import ClassicMember
from kcoord.coordinator.group.consumer import removal
from kcoord.coordinator.group.consumer.assignment import metadata_hash
from kcoord.coordinator.group.consumer.client_assignors import CLASSIC_VERSION, ClientAssignor
from kcoord.coordinator.group.consumer.group import (
    NO_METADATA,
    ClassicMemberMetadata,
    ConsumerGroup,
    ConsumerGroupMember,
    MemberState,
    TargetMetadata,
)
from kcoord.coordinator.group.group import (
    GroupState,
    GroupTimer,
    cancel_member_timers,
    downgrade_timer,
    heartbeat_timer,
    session_timer,
)
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import Cancel, Completion, CoordinatorRecord, CoordinatorResult, Schedule, TimerKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import SyncGroupResponse

MIGRATION: Final = records.TombstoneReason.MIGRATION

CUSTOM_ASSIGNOR_TEXT: Final = (
    "Cannot upgrade classic group {} to consumer group because an unsupported custom assignor is in use. "
    "Please refer to the documentation or switch to a default assignor before re-attempting the upgrade."
)
"""Kafka's text, byte for byte, because clients compare it."""


def remove_members(
    config: BrokerConfig,
    image: MetadataImage,
    now_ms: int,
    group: ConsumerGroup,
    members: Sequence[ConsumerGroupMember],
    reason: records.EpochReason,
) -> CoordinatorResult[None]:
    """Removes the members; converts the group to a classic one if only classic members remain (KIP-848 Downgrade)."""
    if can_downgrade(config, group, members):
        return downgrade(config, image, group, now_ms, members)
    return removal.remove_members(config, image, group, members, reason, now_ms)


def policy_allows(config: BrokerConfig, direction: str) -> bool:
    """True if group.consumer.migration.policy allows `direction`: `upgrade` or `downgrade` of groups with members."""
    return config.group_consumer_migration_policy.lower() in (direction, "bidirectional")


def upgrade(
    config: BrokerConfig,
    image: MetadataImage,
    group: ClassicGroup,
    assignors: Sequence[ClientAssignor],
    now_ms: int,
    creation_time_ms: int,
) -> tuple[ConsumerGroup, CoordinatorResult[object]]:
    """Returns the consumer group, and the records, timers and completions of the conversion.

    `assignors` are the client-side assignors of the member that joins. The classic group stays unchanged until the
    records are replayed, so the join may still fail without effect. Raises GROUP_ID_NOT_FOUND with the reason, as Kafka
    does, if the group cannot be converted, and INVALID_REQUEST if `assignors` cannot read user data of the group.
    """
    members = _members_to_upgrade(config, image, group, assignors)
    group_id, epoch = group.group_id, max(group.generation, 1)
    names = {name for member in members for name in member.subscribed_topic_names}
    was_settled = group.state is GroupState.STABLE and not any(member.pending_revocation for member in members)
    new = ConsumerGroup(group_id)
    new.group_epoch = new.assignment_epoch = epoch
    new.creation_time_ms = creation_time_ms
    # An interrupted rebalance leaves members without their new assignments. A hash of 0 forces a new target next.
    new.metadata_hash = metadata_hash(image, names) if was_settled else 0
    result: CoordinatorResult[object] = CoordinatorResult(
        None, [records.new_classic_group_tombstone(group_id, MIGRATION)]
    )
    result.records += [records.new_member_subscription_record(group_id, member) for member in members]
    result.records.append(
        records.new_group_epoch_record(
            group_id, epoch, new.metadata_hash, creation_time_ms, records.EpochReason.MIGRATION
        )
    )
    for member in members:
        new.put_member(member)
        target = {topic_id: frozenset(partitions) for topic_id, partitions in member.assigned.items()}
        new.put_target(member.member_id, target, member.metadata)
        result.records.append(records.new_target_assignment_record(group_id, member.member_id, target, member.metadata))
    result.records.append(records.new_target_assignment_epoch_record(group_id, epoch, 0))
    result.records += [records.new_current_assignment_record(group_id, member) for member in members]
    result.timers += _classic_timers_to_cancel(group)
    for member in members:
        assert member.classic is not None
        deadline_ms = now_ms + member.classic.session_timeout_ms
        result.timers.append(Schedule(session_timer(group_id, member.member_id), deadline_ms))
    result.completions += _interrupted_requests(group)
    return new, result


def _members_to_upgrade(
    config: BrokerConfig, image: MetadataImage, group: ClassicGroup, assignors: Sequence[ClientAssignor]
) -> list[ConsumerGroupMember]:
    if not policy_allows(config, "upgrade"):
        raise _refused(group, f"group.consumer.migration.policy={config.group_consumer_migration_policy} forbids it")
    if not group.uses_consumer_protocol():
        raise _refused(group, f"its protocol type is {group.protocol_type!r}, not 'consumer'")
    if len(group.members) > config.group_consumer_max_size:
        raise _refused(group, f"it has more than group.consumer.max.size={config.group_consumer_max_size} members")
    members = [_upgraded(image, group, member, assignors) for member in group.members.values()]
    return _with_owned(members, _owned_beyond(image, group, members))


def _upgraded(
    image: MetadataImage, group: ClassicGroup, member: ClassicMember, assignors: Sequence[ClientAssignor]
) -> ConsumerGroupMember:
    subscription = consumer_protocol.read_subscription(member.metadata(_protocol_of(group, member)))
    assignment = consumer_protocol.read_assignment(member.assignment)
    if subscription is None or assignment is None:
        part = "subscription" if subscription is None else "assignment"
        raise _refused(group, f"the {part} of member {member.member_id} cannot be read")
    if assignment.user_data and not assignors:
        raise KafkaError(Errors.GROUP_ID_NOT_FOUND, CUSTOM_ASSIGNOR_TEXT.format(group.group_id))
    if assignors and (subscription.user_data or assignment.user_data):
        protocol = _protocol_of(group, member)
        obstacle = user_data_obstacle(protocol, {a.name: a.minimum_version for a in assignors})
        if obstacle is not None:
            part = "subscription" if subscription.user_data else "assignment"
            raise KafkaError(
                Errors.INVALID_REQUEST,
                f"Classic group {group.group_id} cannot become a consumer group: the {part} of member "
                f"{member.member_id} has user data of the assignor {protocol}, and {obstacle}.",
            )
    epoch = max(group.generation, 1)
    assigned = {
        image.topics[topic.topic].id: dict.fromkeys(topic.partitions, epoch)
        for topic in assignment.assigned_partitions
        if topic.topic in image.topics and topic.partitions
    }
    return ConsumerGroupMember(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=subscription.rack_id or None,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(sorted(set(subscription.topics))),
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        classic=ClassicMemberMetadata(member.session_timeout_ms, tuple(member.protocols)),
        member_epoch=epoch,
        previous_member_epoch=epoch,
        state=MemberState.STABLE,
        assigned=assigned,
        metadata=TargetMetadata(data=assignment.user_data) if assignment.user_data else NO_METADATA,
    )


def user_data_obstacle(protocol: str, minimum_versions: Mapping[str, int]) -> str | None:
    """Returns why a member with these client-side assignors cannot read user data of `protocol`; None if it can."""
    version = minimum_versions.get(protocol)
    if version is None:
        return "ClientAssignors has no assignor of that name"
    if version != CLASSIC_VERSION:
        return f"the MinimumVersion of that client assignor is {version}, not {CLASSIC_VERSION}"
    return None


def _owned_beyond(
    image: MetadataImage, group: ClassicGroup, members: Sequence[ConsumerGroupMember]
) -> Mapping[tuple[bytes, int], str]:
    """Returns unassigned partitions that a cooperative member listed as owned when it joined -> its member id.

    The member may still own them: it revokes them only with its next assignment. If several members list a partition,
    the one with the latest generation counts.
    """
    assigned = {
        (topic_id, partition)
        for member in members
        for topic_id, partitions in member.assigned.items()
        for partition in partitions
    }
    claims: dict[tuple[bytes, int], tuple[int, str]] = {}
    for member in group.members.values():
        subscription = consumer_protocol.read_subscription(member.metadata(_protocol_of(group, member)))
        if subscription is None:
            continue
        claim = subscription.generation_id, member.member_id
        for topic in subscription.owned_partitions:
            existing = image.topics.get(topic.topic)
            keys = [(existing.id, partition) for partition in topic.partitions] if existing is not None else []
            for key in keys:
                if key not in assigned and (key not in claims or claims[key][0] < claim[0]):
                    claims[key] = claim
    return {key: member_id for key, (_, member_id) in claims.items()}


def _with_owned(
    members: Sequence[ConsumerGroupMember], owned: Mapping[tuple[bytes, int], str]
) -> list[ConsumerGroupMember]:
    """Returns the members; those in `owned` have these partitions pending revocation."""
    pending: dict[str, dict[bytes, dict[int, int]]] = {}
    epochs = {member.member_id: member.member_epoch for member in members}
    for (topic_id, partition), member_id in owned.items():
        pending.setdefault(member_id, {}).setdefault(topic_id, {})[partition] = epochs[member_id]
    return [
        replace(member, state=MemberState.UNREVOKED_PARTITIONS, pending_revocation=pending[member.member_id])
        if member.member_id in pending
        else member
        for member in members
    ]


def _protocol_of(group: ClassicGroup, member: ClassicMember) -> str:
    return group.protocol if group.protocol is not None else member.protocols[0][0]


def _refused(group: ClassicGroup, reason: str) -> KafkaError:
    return KafkaError(
        Errors.GROUP_ID_NOT_FOUND, f"Classic group {group.group_id} cannot become a consumer group: {reason}."
    )


def _classic_timers_to_cancel(group: ClassicGroup) -> list[Schedule | Cancel]:
    group_id = group.group_id
    keys = [TimerKey(GroupTimer.CLASSIC_JOIN, group_id), TimerKey(GroupTimer.CLASSIC_SYNC, group_id)]
    keys += [heartbeat_timer(group_id, member_id) for member_id in (*group.members, *group.pending_members)]
    return [Cancel(key) for key in keys]


def _interrupted_requests(group: ClassicGroup) -> list[Completion]:
    """Fails the waiting JoinGroup and SyncGroup requests of the classic group, so that their members join again."""
    completions = []
    for member in group.members.values():
        if member.join_token is not None:
            again = rebalance.refused_join(Errors.REBALANCE_IN_PROGRESS, member.member_id)
            completions.append(Completion(member.join_token, again))
        if member.sync_token is not None:
            completions.append(
                Completion(member.sync_token, SyncGroupResponse(error_code=Errors.REBALANCE_IN_PROGRESS))
            )
    return completions


def can_downgrade(config: BrokerConfig, group: ConsumerGroup, leaving: Sequence[ConsumerGroupMember] = ()) -> bool:
    """True if, without `leaving`, only members of the classic protocol are left and the group may be downgraded."""
    left = _remaining(group, leaving)
    return (
        bool(left)
        and all(member.classic is not None for member in left)
        and len(left) <= config.group_max_size
        and policy_allows(config, "downgrade")
    )


def _remaining(group: ConsumerGroup, leaving: Sequence[ConsumerGroupMember]) -> list[ConsumerGroupMember]:
    gone = {member.member_id for member in leaving}
    return [member for member in group.members.values() if member.member_id not in gone]


def downgrade(
    config: BrokerConfig,
    image: MetadataImage,
    group: ConsumerGroup,
    now_ms: int,
    leaving: Sequence[ConsumerGroupMember] = (),
) -> CoordinatorResult[None]:
    """Returns the records and timers that convert the group, without `leaving`, to a classic group.

    The classic group is Stable at the group epoch, and its assignments are what each member owns. If it has to
    rebalance, its record has no leader, and a timer that fires at once starts the rebalance.
    """
    group_id = group.group_id
    result = CoordinatorResult(None)
    for member_id in group.members:
        result.records += records.new_member_tombstones(group_id, member_id, MIGRATION)
        result.timers += cancel_member_timers(group_id, member_id)
    result.records += records.new_consumer_group_tombstones(group_id, group.resolved_regexes, MIGRATION)
    classic = ClassicGroup(group_id)
    classic.protocol_type = consumer_protocol.PROTOCOL_TYPE
    classic.generation = group.group_epoch
    assignments: dict[str, bytes] = {}
    for member in _remaining(group, leaving):
        assert member.classic is not None
        classic.add(_downgraded(member, member.classic))
        assignments[member.member_id] = _classic_assignment(image, member, member.classic)
        session = heartbeat_timer(group_id, member.member_id)
        result.timers.append(Schedule(session, now_ms + member.classic.session_timeout_ms))
    classic.protocol = classic.select_protocol()
    if leaving or group.state is not GroupState.STABLE:
        classic.leader = None
        result.timers.append(_rebalance_at_once(group_id, now_ms))
    result.records.append(rebalance.group_metadata_record(group_id, classic.to_value(now_ms, assignments)))
    return result


def replace_empty(empty: ConsumerGroup, group: ClassicGroup, now_ms: int) -> list[CoordinatorRecord]:
    """Returns the records that replace a consumer group without members by `group`, a new classic group.

    The record of the classic group keeps the time since the group is empty, from which its offsets age (KIP-211). It is
    applied here, because the join that follows changes the group before the replay.
    """
    group.protocol_type = consumer_protocol.PROTOCOL_TYPE
    group.state_timestamp_ms = empty.empty_since_ms
    group.persisted = group.to_value(now_ms, {})
    return [
        *records.new_consumer_group_tombstones(empty.group_id, empty.resolved_regexes, MIGRATION),
        rebalance.group_metadata_record(empty.group_id, group.persisted),
    ]


def _rebalance_at_once(group_id: str, now_ms: int) -> Schedule:
    return Schedule(TimerKey(GroupTimer.CLASSIC_REBALANCE, group_id), now_ms)


def unfinished(config: BrokerConfig, group: ConsumerGroup | ClassicGroup, now_ms: int) -> Schedule | None:
    """Returns the timer that an interrupted downgrade of the group needs, if any."""
    if isinstance(group, ConsumerGroup):
        return Schedule(downgrade_timer(group.group_id), now_ms) if can_downgrade(config, group) else None
    is_without_leader = group.state is GroupState.STABLE and group.leader is None
    return _rebalance_at_once(group.group_id, now_ms) if is_without_leader else None


def _downgraded(member: ConsumerGroupMember, classic: ClassicMemberMetadata) -> ClassicMember:
    return ClassicMember(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        member.rebalance_timeout_ms,
        classic.session_timeout_ms,
        list(classic.protocols),
    )


def _classic_assignment(image: MetadataImage, member: ConsumerGroupMember, classic: ClassicMemberMetadata) -> bytes:
    version = consumer_protocol.read_version(classic.protocols[0][1]) or 0
    topics = ((image.topics_by_id.get(topic_id), partitions) for topic_id, partitions in member.assigned.items())
    named = {topic.name: sorted(partitions) for topic, partitions in topics if topic is not None}
    return consumer_protocol.write_assignment(named, version, member.metadata.user_data)
