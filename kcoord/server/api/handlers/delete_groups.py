# SPDX-License-Identifier: Apache-2.0
"""DeleteGroups (KIP-229): deletes groups on their shards.

A group that is named twice gets one result, as in Kafka 4.3.1.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import denied
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse

DeletableGroupResult = DeleteGroupsResponse.DeletableGroupResult

API_KEY = ApiKey.DELETE_GROUPS
VERSIONS = range(0, 4)


def handle(broker: Broker, context: RequestContext, request: DeleteGroupsRequest) -> Reply[DeleteGroupsResponse]:
    names = list(dict.fromkeys(request.groups_names))
    refused: list[DeletableGroupResult] = []
    if context.rights is not None:
        allowed = context.rights.allowed(AclOperation.DELETE, ResourceType.GROUP, names)
        refused = [_failed(name, denied(ResourceType.GROUP)) for name in names if name not in allowed]
        names = [name for name in names if name in allowed]
    answers = ask_each_shard(
        broker,
        broker.groups,
        context,
        names,
        GroupCoordinatorShard.delete_groups,
        lambda group: group.group_id,
        _failed,
        repeats=False,
    )
    return map_reply(answers, lambda results: DeleteGroupsResponse(results=results + refused))


def _failed(group_id: str, error: KafkaError) -> DeletableGroupResult:
    return DeleteGroupsResponse.DeletableGroupResult(
        group_id=group_id, error_code=error.error, error_message=error.message
    )


def error_response(request: DeleteGroupsRequest, error: KafkaError, version: int) -> DeleteGroupsResponse:
    return DeleteGroupsResponse(results=[_failed(group_id, error) for group_id in request.groups_names])
