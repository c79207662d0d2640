# SPDX-License-Identifier: Apache-2.0
"""Groups: list, describe and delete them.

A description begins with ConsumerGroupDescribe. If the coordinator returns GROUP_ID_NOT_FOUND or UNSUPPORTED_VERSION,
the group may be a classic one, and the client sends DescribeGroups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from kcoord.client.admin.model import (
    AssignmentMetadata,
    ConsumerGroupDescription,
    GroupListing,
    MemberDescription,
    authorized_operations,
    known_time,
)
from kcoord.client.assignors import Metadata, OfferedAssignor
from kcoord.client.cluster import Cluster, CoordinatorType, Deadline, Purpose
from kcoord.client.connection import Connection
from kcoord.client.creation_time import group_creation_time_ms
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord.client.types import Node, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)

V = TypeVar("V")

CONSUMER_PROTOCOL_TYPE: Final = "consumer"
CONSUMER_TYPE: Final = "Consumer"
CLASSIC_TYPE: Final = "Classic"
DEAD_STATE: Final = "Dead"

_FIRST_VERSION_WITH_STATES: Final = 4
_FIRST_VERSION_WITH_TYPES: Final = 5
_CONSUMER_MEMBER: Final = 1
_CLIENT_SIDE: Final = 1

AskCoordinator = Callable[[Connection, Node, list[str]], Awaitable[Mapping[str, V | KafkaError]]]


async def ask_coordinators(cluster: Cluster, group_ids: list[str], ask: AskCoordinator[V]) -> dict[str, V | KafkaError]:
    """Sends one request to each coordinator, about all of its groups.

    A retriable error makes the client forget the group's coordinator, so that the next attempt looks it up again.
    """
    coordinators = await cluster.find_coordinators(CoordinatorType.GROUP, group_ids)
    outcomes: dict[str, V | KafkaError] = {}
    by_node: dict[Node, list[str]] = {}
    for group_id, node in coordinators.items():
        if isinstance(node, KafkaError):
            outcomes[group_id] = node
        else:
            by_node.setdefault(node, []).append(group_id)
    for node, asked in by_node.items():
        outcomes.update(await _ask_coordinator(cluster, node, asked, ask))
    for group_id, outcome in outcomes.items():
        if isinstance(outcome, KafkaError) and outcome.error.retriable:
            cluster.forget_coordinator(CoordinatorType.GROUP, group_id)
    return outcomes


async def _ask_coordinator(
    cluster: Cluster, node: Node, group_ids: list[str], ask: AskCoordinator[V]
) -> Mapping[str, V | KafkaError]:
    try:
        return await ask(await cluster.connection(node.node_id, Purpose.COORDINATOR), node, group_ids)
    except KafkaError as error:
        return dict.fromkeys(group_ids, error)


async def list_groups(cluster: Cluster, states: Iterable[str], types: Iterable[str]) -> list[GroupListing]:
    """Returns the groups of all brokers: each broker lists only the groups that it coordinates."""
    await cluster.refresh_metadata(())
    wanted_states, wanted_types = sorted(set(states)), sorted(set(types))
    answers = await asyncio.gather(
        *(_list_groups_of(cluster, node_id, wanted_states, wanted_types) for node_id in cluster.metadata.brokers)
    )
    listings = {listing.group_id: listing for answer in answers for listing in answer}
    return [listings[group_id] for group_id in sorted(listings)]


async def _list_groups_of(cluster: Cluster, node_id: int, states: list[str], types: list[str]) -> list[GroupListing]:
    lowest = _FIRST_VERSION_WITH_TYPES if types else _FIRST_VERSION_WITH_STATES if states else 0
    connection = await cluster.connection(node_id)
    request = ListGroupsRequest(states_filter=states, types_filter=types)
    response = await connection.call(request, ListGroupsResponse, lowest=lowest)
    if response.error_code:
        raise KafkaError(error_of(response.error_code))
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type.capitalize())
        for group in response.groups
    ]


async def describe_groups(
    cluster: Cluster, deadline: Deadline, group_ids: Iterable[str], include_authorized_operations: bool
) -> dict[str, ConsumerGroupDescription | KafkaError]:
    async def as_consumer(
        connection: Connection, node: Node, asked: list[str]
    ) -> Mapping[str, ConsumerGroupDescription | KafkaError]:
        if not connection.versions.offers(ApiKey.CONSUMER_GROUP_DESCRIBE):
            return await as_classic(connection, node, asked)
        request = ConsumerGroupDescribeRequest(
            group_ids=asked, include_authorized_operations=include_authorized_operations
        )
        response = await connection.call(request, ConsumerGroupDescribeResponse)
        outcomes: dict[str, ConsumerGroupDescription | KafkaError] = {
            group.group_id: outcome_of(group.error_code, group.error_message, _from_consumer(group, node))
            for group in response.groups
        }
        classic_ids = [group_id for group_id in asked if _may_be_classic(outcomes.get(group_id))]
        if classic_ids:
            outcomes |= await as_classic(connection, node, classic_ids)
        return outcomes

    async def as_classic(
        connection: Connection, node: Node, asked: list[str]
    ) -> Mapping[str, ConsumerGroupDescription | KafkaError]:
        request = DescribeGroupsRequest(groups=asked, include_authorized_operations=include_authorized_operations)
        response = await connection.call(request, DescribeGroupsResponse)
        return {group.group_id: _from_classic(group, node) for group in response.groups}

    async def attempt(pending: list[str]) -> Mapping[str, ConsumerGroupDescription | KafkaError]:
        return await ask_coordinators(cluster, pending, as_consumer)

    return await repeat(cluster, deadline, group_ids, attempt)


def _may_be_classic(outcome: ConsumerGroupDescription | KafkaError | None) -> bool:
    return isinstance(outcome, KafkaError) and outcome.error in (Errors.GROUP_ID_NOT_FOUND, Errors.UNSUPPORTED_VERSION)


def _from_consumer(group: ConsumerGroupDescribeResponse.DescribedGroup, node: Node) -> ConsumerGroupDescription:
    return ConsumerGroupDescription(
        group.group_id,
        CONSUMER_TYPE,
        group.group_state,
        CONSUMER_PROTOCOL_TYPE,
        group.assignor_name,
        [_consumer_member(member) for member in group.members],
        node,
        group.group_epoch,
        group.assignment_epoch,
        known_time(group_creation_time_ms(group)),
        authorized_operations(group.authorized_operations),
        group.failed_computations,
        group.assignor_error or None,
        group.assignor_side == _CLIENT_SIDE,
        group.computing_member_id or None,
        group.computing_until_ms if group.computing_until_ms >= 0 else None,
    )


def _consumer_member(member: ConsumerGroupDescribeResponse.Member) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.instance_id,
        member.client_id,
        member.client_host,
        _partitions(member.assignment),
        member.rack_id,
        member.member_epoch,
        _partitions(member.target_assignment),
        tuple(member.subscribed_topic_names),
        member.subscribed_topic_regex or None,
        None if member.member_type < 0 else member.member_type == _CONSUMER_MEMBER,
        assignment_metadata=_metadata(member.assignment),
        target_metadata=_metadata(member.target_assignment),
        client_assignors=tuple(
            OfferedAssignor(
                assignor.name,
                assignor.minimum_version,
                assignor.maximum_version,
                assignor.reason,
                Metadata(assignor.metadata_version, assignor.metadata_bytes),
            )
            for assignor in member.client_assignors
        ),
    )


def _metadata(assignment: ConsumerGroupDescribeResponse.Assignment) -> AssignmentMetadata:
    return AssignmentMetadata(assignment.error, assignment.metadata_version, assignment.metadata_bytes)


def _partitions(assignment: ConsumerGroupDescribeResponse.Assignment) -> frozenset[TopicPartition]:
    return frozenset(
        TopicPartition(topic.topic_name, partition)
        for topic in assignment.topic_partitions
        for partition in topic.partitions
    )


def _from_classic(group: DescribeGroupsResponse.DescribedGroup, node: Node) -> ConsumerGroupDescription | KafkaError:
    """Converts a group of DescribeGroups. Before v6 a group that does not exist is Dead and has no error."""
    if group.error_code:
        return KafkaError(error_of(group.error_code), group.error_message)
    if group.group_state == DEAD_STATE:
        return KafkaError(Errors.GROUP_ID_NOT_FOUND, f"Group {group.group_id} not found.")
    is_consumer = group.protocol_type in ("", CONSUMER_PROTOCOL_TYPE)
    return ConsumerGroupDescription(
        group.group_id,
        CLASSIC_TYPE,
        group.group_state,
        group.protocol_type,
        group.protocol_data,
        [_classic_member(member, is_consumer) for member in group.members],
        node,
        authorized_operations=authorized_operations(group.authorized_operations),
    )


def _classic_member(member: DescribeGroupsResponse.DescribedGroupMember, is_consumer: bool) -> MemberDescription:
    topics = _classic_subscription(member.member_metadata) if is_consumer and member.member_metadata else ()
    return MemberDescription(
        member.member_id,
        member.group_instance_id,
        member.client_id,
        member.client_host,
        _classic_assignment(member.member_assignment) if is_consumer else frozenset(),
        subscribed_topic_names=topics or (),
        has_unreadable_subscription=topics is None,
    )


def _classic_assignment(data: bytes) -> frozenset[TopicPartition]:
    """Returns the partitions of an assignment that the group's leader wrote.

    Bytes in another format than the consumer's count as an empty assignment. Reads version 0, as
    `_classic_subscription` does.
    """
    try:
        assignment, _ = ConsumerProtocolAssignment.decode_prefix(data, 2, 0)
    except DecodeError:
        return frozenset()
    return frozenset(
        TopicPartition(topic.topic, partition)
        for topic in assignment.assigned_partitions
        for partition in topic.partitions
    )


def _classic_subscription(data: bytes) -> tuple[str, ...] | None:
    """Returns the subscribed topics, None if the bytes are not a subscription.

    Reads version 0, as brokers do: every version begins with the fields of version 0.
    """
    try:
        subscription, _ = ConsumerProtocolSubscription.decode_prefix(data, 2, 0)
    except DecodeError:
        return None
    return tuple(subscription.topics)


async def delete_groups(cluster: Cluster, deadline: Deadline, group_ids: Iterable[str]) -> dict[str, KafkaError | None]:
    async def ask(connection: Connection, _: Node, asked: list[str]) -> Mapping[str, KafkaError | None]:
        response = await connection.call(DeleteGroupsRequest(groups_names=asked), DeleteGroupsResponse)
        return {
            result.group_id: outcome_of(result.error_code, result.error_message, None) for result in response.results
        }

    async def attempt(pending: list[str]) -> Mapping[str, KafkaError | None]:
        return await ask_coordinators(cluster, pending, ask)

    return await repeat(cluster, deadline, group_ids, attempt)
