# SPDX-License-Identifier: Apache-2.0
"""DeleteGroups (KIP-229): asks each group's shard; a group named twice gets one result, as in Kafka 4.3.1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.server.api.handlers.fan_out import ask_each_shard
from kcoord.server.broker import map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DeleteGroupsRequest, DeleteGroupsResponse

if TYPE_CHECKING:
    from kcoord.coordinator.group.shard import GroupCoordinatorShard
    from kcoord.runtime.result import CoordinatorResult, OperationContext
    from kcoord.server.api.request_context import RequestContext
    from kcoord.server.broker import Broker, Reply

    DeletableGroupResult = DeleteGroupsResponse.DeletableGroupResult

API_KEY = ApiKey.DELETE_GROUPS
VERSIONS = range(0, 4)


def handle(broker: Broker, context: RequestContext, request: DeleteGroupsRequest) -> Reply[DeleteGroupsResponse]:
    def operation(
        shard: GroupCoordinatorShard, operation_context: OperationContext, group_ids: list[str]
    ) -> CoordinatorResult[list[DeletableGroupResult]]:
        return shard.delete_groups(operation_context, group_ids)

    answers = ask_each_shard(
        broker, context, request.groups_names, operation, lambda group: group.group_id, _failed, repeats=False
    )
    return map_reply(answers, lambda results: DeleteGroupsResponse(results=results))


def _failed(group_id: str, error: KafkaError) -> DeletableGroupResult:
    return DeleteGroupsResponse.DeletableGroupResult(
        group_id=group_id, error_code=error.error, error_message=error.message
    )


def error_response(request: DeleteGroupsRequest, error: KafkaError, version: int) -> DeleteGroupsResponse:
    return DeleteGroupsResponse(results=[_failed(group_id, error) for group_id in request.groups_names])
