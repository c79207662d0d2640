# SPDX-License-Identifier: Apache-2.0
"""Translates between local assignors and the messages of KIP-848. Pure.

Assignors see topic names, the messages have topic ids. Results of an assignor are checked only as far as the messages
need it. The coordinator checks that each partition is assigned once and to a subscriber.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kcoord.client.assignors import (
    AssignmentMemberSpec,
    AssignmentSpec,
    AssignmentTopicMetadata,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    Metadata,
    OfferedAssignor,
    PartitionAssignor,
)
from kcoord.client.errors import AssignorException
from kcoord.client.types import TopicPartition
from kcoord_protocol.messages import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

HIGHEST_CODE: Final = 127
"""The highest reason, and the highest error of an assignment."""


def spec_of(group_id: str, response: ConsumerGroupPrepareAssignmentResponse) -> AssignmentSpec:
    """Returns the group of a response to Prepare."""
    names = {topic.topic_id: topic.topic_name for topic in response.topics}
    members = {
        member.member_id: AssignmentMemberSpec(
            member.instance_id,
            member.rack_id,
            frozenset(names[topic_id] for topic_id in member.subscribed_topic_ids if topic_id in names),
            member.assignor.reason,
            Metadata(member.assignor.metadata_version, member.assignor.metadata_bytes),
            frozenset(
                TopicPartition(names[topic.topic_id], partition)
                for topic in member.topic_partitions
                # The target may still have topics that are deleted, or to which nobody subscribes any more.
                if topic.topic_id in names
                for partition in topic.partitions
            ),
        )
        for member in response.members
    }
    topics = {
        topic.topic_name: AssignmentTopicMetadata(
            topic.topic_id, topic.num_partitions, tuple(frozenset(partition.racks) for partition in topic.partitions)
        )
        for topic in response.topics
    }
    return AssignmentSpec(group_id, response.group_epoch, members, topics)


def offered_by(assignor: PartitionAssignor) -> OfferedAssignor:
    """Asks the assignor for its metadata. Raises AssignorException if that fails or if the metadata is invalid."""
    try:
        answer = assignor.metadata()
    except Exception as error:
        raise AssignorException(f"metadata() of the assignor {assignor.name} failed: {error!r}") from error
    lowest, highest = assignor.minimum_version, assignor.maximum_version
    if not _is_of_numbers_and_bytes(answer):
        raise AssignorException(
            f"metadata() of the assignor {assignor.name} returned {answer!r}, no AssignorMetadata of numbers and bytes"
        )
    if not lowest <= answer.metadata.version <= highest:
        raise AssignorException(
            f"metadata() of the assignor {assignor.name} has version {answer.metadata.version}; the versions of the "
            f"assignor are {lowest} to {highest}"
        )
    if not 0 <= answer.reason <= HIGHEST_CODE:
        raise AssignorException(
            f"metadata() of the assignor {assignor.name} has reason {answer.reason}; reasons are 0 to {HIGHEST_CODE}"
        )
    return OfferedAssignor(assignor.name, lowest, highest, answer.reason, Metadata(*answer.metadata))


def _is_of_numbers_and_bytes(answer: object) -> bool:
    """Returns whether a heartbeat can have it. Anything else would end the heartbeats of the consumer."""
    if not (isinstance(answer, AssignorMetadata) and isinstance(answer.metadata, Metadata)):
        return False
    values = (answer.metadata.version, answer.reason, answer.metadata.data)
    return all(isinstance(value, kind) for value, kind in zip(values, (int, int, bytes), strict=True))


def install_request(
    member_id: str, spec: AssignmentSpec, result: GroupAssignment
) -> ConsumerGroupInstallAssignmentRequest:
    """Returns the request that installs a result of `check_result`. The sender adds the epoch of the member."""
    return ConsumerGroupInstallAssignmentRequest(
        group_id=spec.group_id,
        member_id=member_id,
        group_epoch=spec.group_epoch,
        error=result.error,
        members=[
            _installed_member(spec, assigned_id, assignment)
            for assigned_id, assignment in sorted(result.members.items())
        ],
    )


def check_result(spec: AssignmentSpec, result: object) -> GroupAssignment:
    """Returns the result of an assignor. Raises AssignorException if the messages cannot have it."""
    if not isinstance(result, GroupAssignment):
        raise AssignorException(f"assign returned {type(result).__name__}, no GroupAssignment")
    if not 0 <= result.error <= HIGHEST_CODE:
        raise AssignorException(f"assign returned the error {result.error}; errors are 0 to {HIGHEST_CODE}")
    for member_id, assignment in result.members.items():
        if member_id not in spec.members:
            raise AssignorException(f"assign returned an assignment for {member_id!r}, which is not in the group")
        for topic, partition in assignment.target_partitions:
            if topic not in spec.topics:
                raise AssignorException(f"assign returned partition {partition} of {topic!r}, which is not in the spec")
    return result


def _installed_member(
    spec: AssignmentSpec, member_id: str, assignment: MemberAssignment
) -> ConsumerGroupInstallAssignmentRequest.Member:
    metadata = assignment.metadata or Metadata(spec.members[member_id].metadata.version)
    return ConsumerGroupInstallAssignmentRequest.Member(
        member_id=member_id,
        partitions=[
            ConsumerGroupInstallAssignmentRequest.TopicPartitions(topic_id=topic_id, partitions=partitions)
            for topic_id, partitions in _by_topic_id(spec, assignment.target_partitions).items()
        ],
        metadata_version=metadata.version,
        metadata_bytes=metadata.data,
    )


def _by_topic_id(spec: AssignmentSpec, partitions: Iterable[TopicPartition]) -> dict[bytes, list[int]]:
    topics: dict[bytes, list[int]] = {}
    # A partition that is assigned twice stays in the request twice, so that the coordinator rejects it.
    for topic, partition in sorted(partitions):
        topics.setdefault(spec.topics[topic].topic_id, []).append(partition)
    return topics
