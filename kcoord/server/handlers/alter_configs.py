# SPDX-License-Identifier: Apache-2.0
"""AlterConfigs: replaces all configs of a resource. KIP-339 put IncrementalAlterConfigs in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.server.metadata_operations import AlterConfigs
from protocol.api_keys import ApiKey
from protocol.errors import KafkaError
from protocol.messages import AlterConfigsRequest, AlterConfigsResponse

if TYPE_CHECKING:
    from kcoord.server.broker import Broker, Reply
    from kcoord.server.request_context import RequestContext

API_KEY = ApiKey.ALTER_CONFIGS
VERSIONS = range(0, 3)


def handle(broker: Broker, context: RequestContext, request: AlterConfigsRequest) -> Reply[AlterConfigsResponse]:
    return broker.metadata.run(AlterConfigs(request), context.operation_context(candidate=False))


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
