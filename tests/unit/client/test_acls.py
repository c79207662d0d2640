# SPDX-License-Identifier: Apache-2.0
"""ACLs in the admin client: requests of ACLs and filters, and results by ACL and filter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.client import (
    Acl,
    AclFilter,
    AclOperation,
    Errors,
    KafkaError,
    PatternType,
    PermissionType,
    ResourceType,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)
from tests.unit.client.fake_broker import Answer
from tests.unit.client.test_admin import admin_of, canned

READ_FOO = Acl(
    ResourceType.TOPIC, "foo", PatternType.PREFIXED, "User:alice", "192.0.2.1", AclOperation.READ, PermissionType.DENY
)
CODES = (2, "foo", 4, "User:alice", "192.0.2.1", 3, 2)


async def test_acls_are_created_by_any_broker() -> None:
    write = replace(READ_FOO, operation=AclOperation.WRITE)

    def create(request: Message, version: int) -> Answer:
        return CreateAclsResponse(
            results=[
                CreateAclsResponse.AclCreationResult(error_message=None),
                CreateAclsResponse.AclCreationResult(error_code=Errors.INVALID_REQUEST, error_message="no"),
            ]
        )

    async with canned({ApiKey.CREATE_ACLS: create}) as broker, admin_of(broker) as admin:
        results = await admin.create_acls([READ_FOO, write, READ_FOO])
        (request,) = broker.requests_of(ApiKey.CREATE_ACLS)
    assert results.values == {READ_FOO: None}
    assert {acl: (error.error, error.message) for acl, error in results.errors.items()} == {
        write: (Errors.INVALID_REQUEST, "no")
    }
    assert isinstance(request, CreateAclsRequest)
    first, _ = request.creations
    assert (
        first.resource_type,
        first.resource_name,
        first.resource_pattern_type,
        first.principal,
        first.host,
        first.operation,
        first.permission_type,
    ) == CODES


async def test_acls_are_described() -> None:
    def describe(request: Message, version: int) -> Answer:
        entry = DescribeAclsResponse.AclDescription(
            principal="User:alice", host="192.0.2.1", operation=3, permission_type=2
        )
        later = DescribeAclsResponse.AclDescription(principal="User:bob", host="*", operation=77, permission_type=3)
        resource = DescribeAclsResponse.DescribeAclsResource(
            resource_type=2, resource_name="foo", pattern_type=4, acls=[entry, later]
        )
        return DescribeAclsResponse(error_message=None, resources=[resource])

    async with canned({ApiKey.DESCRIBE_ACLS: describe}) as broker, admin_of(broker) as admin:
        described = await admin.describe_acls()
        await admin.describe_acls(AclFilter(ResourceType.GROUP, "g", PatternType.MATCH, "User:a", "*"))
        every, some = broker.requests_of(ApiKey.DESCRIBE_ACLS)
    assert described == [
        READ_FOO,
        replace(
            READ_FOO,
            principal="User:bob",
            host="*",
            operation=AclOperation.UNKNOWN,
            permission_type=PermissionType.ALLOW,
        ),
    ]
    assert isinstance(every, DescribeAclsRequest)
    assert isinstance(some, DescribeAclsRequest)
    assert (every.resource_type_filter, every.resource_name_filter, every.pattern_type_filter) == (1, None, 1)
    assert (every.principal_filter, every.host_filter, every.operation, every.permission_type) == (None, None, 1, 1)
    assert (some.resource_type_filter, some.resource_name_filter, some.pattern_type_filter) == (3, "g", 2)
    assert (some.principal_filter, some.host_filter) == ("User:a", "*")


async def test_an_error_of_describe_acls_is_raised() -> None:
    def describe(request: Message, version: int) -> Answer:
        return DescribeAclsResponse(error_code=Errors.SECURITY_DISABLED, error_message="No Authorizer")

    async with canned({ApiKey.DESCRIBE_ACLS: describe}) as broker, admin_of(broker) as admin:
        with pytest.raises(KafkaError, match="No Authorizer"):
            await admin.describe_acls()


async def test_acls_are_deleted_by_filters() -> None:
    by_name, by_host = AclFilter(resource_name="foo"), AclFilter(host="192.0.2.1")

    def delete(request: Message, version: int) -> Answer:
        match = DeleteAclsResponse.DeleteAclsMatchingAcl(
            error_message=None,
            resource_type=2,
            resource_name="foo",
            pattern_type=4,
            principal="User:alice",
            host="192.0.2.1",
            operation=3,
            permission_type=2,
        )
        return DeleteAclsResponse(
            filter_results=[
                DeleteAclsResponse.DeleteAclsFilterResult(error_message=None, matching_acls=[match]),
                DeleteAclsResponse.DeleteAclsFilterResult(
                    error_code=Errors.INVALID_REQUEST, error_message="Unknown patternFilter."
                ),
            ]
        )

    async with canned({ApiKey.DELETE_ACLS: delete}) as broker, admin_of(broker) as admin:
        results = await admin.delete_acls([by_name, by_host])
        (request,) = broker.requests_of(ApiKey.DELETE_ACLS)
    assert results.values == {by_name: [READ_FOO]}
    assert list(results.errors) == [by_host]
    assert isinstance(request, DeleteAclsRequest)
    assert [(entry.resource_name_filter, entry.host_filter) for entry in request.filters] == [
        ("foo", None),
        (None, "192.0.2.1"),
    ]
