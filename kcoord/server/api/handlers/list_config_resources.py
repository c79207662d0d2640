# SPDX-License-Identifier: Apache-2.0
"""ListConfigResources (KIP-1142): v0 lists client metrics only, v1 any type. Only groups with configs are listed."""

from __future__ import annotations

from kcoord.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ListConfigResourcesRequest, ListConfigResourcesResponse

API_KEY = ApiKey.LIST_CONFIG_RESOURCES
VERSIONS = range(0, 2)

FIRST_VERSION_WITH_TYPES = 1
ALL_TYPES = (GROUP_RESOURCE, CLIENT_METRICS_RESOURCE, BROKER_LOGGER_RESOURCE, BROKER_RESOURCE, TOPIC_RESOURCE)


def handle(broker: Broker, context: RequestContext, request: ListConfigResourcesRequest) -> ListConfigResourcesResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE_CONFIGS)
    if context.api_version < FIRST_VERSION_WITH_TYPES:
        kinds = {CLIENT_METRICS_RESOURCE}
    else:
        kinds = set(request.resource_types) or set(ALL_TYPES)
    if not kinds.issubset(ALL_TYPES):
        raise KafkaError(Errors.UNSUPPORTED_VERSION)
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponse.ConfigResource(resource_name=name, resource_type=kind)
            for kind in ALL_TYPES
            if kind in kinds
            for name in _names(broker, kind)
        ]
    )


def _names(broker: Broker, kind: int) -> list[str]:
    if kind == TOPIC_RESOURCE:
        return sorted(broker.image.topics)
    if kind in (BROKER_RESOURCE, BROKER_LOGGER_RESOURCE):
        return [str(broker_id) for broker_id in sorted({broker.node_id, *broker.image.brokers})]
    return broker.image.resource_names(kind)


def error_response(request: ListConfigResourcesRequest, error: KafkaError, version: int) -> ListConfigResourcesResponse:
    return ListConfigResourcesResponse(error_code=error.error)
