# SPDX-License-Identifier: Apache-2.0
"""The rights that requests about configs need: those on a topic or a group, otherwise on the cluster."""

from __future__ import annotations

from typing import Final, TypeVar

from kcoord.metadata.image import GROUP_RESOURCE, TOPIC_RESOURCE
from kcoord.server.api.authorization import Rights
from kcoord_protocol.acls import CLUSTER_NAME, AclOperation, ResourceType
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterConfigsRequest, IncrementalAlterConfigsRequest

Resource = TypeVar(
    "Resource", AlterConfigsRequest.AlterConfigsResource, IncrementalAlterConfigsRequest.AlterConfigsResource
)

_TYPES: Final = {TOPIC_RESOURCE: ResourceType.TOPIC, GROUP_RESOURCE: ResourceType.GROUP}


def require_on_configs(rights: Rights, operation: AclOperation, kind: int, name: str) -> None:
    """Raises KafkaError unless the client may perform the operation on the configs of a resource."""
    resource_type = _TYPES.get(kind, ResourceType.CLUSTER)
    rights.require(operation, resource_type, CLUSTER_NAME if resource_type is ResourceType.CLUSTER else name)


def split_alterable(
    rights: Rights, resources: list[Resource]
) -> tuple[list[Resource], list[tuple[Resource, KafkaError]]]:
    """Returns the resources whose configs the client may alter, and the others with their errors."""
    allowed: list[Resource] = []
    refused: list[tuple[Resource, KafkaError]] = []
    for resource in resources:
        try:
            require_on_configs(rights, AclOperation.ALTER_CONFIGS, resource.resource_type, resource.resource_name)
        except KafkaError as error:
            refused.append((resource, error))
        else:
            allowed.append(resource)
    return allowed, refused
