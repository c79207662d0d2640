# SPDX-License-Identifier: Apache-2.0
"""AlterConfigs: replaces all configs of a resource. IncrementalAlterConfigs (KIP-339) supersedes it."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.config_rights import split_alterable
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterConfigsRequest, AlterConfigsResponse

API_KEY = ApiKey.ALTER_CONFIGS
VERSIONS = range(0, 3)

Resource = AlterConfigsRequest.AlterConfigsResource
Result = AlterConfigsResponse.AlterConfigsResourceResponse


def handle(broker: Broker, context: RequestContext, request: AlterConfigsRequest) -> Reply[AlterConfigsResponse]:
    refused: list[Result] = []
    if context.rights is not None:
        request.resources, not_allowed = split_alterable(context.rights, request.resources)
        refused = [_failed(resource, error) for resource, error in not_allowed]
        if not request.resources:
            return AlterConfigsResponse(responses=refused)
    reply = broker.metadata.call(MetadataMachine.alter_configs, request, context.operation_context())
    return map_reply(reply, lambda answer: AlterConfigsResponse(responses=answer.responses + refused))


def _failed(resource: Resource, error: KafkaError) -> Result:
    return Result(
        error_code=error.error,
        error_message=error.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


def error_response(request: AlterConfigsRequest, error: KafkaError, version: int) -> AlterConfigsResponse:
    return AlterConfigsResponse(responses=[_failed(resource, error) for resource in request.resources])
