# SPDX-License-Identifier: Apache-2.0
"""IncrementalAlterConfigs (KIP-339): changes loggers of this broker here, all other resources in the metadata log."""

from __future__ import annotations

from kcoord.metadata.collect import duplicates
from kcoord.metadata.image import BROKER_LOGGER_RESOURCE
from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.config_rights import split_alterable
from kcoord.server.broker import Broker
from kcoord.server.observe import broker_loggers
from kcoord.server.replies import Reply, map_reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse

API_KEY = ApiKey.INCREMENTAL_ALTER_CONFIGS
VERSIONS = range(0, 2)

Resource = IncrementalAlterConfigsRequest.AlterConfigsResource
Result = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse


def handle(
    broker: Broker, context: RequestContext, request: IncrementalAlterConfigsRequest
) -> Reply[IncrementalAlterConfigsResponse]:
    refused: list[Result] = []
    if context.rights is not None:
        request.resources, not_allowed = split_alterable(context.rights, request.resources)
        refused = [_failed(resource, error) for resource, error in not_allowed]
        if not request.resources:
            return IncrementalAlterConfigsResponse(responses=refused)
    logged = [resource for resource in request.resources if resource.resource_type == BROKER_LOGGER_RESOURCE]
    stored = [resource for resource in request.resources if resource.resource_type != BROKER_LOGGER_RESOURCE]
    results = _alter_loggers(broker, logged, request.validate_only) + refused
    if logged and not stored:
        return IncrementalAlterConfigsResponse(responses=results)
    remaining = IncrementalAlterConfigsRequest(resources=stored, validate_only=request.validate_only)
    reply = broker.metadata.call(MetadataMachine.incremental_alter_configs, remaining, context.operation_context())
    return map_reply(reply, lambda answer: IncrementalAlterConfigsResponse(responses=answer.responses + results))


def _alter_loggers(broker: Broker, resources: list[Resource], validate_only: bool) -> list[Result]:
    results = []
    repeated = duplicates(resource.resource_name for resource in resources)
    for resource in resources:
        result = Result(error_message=None, resource_type=resource.resource_type, resource_name=resource.resource_name)
        try:
            if resource.resource_name in repeated:
                raise KafkaError(Errors.INVALID_REQUEST, "Each resource must appear at most once.")
            broker_loggers.alter_levels(
                resource.resource_name, broker.node_id, resource.configs, validate_only=validate_only
            )
        except KafkaError as error:
            result.error_code, result.error_message = error.error, error.message
        results.append(result)
    return results


def _failed(resource: Resource, error: KafkaError) -> Result:
    return Result(
        error_code=error.error,
        error_message=error.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )


def error_response(
    request: IncrementalAlterConfigsRequest, error: KafkaError, version: int
) -> IncrementalAlterConfigsResponse:
    return IncrementalAlterConfigsResponse(responses=[_failed(resource, error) for resource in request.resources])
