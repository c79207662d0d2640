# SPDX-License-Identifier: Apache-2.0
"""ListGroups: the groups of all shards of this broker, filtered by state (KIP-518) and type (KIP-848).

While a shard is loading, the response is COORDINATOR_LOAD_IN_PROGRESS, since the list would lack its groups.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ListGroupsRequest, ListGroupsResponse

ListedGroup = ListGroupsResponse.ListedGroup

API_KEY = ApiKey.LIST_GROUPS
VERSIONS = range(0, 6)


def handle(broker: Broker, context: RequestContext, request: ListGroupsRequest) -> Reply[ListGroupsResponse]:
    replies = [
        broker.groups.call_shard(shard_id, _list, request, context.operation_context())
        for shard_id in broker.groups.shard_ids
    ]
    return map_reply(gather_replies(replies), lambda parts: _respond(context.rights, parts))


def _list(
    shard: GroupCoordinatorShard, context: OperationContext, request: ListGroupsRequest
) -> CoordinatorResult[list[ListedGroup]]:
    return shard.list_groups(context, request.states_filter, request.types_filter)


def _respond(rights: Rights | None, parts: list[list[ListedGroup]]) -> ListGroupsResponse:
    groups = [group for part in parts for group in part]
    if rights is not None and not rights.allows_cluster(AclOperation.DESCRIBE, logs_denial=False):
        names = [group.group_id for group in groups]
        visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.GROUP, names, logs_denial=False)
        groups = [group for group in groups if group.group_id in visible]
    return ListGroupsResponse(groups=groups)


def error_response(request: ListGroupsRequest, error: KafkaError, version: int) -> ListGroupsResponse:
    return ListGroupsResponse(error_code=error.error)
