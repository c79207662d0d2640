# SPDX-License-Identifier: Apache-2.0
"""DescribeGroups: describes classic groups by their shards, in the order of the request."""

from __future__ import annotations

from kcoord.coordinator.group.describe import ClassicDescription
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import operations_on
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply, chain_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsRequest, DescribeGroupsResponse

DescribedGroup = DescribeGroupsResponse.DescribedGroup

API_KEY = ApiKey.DESCRIBE_GROUPS
VERSIONS = range(0, 7)

ERROR_MESSAGE_VERSION = 6


def handle(broker: Broker, context: RequestContext, request: DescribeGroupsRequest) -> Reply[DescribeGroupsResponse]:
    group_ids, refused = request.groups, []
    if context.rights is not None:
        allowed = context.rights.allowed(AclOperation.DESCRIBE, ResourceType.GROUP, request.groups)
        group_ids = [group_id for group_id in request.groups if group_id in allowed]
        refused = [
            _failed(group_id, KafkaError(Errors.GROUP_AUTHORIZATION_FAILED), context.api_version)
            for group_id in request.groups
            if group_id not in allowed
        ]

    def failed(group_id: str, error: KafkaError) -> ClassicDescription:
        return ClassicDescription(_failed(group_id, error, context.api_version))

    def respond(groups: list[ClassicDescription]) -> Reply[DescribeGroupsResponse]:
        if request.include_authorized_operations:
            for description in groups:
                group = description.group
                if group.error_code == 0:
                    group.authorized_operations = operations_on(context.rights, ResourceType.GROUP, group.group_id)

        def complete() -> DescribeGroupsResponse:
            return DescribeGroupsResponse(groups=refused + [group.complete() for group in groups])

        if sum(len(description.members) for description in groups) <= LARGE_RESPONSE_ITEMS:
            return complete()
        return broker.spawn(broker.made_in_thread(complete, context.api_version))

    answers = ask_each_shard(
        broker,
        broker.groups,
        context,
        group_ids,
        GroupCoordinatorShard.describe_groups,
        lambda description: description.group.group_id,
        failed,
    )
    return chain_reply(answers, respond)


def _failed(group_id: str, error: KafkaError, version: int) -> DescribedGroup:
    return DescribeGroupsResponse.DescribedGroup(
        group_id=group_id,
        error_code=error.error,
        error_message=error.message if version >= ERROR_MESSAGE_VERSION else None,
    )


def error_response(request: DescribeGroupsRequest, error: KafkaError, version: int) -> DescribeGroupsResponse:
    return DescribeGroupsResponse(groups=[_failed(group_id, error, version) for group_id in request.groups])
