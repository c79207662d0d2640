# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupDescribe (KIP-848), DescribeGroups and ListGroups."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.client_assignors import select
from kcoord.coordinator.group.consumer.group import (
    NO_METADATA,
    Assignment,
    ConsumerGroup,
    ConsumerGroupMember,
    TargetMetadata,
)
from kcoord.coordinator.group.group import Group, GroupState
from kcoord.metadata.image import MetadataImage
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ConsumerGroupDescribeResponse, DescribeGroupsResponse, ListGroupsResponse

MEMBER_TYPE_CLASSIC: Final = 0
MEMBER_TYPE_CONSUMER: Final = 1


def consumer_group(
    groups: Mapping[str, Group],
    group_id: str,
    image: MetadataImage,
    assignors: Sequence[str],
    *,
    has_client_assignors: bool,
) -> GroupDescription:
    """Describes a consumer group; GROUP_ID_NOT_FOUND for any other group.

    Without `has_client_assignors` it shows nothing of client-side assignors, although the log may have them.
    Members are in descending order of their ids. The protocol has no order, but Kafka's own request test expects this.
    """
    if not group_id:
        return GroupDescription(ConsumerGroupDescribeResponse.DescribedGroup(error_code=Errors.INVALID_GROUP_ID))
    group = groups.get(group_id)
    if not isinstance(group, ConsumerGroup):
        text = f"Group {group_id} not found." if group is None else f"Group {group_id} is not a consumer group."
        failed_group = ConsumerGroupDescribeResponse.DescribedGroup(
            group_id=group_id, error_code=Errors.GROUP_ID_NOT_FOUND, error_message=text
        )
        return GroupDescription(failed_group)
    selection = select(group.offers()) if has_client_assignors and group.has_client_assignors else None
    assignor = group.preferred_server_assignor(assignors) if selection is None else selection.name
    computation = group.client_computation
    asked = computation.asked if computation is not None else None
    failed = group.failed_computations
    if failed is not None and (failed.assignor != assignor or group.assignment_epoch == group.group_epoch):
        failed = None
    described = ConsumerGroupDescribeResponse.DescribedGroup(
        group_id=group.group_id,
        group_state=group.state.value,
        group_epoch=group.group_epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=assignor,
        group_creation_time_ms=group.creation_time_ms,
        assignor_side=0 if selection is None else 1,
        computing_member_id="" if asked is None else asked.member_id,
        computing_until_ms=-1 if asked is None else asked.deadline_ms,
        failed_computations=0 if failed is None else failed.count,
        assignor_error="" if failed is None else failed.reason,
    )
    return GroupDescription(
        described,
        dict(group.members),
        dict(group.target_assignment),
        dict(group.target_metadata) if has_client_assignors else {},
        image,
        has_client_assignors,
    )


@dataclass(slots=True)
class GroupDescription:
    """A described group whose members are still to be described, from copies that do not change.

    So `complete` may run in a thread: it takes 10 us for each member.
    """

    group: ConsumerGroupDescribeResponse.DescribedGroup
    members: Mapping[str, ConsumerGroupMember] = field(default_factory=dict)
    _targets: Mapping[str, Assignment] = field(default_factory=dict)
    _target_metadata: Mapping[str, TargetMetadata] = field(default_factory=dict)
    _image: MetadataImage = field(default_factory=MetadataImage.empty)
    _has_client_assignors: bool = False

    def complete(self) -> ConsumerGroupDescribeResponse.DescribedGroup:
        """Returns the group with its members."""
        self.group.members = [self._member(member) for _, member in sorted(self.members.items(), reverse=True)]
        return self.group

    def topic_names(self) -> set[str]:
        """Returns the topics that the members own, or are to own."""
        topics = self._image.topics_by_id
        ids: set[bytes] = set()
        for member_id, member in self.members.items():
            ids.update(member.assigned, member.pending_revocation, self._targets.get(member_id, ()))
        return {topics[topic_id].name for topic_id in ids if topic_id in topics}

    def _member(self, member: ConsumerGroupMember) -> ConsumerGroupDescribeResponse.Member:
        return _member(
            member,
            self._targets.get(member.member_id, {}),
            self._target_metadata.get(member.member_id, NO_METADATA),
            self._image,
            has_client_assignors=self._has_client_assignors,
        )


def _member(
    member: ConsumerGroupMember,
    target: Assignment,
    target_metadata: TargetMetadata,
    image: MetadataImage,
    *,
    has_client_assignors: bool,
) -> ConsumerGroupDescribeResponse.Member:
    metadata = member.metadata if has_client_assignors else NO_METADATA
    described = ConsumerGroupDescribeResponse.Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.member_epoch,
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=list(member.subscribed_topic_names),
        subscribed_topic_regex=member.subscribed_topic_regex or "",
        assignment=_assignment(_owned(member), metadata, image),
        target_assignment=_assignment(target, target_metadata, image),
        member_type=MEMBER_TYPE_CONSUMER if member.classic is None else MEMBER_TYPE_CLASSIC,
    )
    if has_client_assignors and member.client_assignors:
        described.client_assignors = [
            ConsumerGroupDescribeResponse.ClientAssignor(
                name=assignor.name,
                minimum_version=assignor.minimum_version,
                maximum_version=assignor.maximum_version,
                reason=assignor.reason,
                metadata_version=assignor.metadata_version,
                metadata_bytes=assignor.metadata,
            )
            for assignor in member.client_assignors
        ]
    return described


