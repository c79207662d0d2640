# SPDX-License-Identifier: Apache-2.0
"""DescribeConfigs: the configs of all kinds of resources.

These are topics, this broker, the dynamic defaults of all brokers, loggers, client metrics and groups.

An empty list of keys means all keys, as null does. Keys that do not exist are omitted (observed in Kafka 4.3.1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Final

from kcoord.metadata import describe
from kcoord.metadata import image as image_module
from kcoord.metadata.describe import ConfigOrigin, DescribedConfig
from kcoord.metadata.names import check_node_id, check_topic_name
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.config_rights import require_on_configs
from kcoord.server.broker import Broker
from kcoord.server.observe import broker_loggers
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeConfigsRequest, DescribeConfigsResponse

API_KEY = ApiKey.DESCRIBE_CONFIGS
VERSIONS = range(1, 5)

RESOURCES_PER_TURN: Final = 20
"""The number of resources that one turn of the event loop describes, in a few milliseconds."""
MOST_CONFIGS: Final = 2_000_000
"""The largest number of configs in a response: those of 50,000 topics.

A request of a few bytes for each resource gets some KB for each, so it could use up all memory.
"""

_BROKER_TYPES: Final = (image_module.BROKER_RESOURCE, image_module.BROKER_LOGGER_RESOURCE)
_DESCRIBED_TYPES: Final = (
    image_module.TOPIC_RESOURCE,
    image_module.CLIENT_METRICS_RESOURCE,
    image_module.GROUP_RESOURCE,
    *_BROKER_TYPES,
)

Resource = DescribeConfigsRequest.DescribeConfigsResource
Result = DescribeConfigsResponse.DescribeConfigsResult
Config = DescribeConfigsResponse.DescribeConfigsResourceResult


def handle(broker: Broker, context: RequestContext, request: DescribeConfigsRequest) -> Reply[DescribeConfigsResponse]:
    for resource in request.resources:
        if resource.resource_type not in _DESCRIBED_TYPES:
            # As in Kafka, the whole request fails.
            raise KafkaError(Errors.INVALID_REQUEST, Errors.INVALID_REQUEST.description)
    descriptions = _Descriptions(broker, context.rights, request)
    if len(request.resources) > RESOURCES_PER_TURN:
        return broker.spawn(_describe_many(broker, descriptions, request, context.api_version))
    return DescribeConfigsResponse(results=[descriptions.result_of(resource) for resource in request.resources])


async def _describe_many(
    broker: Broker, descriptions: _Descriptions, request: DescribeConfigsRequest, version: int
) -> DescribeConfigsResponse:
    """Describes many resources in several turns of the event loop. A thread encodes the response."""
    response = DescribeConfigsResponse()
    count = 0
    for start in range(0, len(request.resources), RESOURCES_PER_TURN):
        results = [
            descriptions.result_of(resource) for resource in request.resources[start : start + RESOURCES_PER_TURN]
        ]
        count += sum([len(result.configs) for result in results])
        if count > MOST_CONFIGS:
            text = f"The response would have more than {MOST_CONFIGS} configs: describe fewer resources at once."
            raise KafkaError(Errors.INVALID_REQUEST, text)
        response.results += results
        await asyncio.sleep(0)
    return await broker.made_in_thread(lambda: response, version)


class _Descriptions:
    """Describes the resources of one request. Resources with equal configs share their entries."""

    def __init__(self, broker: Broker, rights: Rights | None, request: DescribeConfigsRequest) -> None:
        self._broker = broker
        self._rights = rights
        self._request = request
        self._shared: dict[Hashable, list[Config]] = {}

    def result_of(self, resource: Resource) -> Result:
        kind, name = resource.resource_type, resource.resource_name
        result = Result(error_message="", resource_type=kind, resource_name=name)
        try:
            if self._rights is not None:
                require_on_configs(self._rights, AclOperation.DESCRIBE_CONFIGS, kind, name)
            _check_resource(self._broker, kind, name)
            result.configs = self._configs(kind, name, frozenset(resource.configuration_keys or ()))
        except KafkaError as error:
            result.error_code, result.error_message = error.error, error.message or ""
        return result

    def _configs(self, kind: int, name: str, keys: frozenset[str]) -> list[Config]:
        own = self._broker.image.configs.get((kind, name), {})
        description = kind, name if kind in _BROKER_TYPES else tuple(sorted(own.items())), keys
        configs = self._shared.get(description)
        if configs is None:
            entries = _entries(self._broker, kind, name)
            configs = [_config(self._request, entry) for entry in entries if not keys or entry.name in keys]
            self._shared[description] = configs
        return configs


def _check_resource(broker: Broker, kind: int, name: str) -> None:
    """Raises KafkaError if the resource cannot be described."""
    match kind:
        case image_module.TOPIC_RESOURCE:
            check_topic_name(name)
            if name not in broker.image.topics:
                raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)
        case image_module.BROKER_RESOURCE if name:
            _check_broker(broker, name, " or empty string,")
        case image_module.BROKER_LOGGER_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Broker id must not be empty")
        case image_module.BROKER_LOGGER_RESOURCE:
            _check_broker(broker, name, "")
        case image_module.GROUP_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Group name must not be empty")
        case image_module.CLIENT_METRICS_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Client metrics subscription name must not be empty")


def _check_broker(broker: Broker, name: str, also: str) -> None:
    check_node_id(name, "Broker id")
    if name != str(broker.node_id):
        text = f"Unexpected broker id, expected {broker.node_id}{also} but received {name}"
        raise KafkaError(Errors.INVALID_REQUEST, text)


def _entries(broker: Broker, kind: int, name: str) -> list[DescribedConfig]:
    config, image = broker.config, broker.image
    match kind:
        case image_module.TOPIC_RESOURCE:
            return describe.topic_config_entries(config, image, image.topic_configs(name))
        case image_module.BROKER_RESOURCE:
            return describe.broker_config_entries(config, image) if name else describe.cluster_config_entries(image)
        case image_module.BROKER_LOGGER_RESOURCE:
            return _logger_entries()
        case image_module.GROUP_RESOURCE:
            return describe.group_config_entries(config, image, name)
    return describe.client_metrics_entries(image, name)


def _logger_entries() -> list[DescribedConfig]:
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
