# SPDX-License-Identifier: Apache-2.0
"""DeleteGroups (KIP-229): asks each group's shard; a group named twice gets one result, as in Kafka 4.3.1."""

from __future__ import annotations

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.fan_out import ask_each_shard
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse

DeletableGroupResult = DeleteGroupsResponse.DeletableGroupResult

API_KEY = ApiKey.DELETE_GROUPS
VERSIONS = range(0, 4)


def handle(broker: Broker, context: RequestContext, request: DeleteGroupsRequest) -> Reply[DeleteGroupsResponse]:
    answers = ask_each_shard(
        broker,
        context,
        request.groups_names,
        GroupCoordinatorShard.delete_groups,
        lambda group: group.group_id,
        _failed,
        repeats=False,
    )
    return map_reply(answers, lambda results: DeleteGroupsResponse(results=results))


def _failed(group_id: str, error: KafkaError) -> DeletableGroupResult:
    return DeleteGroupsResponse.DeletableGroupResult(
        group_id=group_id, error_code=error.error, error_message=error.message
    )


def error_response(request: DeleteGroupsRequest, error: KafkaError, version: int) -> DeleteGroupsResponse:
    return DeleteGroupsResponse(results=[_failed(group_id, error) for group_id in request.groups_names])
