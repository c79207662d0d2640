# SPDX-License-Identifier: Apache-2.0
"""Configs of topics, brokers and groups: describe and alter them, and list the resources that have configs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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

Config = dict[str, ConfigEntry]

_BROKER_TYPES = (ConfigResourceType.BROKER, ConfigResourceType.BROKER_LOGGER)


async def describe_configs(
    cluster: Cluster,
    deadline: Deadline,
    keys_by_resource: Mapping[ConfigResource, Sequence[str] | None],
    include_synonyms: bool,
    include_documentation: bool,
) -> dict[ConfigResource, Config | KafkaError]:
    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, Config | KafkaError]:
        outcomes: dict[ConfigResource, Config | KafkaError] = {}
        for node_id, resources in _by_broker(pending).items():
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
            for result in response.results:
                resource = ConfigResource(ConfigResourceType(result.resource_type), result.resource_name)
                outcomes[resource] = outcome_of(result.error_code, result.error_message, _config(result))
        return outcomes

    return await repeat(cluster, deadline, keys_by_resource, attempt)


def _key_list(keys: Sequence[str] | None) -> list[str] | None:
    return None if keys is None else list(keys)


def _by_broker(resources: Iterable[ConfigResource]) -> dict[int | None, list[ConfigResource]]:
    """Groups resources by the broker to ask. Configs of a named broker come from that broker, all others from any.

    The key None stands for any broker.
    """
    resources_by_broker: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        owner = int(resource.name) if resource.type in _BROKER_TYPES and resource.name.isdecimal() else None
        resources_by_broker.setdefault(owner, []).append(resource)
    return resources_by_broker


async def _connection(cluster: Cluster, node_id: int | None) -> Connection:
    if node_id is None:
        return await cluster.any_connection()
    if node_id not in cluster.metadata.brokers:
        await cluster.refresh_metadata(())
    return await cluster.connection(node_id)


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

    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, KafkaError | None]:
        outcomes: dict[ConfigResource, KafkaError | None] = {}
        for node_id, resources in _by_broker(pending).items():
            request = IncrementalAlterConfigsRequest(
                resources=[_altered(resource, operations[resource]) for resource in resources],
                validate_only=validate_only,
            )
            if node_id is None:
                response = await cluster.call_controller(request, IncrementalAlterConfigsResponse)
            else:
                connection = await _connection(cluster, node_id)
                response = await connection.call(request, IncrementalAlterConfigsResponse)
            for result in response.responses:
                resource = ConfigResource(ConfigResourceType(result.resource_type), result.resource_name)
                outcomes[resource] = outcome_of(result.error_code, result.error_message, None)
        return outcomes

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
    return [
        ConfigResource(ConfigResourceType(resource.resource_type), resource.resource_name)
        for resource in response.config_resources
    ]
