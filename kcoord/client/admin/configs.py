# SPDX-License-Identifier: Apache-2.0
"""Configs of topics, brokers and groups: describe, alter, list what has any."""

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
    wanted: Mapping[ConfigResource, Sequence[str] | None],
    include_synonyms: bool,
    include_documentation: bool,
) -> dict[ConfigResource, Config | KafkaError]:
    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, Config | KafkaError]:
        found: dict[ConfigResource, Config | KafkaError] = {}
        for node_id, resources in _by_broker(pending).items():
            request = DescribeConfigsRequest(
                resources=[
                    DescribeConfigsRequest.DescribeConfigsResource(
                        resource_type=resource.type,
                        resource_name=resource.name,
                        configuration_keys=_key_list(wanted[resource]),
                    )
                    for resource in resources
                ],
                include_synonyms=include_synonyms,
                include_documentation=include_documentation,
            )
            response = await (await _connection(cluster, node_id)).call(request, DescribeConfigsResponse)
            for result in response.results:
                resource = ConfigResource(ConfigResourceType(result.resource_type), result.resource_name)
                found[resource] = outcome_of(result.error_code, result.error_message, _config(result))
        return found

    return await repeat(cluster, deadline, wanted, attempt)


def _key_list(keys: Sequence[str] | None) -> list[str] | None:
    return None if keys is None else list(keys)


def _by_broker(resources: Iterable[ConfigResource]) -> dict[int | None, list[ConfigResource]]:
    """A named broker answers for itself; any broker answers for all else (None)."""
    found: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        owner = int(resource.name) if resource.type in _BROKER_TYPES and resource.name.isdecimal() else None
        found.setdefault(owner, []).append(resource)
    return found


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
            tuple(ConfigSynonym(each.name, each.value, _source(each.source)) for each in entry.synonyms),
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
    operations = {resource: list(wanted) for resource, wanted in changes.items()}

    async def attempt(pending: list[ConfigResource]) -> Mapping[ConfigResource, KafkaError | None]:
        done: dict[ConfigResource, KafkaError | None] = {}
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
            for each in response.responses:
                resource = ConfigResource(ConfigResourceType(each.resource_type), each.resource_name)
                done[resource] = outcome_of(each.error_code, each.error_message, None)
        return done

    return await repeat(cluster, deadline, operations, attempt)


def _altered(
    resource: ConfigResource, operations: list[AlterConfigOp]
) -> IncrementalAlterConfigsRequest.AlterConfigsResource:
    return IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=resource.type,
        resource_name=resource.name,
        configs=[
            IncrementalAlterConfigsRequest.AlterableConfig(
                name=each.name, config_operation=each.operation, value=each.value
            )
            for each in operations
        ],
    )


async def list_config_resources(cluster: Cluster, types: Iterable[ConfigResourceType]) -> list[ConfigResource]:
    wanted = sorted(set(types))
    # v0 lists client metrics only, and its request names no types.
    lowest = 0 if wanted == [ConfigResourceType.CLIENT_METRICS] else 1
    connection = await cluster.any_connection()
    version = connection.versions.choose(ListConfigResourcesRequest, lowest)
    request = ListConfigResourcesRequest(resource_types=[int(each) for each in wanted] if version else [])
    response = await connection.call_version(request, ListConfigResourcesResponse, version)
    if response.error_code:
        raise KafkaError(error_of(response.error_code))
    return [
        ConfigResource(ConfigResourceType(each.resource_type), each.resource_name) for each in response.config_resources
    ]
