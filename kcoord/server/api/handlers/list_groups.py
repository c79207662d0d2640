# SPDX-License-Identifier: Apache-2.0
"""ListGroups: every shard's groups, filtered by state (KIP-518) and type (KIP-848).

A shard that is still loading makes the whole answer COORDINATOR_LOAD_IN_PROGRESS: a list that silently lacks groups
would be a guess.
"""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
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
    return map_reply(gather_replies(replies), _respond)


def _list(
    shard: GroupCoordinatorShard, context: OperationContext, request: ListGroupsRequest
) -> CoordinatorResult[list[ListedGroup]]:
    return shard.list_groups(context, request.states_filter, request.types_filter)


def _respond(parts: list[list[ListedGroup]]) -> ListGroupsResponse:
    return ListGroupsResponse(groups=[group for part in parts for group in part])


def error_response(request: ListGroupsRequest, error: KafkaError, version: int) -> ListGroupsResponse:
    return ListGroupsResponse(error_code=error.error)
