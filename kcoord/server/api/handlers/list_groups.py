# SPDX-License-Identifier: Apache-2.0
"""ListGroups: the groups of all shards of this broker, filtered by state (KIP-518) and type (KIP-848).

While a shard is loading, the response is COORDINATOR_LOAD_IN_PROGRESS, since the list would lack its groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply, gather_replies, map_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ListGroupsRequest, ListGroupsResponse

ListedGroup = ListGroupsResponse.ListedGroup

API_KEY = ApiKey.LIST_GROUPS
VERSIONS = range(0, 6)


def handle(broker: Broker, context: RequestContext, request: ListGroupsRequest) -> Reply[ListGroupsResponse]:
    if broker.groups.group_count > LARGE_RESPONSE_ITEMS:
        return broker.spawn(_list_in_turns(broker, context, request))
    replies = [_of_shard(broker, context, request, shard_id) for shard_id in broker.groups.shard_ids]
    return map_reply(
        gather_replies(replies), lambda parts: ListGroupsResponse(groups=_visible(context.rights, chain(*parts)))
    )


async def _list_in_turns(broker: Broker, context: RequestContext, request: ListGroupsRequest) -> ListGroupsResponse:
    """Lists the groups of each shard in a turn of its own. So groups may come and go meanwhile, as in Kafka."""
    groups: list[ListedGroup] = []
    for shard_id in list(broker.groups.shard_ids):
        part = _of_shard(broker, context, request, shard_id)
        groups += _visible(context.rights, await part if asyncio.isfuture(part) else part)
        await asyncio.sleep(0)
    return await broker.made_in_thread(lambda: ListGroupsResponse(groups=groups), context.api_version)


def _of_shard(
    broker: Broker, context: RequestContext, request: ListGroupsRequest, shard_id: int
) -> Reply[list[ListedGroup]]:
    return broker.groups.call_shard(shard_id, _list, request, context.operation_context())


def _list(
    shard: GroupCoordinatorShard, context: OperationContext, request: ListGroupsRequest
) -> CoordinatorResult[list[ListedGroup]]:
    return shard.list_groups(context, request.states_filter, request.types_filter)


def _visible(rights: Rights | None, groups: Iterable[ListedGroup]) -> list[ListedGroup]:
    groups = list(groups)
    if rights is None or rights.allows_cluster(AclOperation.DESCRIBE, logs_denial=False):
        return groups
    names = [group.group_id for group in groups]
    visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.GROUP, names, logs_denial=False)
    return [group for group in groups if group.group_id in visible]


def error_response(request: ListGroupsRequest, error: KafkaError, version: int) -> ListGroupsResponse:
    return ListGroupsResponse(error_code=error.error)