def _owned(member: ConsumerGroupMember) -> Mapping[bytes, Collection[int]]:
    """Returns all partitions that the member owns, including those that it has yet to revoke."""
    topic_ids = member.assigned.keys() | member.pending_revocation.keys()
    return {
        topic_id: member.assigned.get(topic_id, {}).keys() | member.pending_revocation.get(topic_id, {}).keys()
        for topic_id in topic_ids
    }


def _assignment(
    assigned: Mapping[bytes, Collection[int]], metadata: TargetMetadata, image: MetadataImage
) -> ConsumerGroupDescribeResponse.Assignment:
    """Returns the assignment with topic names. Deleted topics have no name and are omitted."""
    topics = []
    for topic_id, partitions in sorted(assigned.items()):
        topic = image.topics_by_id.get(topic_id)
        if topic is not None:
            topics.append(
                ConsumerGroupDescribeResponse.TopicPartitions(
                    topic_id=topic_id, topic_name=topic.name, partitions=sorted(partitions)
                )
            )
    assignment = ConsumerGroupDescribeResponse.Assignment(topic_partitions=topics)
    if metadata is not NO_METADATA:
        assignment.error, assignment.metadata_version, assignment.metadata_bytes = metadata
    return assignment


MemberFields: TypeAlias = tuple[str, str | None, str, str, bytes, bytes]
"""Member id, instance id, client id, client host, metadata and assignment of a classic member."""


@dataclass(slots=True)
class ClassicDescription:
    """A described classic group whose members are still to be described, from fields that do not change.

    So `complete` may run in a thread.
    """

    group: DescribeGroupsResponse.DescribedGroup
    members: Sequence[MemberFields] = ()

    def complete(self) -> DescribeGroupsResponse.DescribedGroup:
        """Returns the group with its members."""
        self.group.members = [
            DescribeGroupsResponse.DescribedGroupMember(
                member_id=member_id,
                group_instance_id=instance_id,
                client_id=client_id,
                client_host=client_host,
                member_metadata=metadata,
                member_assignment=assignment,
            )
            for member_id, instance_id, client_id, client_host, metadata, assignment in self.members
        ]
        return self.group


def classic_group(groups: Mapping[str, Group], group_id: str, api_version: int) -> ClassicDescription:
    """Describes a classic group for DescribeGroups; any other group is Dead to this API.

    Member metadata is shown only if the group is Stable, the last assignments always (Kafka 4.3.1).
    """
    group = groups.get(group_id)
    if not isinstance(group, ClassicGroup):
        text = f"Group {group_id} not found." if group is None else f"Group {group_id} is not a classic group."
        return ClassicDescription(_no_classic_group(group_id, text, api_version))
    stable, protocol = group.state is GroupState.STABLE, group.protocol
    described = DescribeGroupsResponse.DescribedGroup(
        group_id=group.group_id,
        group_state=group.state.value,
        protocol_type=group.protocol_type,
        protocol_data=(protocol or "") if stable else "",
    )
    members = [
        (
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            member.metadata(protocol) if stable else b"",
            b"" if member.is_assignment_withdrawn else member.assignment,
        )
        for member in group.members.values()
    ]
    return ClassicDescription(described, members)


def _no_classic_group(group_id: str, text: str, api_version: int) -> DescribeGroupsResponse.DescribedGroup:
    """Describes a missing group as Dead; from version 6 on with GROUP_ID_NOT_FOUND."""
    response = DescribeGroupsResponse.DescribedGroup(group_id=group_id, group_state=GroupState.DEAD.value)
    if api_version >= 6:
        response.error_code = Errors.GROUP_ID_NOT_FOUND
        response.error_message = text
    return response


def listed_groups(
    groups: Iterable[Group], states_filter: list[str], types_filter: list[str]
) -> list[ListGroupsResponse.ListedGroup]:
    """Returns the groups that match both filters, which ignore case."""
    states, types = ({name.lower() for name in names} for names in (states_filter, types_filter))
    listed = []
    for group in groups:
        if types and group.type.value not in types:
            continue
        state = group.state.value
        if states and state.lower() not in states:
            continue
        listed.append(
            ListGroupsResponse.ListedGroup(
                group_id=group.group_id,
                protocol_type=group.protocol_type,
                group_state=state,
                group_type=group.type.value,
            )
        )
    return listed
