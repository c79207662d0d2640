# SPDX-License-Identifier: Apache-2.0
"""ConsumerGroupDescribe (KIP-848): describes groups by their shards, in the order of the request.

v2 adds the group's creation time (KIP-1327). Connections of the form `creation-time` get it in v1, too, as a tagged
field of each group.
"""

from __future__ import annotations

from kcoord.coordinator.group.describe import GroupDescription
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext, creation_time_tag, has_creation_time_tag
from kcoord.server.api.authorization import Rights
from kcoord.server.api.authorized_operations import operations_on
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.api.handlers.consumer_group_heartbeat import check_consumer_protocol
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply, chain_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse

DescribedGroup = ConsumerGroupDescribeResponse.DescribedGroup

API_KEY = ApiKey.CONSUMER_GROUP_DESCRIBE
VERSIONS = range(0, 3)

_HIDDEN_TOPICS = "The group has described topic(s) that the client is not authorized to describe."


def handle(
    broker: Broker, context: RequestContext, request: ConsumerGroupDescribeRequest
) -> Reply[ConsumerGroupDescribeResponse]:
    check_consumer_protocol(broker)
    rights, group_ids = context.rights, request.group_ids
    refused: list[DescribedGroup] = []
    if rights is not None:
        allowed = rights.allowed(AclOperation.DESCRIBE, ResourceType.GROUP, group_ids)
        refused = [
            ConsumerGroupDescribeResponse.DescribedGroup(
                group_id=group_id, error_code=Errors.GROUP_AUTHORIZATION_FAILED
            )
            for group_id in group_ids
            if group_id not in allowed
        ]
        group_ids = [group_id for group_id in group_ids if group_id in allowed]

    def failed(group_id: str, error: KafkaError) -> GroupDescription:
        return GroupDescription(
            ConsumerGroupDescribeResponse.DescribedGroup(
                group_id=group_id, error_code=error.error, error_message=error.message
            )
        )

    def respond(groups: list[GroupDescription]) -> Reply[ConsumerGroupDescribeResponse]:
        if request.include_authorized_operations:
            for description in groups:
                group = description.group
                if group.error_code == 0:
                    group.authorized_operations = operations_on(rights, ResourceType.GROUP, group.group_id)
        if rights is not None:
            groups = _without_hidden_topics(rights, groups)
        if has_creation_time_tag(context):
            for description in groups:
                group = description.group
                group.unknown_tagged_fields = creation_time_tag(group.group_creation_time_ms)

        def complete() -> ConsumerGroupDescribeResponse:
            return ConsumerGroupDescribeResponse(groups=refused + [group.complete() for group in groups])

        if sum(len(description.members) for description in groups) <= LARGE_RESPONSE_ITEMS:
            return complete()
        return broker.spawn(broker.made_in_thread(complete, context.api_version))

    answers = ask_each_shard(
        broker,
        broker.groups,
        context,
        group_ids,
        GroupCoordinatorShard.consumer_group_describe,
        lambda description: description.group.group_id,
        failed,
    )
    return chain_reply(answers, respond)


def _without_hidden_topics(rights: Rights, groups: list[GroupDescription]) -> list[GroupDescription]:
    """Replaces each group with an assigned topic that the client may not describe by an error."""
    topics = [description.topic_names() for description in groups]
    visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, set().union(*topics))
    return [
        description
        if names <= visible
        else GroupDescription(
            ConsumerGroupDescribeResponse.DescribedGroup(
                group_id=description.group.group_id,
                error_code=Errors.TOPIC_AUTHORIZATION_FAILED,
                error_message=_HIDDEN_TOPICS,
            )
        )
        for description, names in zip(groups, topics, strict=True)
    ]


def error_response(
    request: ConsumerGroupDescribeRequest, error: KafkaError, version: int
) -> ConsumerGroupDescribeResponse:
    return ConsumerGroupDescribeResponse(
        groups=[
            ConsumerGroupDescribeResponse.DescribedGroup(
                group_id=group_id, error_code=error.error, error_message=error.message
            )
            for group_id in request.group_ids
        ]
    )
