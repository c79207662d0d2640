# SPDX-License-Identifier: Apache-2.0
"""CreateAcls, DeleteAcls and DescribeAcls as pure functions of the image, with the checks and texts of Kafka 4.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.metadata import records
from kcoord.metadata.host_ranges import parse_range
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorResult
from kcoord_protocol.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclFilter,
    AclOperation,
    PatternType,
    PermissionType,
    ResourceType,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

MAX_CHANGES: Final = 10_000
"""The most ACLs that a request may create or delete."""


def create_acls(
    image: MetadataImage, config: BrokerConfig, request: CreateAclsRequest, acl_ids: Sequence[bytes]
) -> CoordinatorResult[CreateAclsResponse]:
    """Creates the ACLs that do not exist yet. `acl_ids` are new random ids, at least one per ACL of the request.

    An ACL that cannot be created gets an error in its place. The others are created nevertheless.
    """
    result = CoordinatorResult(CreateAclsResponse())
    names = {creation.resource_name for creation in request.creations}
    existing = {acl for acl in image.acls.values() if acl.resource_name in names}
    for creation, acl_id in zip(request.creations, acl_ids, strict=False):
        # Kafka's message of an ACL that was created is empty, not null.
        answer = CreateAclsResponse.AclCreationResult(error_message="")
        acl = Acl(
            ResourceType(creation.resource_type),
            creation.resource_name,
            PatternType(creation.resource_pattern_type),
            creation.principal,
            creation.host,
            AclOperation(creation.operation),
            PermissionType(creation.permission_type),
        )
        try:
            _check_acl(config, acl)
        except KafkaError as error:
            answer.error_code, answer.error_message = error.error, error.message
        else:
            if acl not in existing:
                existing.add(acl)
                result.records.append(records.new_acl_record(acl_id, acl))
        result.response.results.append(answer)
    if len(result.records) > MAX_CHANGES:
        raise KafkaError(Errors.POLICY_VIOLATION, "Unable to perform excessively large batch operation.")
    return result


def _check_acl(config: BrokerConfig, acl: Acl) -> None:
    if acl.resource_type is ResourceType.CLUSTER and acl.resource_name != CLUSTER_NAME:
        raise _invalid(f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}")
    if not acl.resource_name:
        raise _invalid("Invalid empty resource name")
    if acl.resource_type in (ResourceType.UNKNOWN, ResourceType.ANY):
        raise _invalid(f"Invalid resourceType {acl.resource_type.name}")
    if acl.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        raise _invalid(f"Invalid patternType {acl.pattern_type.name}")
    if acl.operation in (AclOperation.UNKNOWN, AclOperation.ANY):
        raise _invalid(f"Invalid operation {acl.operation.name}")
    if acl.permission_type not in (PermissionType.ALLOW, PermissionType.DENY):
        raise _invalid(f"Invalid permissionType {acl.permission_type.name}")
    if ":" not in acl.principal:
        raise _invalid(
            f"Could not parse principal from `{acl.principal}` (no colon is present separating the principal type "
            "from the principal name)"
        )
    if config.is_kafka_4_4:
        _check_host(acl.host)


def _check_host(host: str) -> None:
    """Raises KafkaError for a host that Kafka 4.4 rejects. Kafka 4.3 accepts all hosts, and knows no ranges."""
    if not host:
        raise _invalid("Host pattern cannot be null or empty")
    if host == WILDCARD or "/" not in host:
        return
    try:
        parse_range(host)
    except ValueError as error:
        raise _invalid(f"Invalid CIDR notation '{host}': {error}") from None


def delete_acls(image: MetadataImage, request: DeleteAclsRequest) -> CoordinatorResult[DeleteAclsResponse]:
    """Deletes the ACLs that match at least one filter. The response has the matching ACLs of each filter."""
    result = CoordinatorResult(DeleteAclsResponse())
    deleted: dict[bytes, None] = {}
    for entry in request.filters:
        answer = DeleteAclsResponse.DeleteAclsFilterResult(error_message=None)
        acl_filter = filter_of(entry)
        if acl_filter.has_unknown_pattern or acl_filter.has_unknown_entry:
            answer.error_code = Errors.INVALID_REQUEST
            part = "patternFilter" if acl_filter.has_unknown_pattern else "entryFilter"
            answer.error_message = f"Unknown {part}."
        else:
            for acl_id, acl in image.acls.items():
                if acl_filter.matches(acl):
                    deleted[acl_id] = None
                    answer.matching_acls.append(_matching_acl(acl))
        result.response.filter_results.append(answer)
    if len(deleted) > MAX_CHANGES:
        raise _invalid(f"Cannot remove more than {MAX_CHANGES} acls in a single delete operation.")
    result.records += map(records.new_remove_acl_record, deleted)
    return result


def _matching_acl(acl: Acl) -> DeleteAclsResponse.DeleteAclsMatchingAcl:
    return DeleteAclsResponse.DeleteAclsMatchingAcl(
        error_message=None,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )


def describe_acls(image: MetadataImage, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """Returns the ACLs that match the filter, grouped by their pattern in the order of type and name.

    As in Kafka, a filter with an unknown code is no error: it matches ACLs of later releases at most.
    """
    acl_filter = filter_of(request)
    resources: dict[tuple[ResourceType, str, PatternType], list[DescribeAclsResponse.AclDescription]] = {}
    for acl in image.acls.values():
        if acl_filter.matches(acl):
            entry = DescribeAclsResponse.AclDescription(
                principal=acl.principal, host=acl.host, operation=acl.operation, permission_type=acl.permission_type
            )
            resources.setdefault((acl.resource_type, acl.resource_name, acl.pattern_type), []).append(entry)
    return DescribeAclsResponse(
        error_message="",
        resources=[
            DescribeAclsResponse.DescribeAclsResource(
                resource_type=resource_type, resource_name=name, pattern_type=pattern_type, acls=acls
            )
            for (resource_type, name, pattern_type), acls in sorted(resources.items(), key=lambda item: item[0])
        ],
    )


def filter_of(request: DescribeAclsRequest | DeleteAclsRequest.DeleteAclsFilter) -> AclFilter:
    return AclFilter(
        ResourceType(request.resource_type_filter),
        request.resource_name_filter,
        PatternType(request.pattern_type_filter),
        request.principal_filter,
        request.host_filter,
        AclOperation(request.operation),
        PermissionType(request.permission_type),
    )


def _invalid(message: str) -> KafkaError:
    return KafkaError(Errors.INVALID_REQUEST, message)
