# SPDX-License-Identifier: Apache-2.0
"""AlterConfigs: replaces all configs of a resource. KIP-339 put IncrementalAlterConfigs in its place."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterConfigsRequest, AlterConfigsResponse

API_KEY = ApiKey.ALTER_CONFIGS
VERSIONS = range(0, 3)


def handle(broker: Broker, context: RequestContext, request: AlterConfigsRequest) -> Reply[AlterConfigsResponse]:
    return broker.metadata.call(MetadataMachine.alter_configs, request, context.operation_context())


def error_response(request: AlterConfigsRequest, error: KafkaError, version: int) -> AlterConfigsResponse:
    return AlterConfigsResponse(
        responses=[
            AlterConfigsResponse.AlterConfigsResourceResponse(
                error_code=error.error,
                error_message=error.message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        ]
    )
