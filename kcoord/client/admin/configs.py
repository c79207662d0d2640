# SPDX-License-Identifier: Apache-2.0
"""Configs of topics, brokers and groups: describe and alter them, and list the resources that have configs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from kcoord.client.admin.model import (
    AlterConfigOp,
    ConfigEntry,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    ConfigSynonym,
)
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.connection import Connection
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

V = TypeVar("V")
Config = dict[str, ConfigEntry]
AskBroker = Callable[[int | None, list[ConfigResource]], Awaitable[Mapping[ConfigResource, V | KafkaError]]]
"""Asks a broker by its node id, or any broker (None)."""

_BROKER_TYPES = (ConfigResourceType.BROKER, ConfigResourceType.BROKER_LOGGER)


async def describe_configs(
    cluster: Cluster,
    deadline: Deadline,
    keys_by_resource: Mapping[ConfigResource, Sequence[str] | None],
    include_synonyms: bool,
    include_documentation: bool,
) -> dict[ConfigResource, Config | KafkaError]:
    async def ask(node_id: int | None, resources: list[ConfigResource]) -> Mapping[ConfigResource, Config | KafkaError]:
        request = DescribeConfigsRequest(
            resources=[
                DescribeConfigsRequest.DescribeConfigsResource(
                    resource_type=resource.type,
                    resource_name=resource.name,
                    configuration_keys=_key_list(keys_by_resource[resource]),
                )
                for resource in resources
            ],
            include_synonyms=include_synonyms,
            include_documentation=include_documentation,
        )
        response = await (await _connection(cluster, node_id)).call(request, DescribeConfigsResponse)
        return {
            _resource(result.resource_type, result.resource_name): outcome_of(
                result.error_code, result.error_message, _config(result)
            )
            for result in response.results
        }

    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, Config | KafkaError]:
        return await _ask_brokers(pending, ask)

    return await repeat(cluster, deadline, keys_by_resource, attempt)


def _key_list(keys: Sequence[str] | None) -> list[str] | None:
    return None if keys is None else list(keys)


def _resource(resource_type: int, name: str) -> ConfigResource:
    return ConfigResource(ConfigResourceType(resource_type), name)


async def _ask_brokers(resources: Iterable[ConfigResource], ask: AskBroker[V]) -> dict[ConfigResource, V | KafkaError]:
    """Sends one request to each broker: a named broker has its own configs, and any broker has all others.

    The failure of a broker is that of its own resources, so that changes at other brokers are not repeated.
    """
    resources_by_broker: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        owner = int(resource.name) if resource.type in _BROKER_TYPES and resource.name.isdecimal() else None
        resources_by_broker.setdefault(owner, []).append(resource)
    outcomes: dict[ConfigResource, V | KafkaError] = {}
    for node_id, asked in resources_by_broker.items():
        try:
            outcomes.update(await ask(node_id, asked))
        except KafkaError as error:
            outcomes.update(dict.fromkeys(asked, error))
    return outcomes


async def _connection(cluster: Cluster, node_id: int | None) -> Connection:
    if node_id is None:
        return await cluster.any_connection()
    if node_id not in cluster.metadata.brokers:
        await cluster.refresh_metadata(())
    try:
        return await cluster.connection(node_id)
    except KafkaError:
        # The next attempt looks the broker up, since it may be at another address now.
        cluster.metadata.brokers.pop(node_id, None)
        raise


def _config(result: DescribeConfigsResponse.DescribeConfigsResult) -> Config:
    return {
        entry.name: ConfigEntry(
            entry.name,
            entry.value,
            _source(entry.config_source),
            entry.read_only,
            entry.is_sensitive,
            tuple(ConfigSynonym(synonym.name, synonym.value, _source(synonym.source)) for synonym in entry.synonyms),
            entry.documentation,
        )
        for entry in result.configs
    }


def _source(code: int) -> ConfigSource:
    return ConfigSource(code) if code in ConfigSource._value2member_map_ else ConfigSource.UNKNOWN


async def incremental_alter_configs(
    cluster: Cluster,
    deadline: Deadline,
    changes: Mapping[ConfigResource, Iterable[AlterConfigOp]],
    validate_only: bool,
) -> dict[ConfigResource, KafkaError | None]:
    operations = {resource: list(resource_changes) for resource, resource_changes in changes.items()}

    async def ask(node_id: int | None, resources: list[ConfigResource]) -> Mapping[ConfigResource, KafkaError | None]:
        request = IncrementalAlterConfigsRequest(
            resources=[_altered(resource, operations[resource]) for resource in resources],
            validate_only=validate_only,
        )
        if node_id is None:
            response = await cluster.call_controller(request, IncrementalAlterConfigsResponse)
        else:
            response = await (await _connection(cluster, node_id)).call(request, IncrementalAlterConfigsResponse)
        return {
            _resource(result.resource_type, result.resource_name): outcome_of(
                result.error_code, result.error_message, None
            )
            for result in response.responses
        }

    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, KafkaError | None]:
        return await _ask_brokers(pending, ask)

    return await repeat(cluster, deadline, operations, attempt)


def _altered(
    resource: ConfigResource, operations: list[AlterConfigOp]
) -> IncrementalAlterConfigsRequest.AlterConfigsResource:
    return IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=resource.type,
        resource_name=resource.name,
        configs=[
            IncrementalAlterConfigsRequest.AlterableConfig(
                name=operation.name, config_operation=operation.operation, value=operation.value
            )
            for operation in operations
        ],
    )


async def list_config_resources(cluster: Cluster, types: Iterable[ConfigResourceType]) -> list[ConfigResource]:
    sorted_types = sorted(set(types))
    # v0 lists client metrics only; its request has no field for the types.
    lowest = 0 if sorted_types == [ConfigResourceType.CLIENT_METRICS] else 1
    connection = await cluster.any_connection()
    version = connection.versions.choose(ListConfigResourcesRequest, lowest)
    request = ListConfigResourcesRequest(
        resource_types=[int(resource_type) for resource_type in sorted_types] if version else []
    )
    response = await connection.call_version(request, ListConfigResourcesResponse, version)
    if response.error_code:
        raise KafkaError(error_of(response.error_code))
    return [_resource(resource.resource_type, resource.resource_name) for resource in response.config_resources]
