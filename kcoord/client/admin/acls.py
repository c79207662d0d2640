# SPDX-License-Identifier: Apache-2.0
"""ACLs: describe, create and delete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord_protocol.acls import Acl, AclFilter, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)


async def describe_acls(cluster: Cluster, acl_filter: AclFilter) -> list[Acl]:
    request = DescribeAclsRequest(
        resource_type_filter=acl_filter.resource_type,
        resource_name_filter=acl_filter.resource_name,
        pattern_type_filter=acl_filter.pattern_type,
        principal_filter=acl_filter.principal,
        host_filter=acl_filter.host,
        operation=acl_filter.operation,
        permission_type=acl_filter.permission_type,
    )
    response = await cluster.call_any(request, DescribeAclsResponse)
    if response.error_code:
        raise KafkaError(error_of(response.error_code), response.error_message)
    return [
        Acl(
            ResourceType(resource.resource_type),
            resource.resource_name,
            PatternType(resource.pattern_type),
            acl.principal,
            acl.host,
            AclOperation(acl.operation),
            PermissionType(acl.permission_type),
        )
        for resource in response.resources
        for acl in resource.acls
    ]


async def create_acls(cluster: Cluster, deadline: Deadline, acls: Iterable[Acl]) -> dict[Acl, KafkaError | None]:
    async def attempt(pending: list[Acl]) -> Mapping[Acl, KafkaError | None]:
        request = CreateAclsRequest(
            creations=[
                CreateAclsRequest.AclCreation(
                    resource_type=acl.resource_type,
                    resource_name=acl.resource_name,
                    resource_pattern_type=acl.pattern_type,
                    principal=acl.principal,
                    host=acl.host,
                    operation=acl.operation,
                    permission_type=acl.permission_type,
                )
                for acl in pending
            ]
        )
        response = await cluster.call_any(request, CreateAclsResponse)
        outcomes = [outcome_of(result.error_code, result.error_message, None) for result in response.results]
        return dict(zip(pending, outcomes, strict=False))

    return await repeat(cluster, deadline, acls, attempt)


async def delete_acls(
    cluster: Cluster, deadline: Deadline, filters: Iterable[AclFilter]
) -> dict[AclFilter, list[Acl] | KafkaError]:
    async def attempt(pending: list[AclFilter]) -> Mapping[AclFilter, list[Acl] | KafkaError]:
        request = DeleteAclsRequest(
            filters=[
                DeleteAclsRequest.DeleteAclsFilter(
                    resource_type_filter=acl_filter.resource_type,
                    resource_name_filter=acl_filter.resource_name,
                    pattern_type_filter=acl_filter.pattern_type,
                    principal_filter=acl_filter.principal,
                    host_filter=acl_filter.host,
                    operation=acl_filter.operation,
                    permission_type=acl_filter.permission_type,
                )
                for acl_filter in pending
            ]
        )
        response = await cluster.call_any(request, DeleteAclsResponse)
        outcomes = [
            outcome_of(result.error_code, result.error_message, [_acl_of(match) for match in result.matching_acls])
            for result in response.filter_results
        ]
        return dict(zip(pending, outcomes, strict=False))

    return await repeat(cluster, deadline, filters, attempt)


def _acl_of(match: DeleteAclsResponse.DeleteAclsMatchingAcl) -> Acl:
    return Acl(
        ResourceType(match.resource_type),
        match.resource_name,
        PatternType(match.pattern_type),
        match.principal,
        match.host,
        AclOperation(match.operation),
        PermissionType(match.permission_type),
    )
