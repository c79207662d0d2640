# SPDX-License-Identifier: Apache-2.0
"""DescribeConfigs: the configs of all kinds of resources.

These are topics, this broker, the dynamic defaults of all brokers, loggers, client metrics and groups.

An empty list of keys means all keys, as null does. Keys that do not exist are omitted (observed in Kafka 4.3.1).
"""

from __future__ import annotations

from kcoord.metadata import describe
from kcoord.metadata.describe import ConfigOrigin, DescribedConfig
from kcoord.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from kcoord.metadata.names import check_topic_name
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.config_rights import require_on_configs
from kcoord.server.broker import Broker
from kcoord.server.observe import broker_loggers
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeConfigsRequest, DescribeConfigsResponse

API_KEY = ApiKey.DESCRIBE_CONFIGS
VERSIONS = range(1, 5)

_DESCRIBED_TYPES = {TOPIC_RESOURCE, BROKER_RESOURCE, BROKER_LOGGER_RESOURCE, CLIENT_METRICS_RESOURCE, GROUP_RESOURCE}

Result = DescribeConfigsResponse.DescribeConfigsResult
Config = DescribeConfigsResponse.DescribeConfigsResourceResult


def handle(broker: Broker, context: RequestContext, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    for resource in request.resources:
        if resource.resource_type not in _DESCRIBED_TYPES:
            # As in Kafka, the whole request fails.
            raise KafkaError(Errors.INVALID_REQUEST, f"Unknown resource type {resource.resource_type}")
    return DescribeConfigsResponse(
        results=[_describe(broker, context.rights, request, resource) for resource in request.resources]
    )


def _describe(
    broker: Broker,
    rights: Rights | None,
    request: DescribeConfigsRequest,
    resource: DescribeConfigsRequest.DescribeConfigsResource,
) -> Result:
    result = Result(error_message="", resource_type=resource.resource_type, resource_name=resource.resource_name)
    try:
        if rights is not None:
            require_on_configs(rights, AclOperation.DESCRIBE_CONFIGS, resource.resource_type, resource.resource_name)
        entries = _entries(broker, resource.resource_type, resource.resource_name)
    except KafkaError as error:
        result.error_code, result.error_message = error.error, error.message or ""
        return result
    keys = set(resource.configuration_keys or ())
    result.configs = [_config(request, entry) for entry in entries if not keys or entry.name in keys]
    return result


def _entries(broker: Broker, kind: int, name: str) -> list[DescribedConfig]:
    image = broker.image
    if kind == TOPIC_RESOURCE:
        check_topic_name(name)
        if name not in image.topics:
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)
        return describe.topic_config_entries(broker.config, image, image.topic_configs(name))
    if kind == BROKER_RESOURCE:
        return _broker_entries(broker, name)
    if kind == BROKER_LOGGER_RESOURCE:
        return _logger_entries(broker, name)
    if not name:
        noun = "Group" if kind == GROUP_RESOURCE else "Client metrics subscription"
        raise KafkaError(Errors.INVALID_REQUEST, f"{noun} name must not be empty")
    if kind == GROUP_RESOURCE:
        return describe.group_config_entries(broker.config, image, name)
    return describe.client_metrics_entries(image, name)


def _broker_entries(broker: Broker, name: str) -> list[DescribedConfig]:
    if not name:
        return describe.cluster_config_entries(broker.image)
    if name != str(broker.node_id):
        text = f"Unexpected broker id, expected {broker.node_id} or empty string, but received {name}"
        raise KafkaError(Errors.INVALID_REQUEST, text)
    return describe.broker_config_entries(broker.config, broker.image)


def _logger_entries(broker: Broker, name: str) -> list[DescribedConfig]:
    broker_loggers.check_broker_name(name, broker.node_id)
    source = ConfigOrigin.DYNAMIC_BROKER_LOGGER_CONFIG
    return [
        DescribedConfig(logger, level, source, describe.UNKNOWN_TYPE, "")
        for logger, level in broker_loggers.logger_levels().items()
    ]


def _config(request: DescribeConfigsRequest, entry: DescribedConfig) -> Config:
    config = Config(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        config_type=entry.type,
        documentation=entry.doc if request.include_documentation else None,
    )
    if request.include_synonyms:
        config.synonyms = [
            DescribeConfigsResponse.DescribeConfigsSynonym(name=name, value=value, source=source)
            for name, value, source in entry.synonyms
        ]
    return config


def error_response(request: DescribeConfigsRequest, error: KafkaError, version: int) -> DescribeConfigsResponse:
    return DescribeConfigsResponse(
        results=[
            Result(
                error_code=error.error,
                error_message=error.message,
                resource_type=resource.resource_type,
                resource_name=resource.resource_name,
            )
            for resource in request.resources
        ]
    )
