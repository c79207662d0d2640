# SPDX-License-Identifier: Apache-2.0
"""ListGroups: the groups of all shards of this broker, filtered by state (KIP-518) and type (KIP-848).

While a shard is loading, the response is COORDINATOR_LOAD_IN_PROGRESS, since the list would lack its groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import attrgetter

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.fan_out import list_in_turns
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
    parts = await list_in_turns(
        broker.groups.shard_ids,
        lambda shard_id: broker.groups.call_shard(shard_id, _group_ids, request, context.operation_context()),
        lambda shard_id, group_ids: map_reply(
            _of_shard(broker, context, request, shard_id, group_ids), partial(_visible, context.rights)
        ),
    )

    def respond() -> ListGroupsResponse:
        for part in parts:
            part.sort(key=attrgetter("group_id"), reverse=True)
        return ListGroupsResponse(groups=list(chain(*parts)))

    return await broker.made_in_thread(respond, context.api_version)


def _group_ids(
    shard: GroupCoordinatorShard, context: OperationContext, request: ListGroupsRequest
) -> CoordinatorResult[list[str]]:
    return CoordinatorResult(shard.group_ids())


def _of_shard(
    broker: Broker,
    context: RequestContext,
    request: ListGroupsRequest,
    shard_id: int,
    group_ids: list[str] | None = None,
) -> Reply[list[ListedGroup]]:
    def list_groups(
        shard: GroupCoordinatorShard, context: OperationContext, request: ListGroupsRequest
    ) -> CoordinatorResult[list[ListedGroup]]:
        return shard.list_groups(context, request.states_filter, request.types_filter, group_ids)

    return broker.groups.call_shard(shard_id, list_groups, request, context.operation_context())


def _visible(rights: Rights | None, groups: Iterable[ListedGroup]) -> list[ListedGroup]:
    groups = list(groups)
    if rights is None or rights.allows_cluster(AclOperation.DESCRIBE, logs_denial=False):
        return groups
    names = [group.group_id for group in groups]
    visible = rights.allowed(AclOperation.DESCRIBE, ResourceType.GROUP, names, logs_denial=False)
    return [group for group in groups if group.group_id in visible]


def error_response(request: ListGroupsRequest, error: KafkaError, version: int) -> ListGroupsResponse:
    return ListGroupsResponse(error_code=error.error)
