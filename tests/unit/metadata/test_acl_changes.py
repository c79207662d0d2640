# SPDX-License-Identifier: Apache-2.0
"""CreateAcls, DeleteAcls and DescribeAcls: which ACLs they make, delete and find, and the texts of their errors.

The codes and texts were observed in Kafka 4.4.0, except for ANY and MATCH (docs/differences.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.metadata.acl_changes import describe_acls
from kcoord.metadata.image import ImageBuilder
from kcoord.security.authorizer import Authorizer
from kcoord.server.api.handlers import create_acls, delete_acls
from kcoord.server.api.handlers import describe_acls as describe_acls_handler
from kcoord_protocol.acls import Acl, AclFilter, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, context, settle

READ_FOO = Acl(
    ResourceType.TOPIC, "foo", PatternType.LITERAL, "User:alice", "*", AclOperation.READ, PermissionType.ALLOW
)
CREATED = (0, "")
MATCHED = (0, None)


def creation_of(acl: Acl) -> CreateAclsRequest.AclCreation:
    return CreateAclsRequest.AclCreation(
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        resource_pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )


def create(cluster: Cluster, *acls: Acl) -> list[tuple[int, str | None]]:
    request = CreateAclsRequest(creations=[creation_of(acl) for acl in acls])
    ids = [cluster.new_id() for _ in acls]
    response: CreateAclsResponse = cluster.run(lambda machine, context: machine.create_acls(context, request, ids))
    return [(result.error_code, result.error_message) for result in response.results]


def delete(cluster: Cluster, *filters: AclFilter) -> DeleteAclsResponse:
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
            for acl_filter in filters
        ]
    )
    return cluster.run(lambda machine, context: machine.delete_acls(context, request))


def test_acls_are_created_once() -> None:
    cluster = Cluster()
    write = replace(READ_FOO, operation=AclOperation.WRITE)
    assert create(cluster, READ_FOO, write, READ_FOO) == [CREATED] * 3
    assert list(cluster.image.acls.values()) == [READ_FOO, write]
    epoch = cluster.image.epoch
    assert create(cluster, write) == [CREATED]
    assert cluster.image.epoch == epoch
    assert ImageBuilder.of(cluster.log) == cluster.image


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"resource_type": ResourceType.CLUSTER},
            "The only valid name for the CLUSTER resource is kafka-cluster",
        ),
        ({"resource_name": ""}, "Invalid empty resource name"),
        ({"resource_type": ResourceType.UNKNOWN}, "Invalid resourceType UNKNOWN"),
        ({"resource_type": ResourceType.ANY}, "Invalid resourceType ANY"),
        ({"pattern_type": PatternType.MATCH}, "Invalid patternType MATCH"),
        ({"pattern_type": PatternType.ANY}, "Invalid patternType ANY"),
        ({"pattern_type": PatternType.UNKNOWN}, "Invalid patternType UNKNOWN"),
        ({"operation": AclOperation.ANY}, "Invalid operation ANY"),
        ({"operation": AclOperation.UNKNOWN}, "Invalid operation UNKNOWN"),
        ({"permission_type": PermissionType.ANY}, "Invalid permissionType ANY"),
        ({"permission_type": PermissionType.UNKNOWN}, "Invalid permissionType UNKNOWN"),
        (
            {"principal": "alice"},
            "Could not parse principal from `alice` (no colon is present separating the principal type from the "
            "principal name)",
        ),
    ],
)
def test_acls_that_are_rejected(change: dict[str, object], text: str) -> None:
    cluster = Cluster()
    good = replace(READ_FOO, principal="User:bob")
    assert create(cluster, replace(READ_FOO, **change), good) == [(Errors.INVALID_REQUEST, text), CREATED]  # type: ignore[arg-type]
    assert list(cluster.image.acls.values()) == [good]


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("", "Host pattern cannot be null or empty"),
        ("10.0.0.0/33", "Invalid CIDR notation '10.0.0.0/33': Value [33] not in range [0,32]"),
        ("10.0.256.0/8", "Invalid CIDR notation '10.0.256.0/8': Value [256] not in range [0,255]"),
        ("10.0.0/8", "Invalid CIDR notation '10.0.0/8': Could not parse [10.0.0/8]"),
        ("host/8", "Invalid CIDR notation 'host/8': Could not parse [host/8]"),
        ("::1/", "Invalid CIDR notation '::1/': Could not parse [::1/] - invalid prefix length"),
        (
            "::1/-1",
            "Invalid CIDR notation '::1/-1': Could not parse [::1/-1] - prefix length must be between 0 and 128",
        ),
        ("::1/x", "Invalid CIDR notation '::1/x': Could not parse [::1/x] - invalid prefix length"),
        (
            "::1/129",
            "Invalid CIDR notation '::1/129': Could not parse [::1/129] - prefix length must be between 0 and 128",
        ),
        ("::g/64", "Invalid CIDR notation '::g/64': Could not parse [::g]"),
        (
            "::ffff:10.0.0.1/100",
            "Invalid CIDR notation '::ffff:10.0.0.1/100': Could not parse [::ffff:10.0.0.1] - not an IPv6 address",
        ),
    ],
)
def test_hosts_that_kafka_4_4_rejects(host: str, text: str) -> None:
    acl = replace(READ_FOO, host=host)
    assert create(Cluster({"kcoord.release": "4.4"}), acl) == [(Errors.INVALID_REQUEST, text)]
    assert create(Cluster({"kcoord.release": "4.3"}), acl) == [CREATED]


@pytest.mark.parametrize(
    "host", ["*", "10.0.0.1", "10.0.0.0/8", "010.0.0.0/8", "2001:db8::/32", "fe80::1%eth0/064", "::1", "not an address"]
)
def test_hosts_that_kafka_4_4_accepts(host: str) -> None:
    assert create(Cluster({"kcoord.release": "4.4"}), replace(READ_FOO, host=host)) == [CREATED]


def test_large_requests_are_rejected() -> None:
    cluster = Cluster()
    acls = [replace(READ_FOO, resource_name=str(number)) for number in range(10_001)]
    with pytest.raises(KafkaError, match="Unable to perform excessively large batch operation") as caught:
        create(cluster, *acls)
    assert caught.value.error is Errors.POLICY_VIOLATION
    assert create(cluster, *acls[:10_000]) == [CREATED] * 10_000
    create(cluster, acls[-1])
    with pytest.raises(KafkaError, match="Cannot remove more than 10000 acls in a single delete operation"):
        delete(cluster, AclFilter())


def test_each_filter_answers_with_its_matches_and_an_acl_is_deleted_once() -> None:
    cluster = Cluster()
    write = replace(READ_FOO, operation=AclOperation.WRITE)
    of_bob = replace(READ_FOO, principal="User:bob")
    create(cluster, READ_FOO, write, of_bob)
    response = delete(
        cluster,
        AclFilter(principal="User:alice"),
        AclFilter(operation=AclOperation.READ, principal="User:alice"),
        AclFilter(host="192.0.2.1"),
        AclFilter(resource_type=ResourceType.UNKNOWN),
        AclFilter(permission_type=PermissionType.UNKNOWN),
    )
    assert [(result.error_code, result.error_message) for result in response.filter_results] == [
        MATCHED,
        MATCHED,
        MATCHED,
        (Errors.INVALID_REQUEST, "Unknown patternFilter."),
        (Errors.INVALID_REQUEST, "Unknown entryFilter."),
    ]
    first, second, *without_matches = response.filter_results
    assert [acl.operation for acl in first.matching_acls] == [AclOperation.READ, AclOperation.WRITE]
    (match,) = second.matching_acls
    assert (match.error_code, match.error_message, match.resource_name, match.principal, match.host) == (
        *MATCHED,
        "foo",
        "User:alice",
        "*",
    )
    assert [result.matching_acls for result in without_matches] == [[], [], []]
    assert list(cluster.image.acls.values()) == [of_bob]
    assert ImageBuilder.of(cluster.log) == cluster.image


def test_acls_are_described_by_pattern() -> None:
    cluster = Cluster()
    prefixed = replace(READ_FOO, pattern_type=PatternType.PREFIXED)
    of_group = replace(READ_FOO, resource_type=ResourceType.GROUP)
    write = replace(READ_FOO, operation=AclOperation.WRITE)
    create(cluster, of_group, READ_FOO, prefixed, write)
    any_filter = DescribeAclsRequest(
        resource_type_filter=1,
        resource_name_filter=None,
        pattern_type_filter=1,
        principal_filter=None,
        host_filter=None,
        operation=1,
        permission_type=1,
    )
    described = describe_acls(cluster.image, any_filter).resources
    shown = [
        (
            resource.resource_type,
            resource.resource_name,
            resource.pattern_type,
            [acl.operation for acl in resource.acls],
        )
        for resource in described
    ]
    assert shown == [(2, "foo", 3, [3, 4]), (2, "foo", 4, [3]), (3, "foo", 3, [3])]
    any_filter.operation = 99
    assert describe_acls(cluster.image, any_filter) == DescribeAclsResponse(error_message="")


@pytest.mark.parametrize("version", create_acls.VERSIONS)
async def test_the_handlers_of_a_broker_with_an_authorizer(version: int) -> None:
    cluster = Cluster()
    broker = broker_of(cluster)
    broker.authorizer = Authorizer({})
    creation = CreateAclsRequest(creations=[creation_of(READ_FOO), creation_of(READ_FOO)])
    created = await settle(create_acls.handle(broker, context(ApiKey.CREATE_ACLS, version), creation), version)
    assert [result.error_code for result in created.results] == [0, 0]
    request = DescribeAclsRequest(
        resource_type_filter=2,
        resource_name_filter="foobar",
        pattern_type_filter=1,
        principal_filter=None,
        host_filter=None,
        operation=1,
        permission_type=1,
    )
    asked = context(ApiKey.DESCRIBE_ACLS, version)
    assert (await settle(describe_acls_handler.handle(broker, asked, request), version)).resources == []
    request.resource_name_filter = "foo"
    (resource,) = (await settle(describe_acls_handler.handle(broker, asked, request), version)).resources
    assert [acl.principal for acl in resource.acls] == ["User:alice"]
    entry = DeleteAclsRequest.DeleteAclsFilter(
        resource_type_filter=2, resource_name_filter="foo", operation=1, permission_type=1
    )
    entry.principal_filter = entry.host_filter = None
    deletion = DeleteAclsRequest(filters=[entry])
    deleted = await settle(delete_acls.handle(broker, context(ApiKey.DELETE_ACLS, version), deletion), version)
    assert [len(result.matching_acls) for result in deleted.filter_results] == [1]
    assert broker.image.acls == {}


# The oracle is written from the description of ResourcePatternFilter and AccessControlEntryFilter.

NAMES = ["a", "ab", "abc", "*"]
acls = st.builds(
    Acl,
    st.sampled_from([ResourceType.TOPIC, ResourceType.GROUP]),
    st.sampled_from(NAMES),
    st.sampled_from([PatternType.LITERAL, PatternType.PREFIXED]),
    st.sampled_from(["User:a", "User:*"]),
    st.sampled_from(["*", "192.0.2.1"]),
    st.sampled_from([AclOperation.ALL, AclOperation.READ]),
    st.sampled_from([PermissionType.ALLOW, PermissionType.DENY]),
)
acl_filters = st.builds(
    AclFilter,
    st.sampled_from([ResourceType.ANY, ResourceType.ANY, ResourceType.TOPIC]),
    st.sampled_from([None, *NAMES, "abcd"]),
    st.sampled_from([PatternType.ANY, PatternType.MATCH, PatternType.LITERAL, PatternType.PREFIXED]),
    st.sampled_from([None, None, "User:a", "User:*"]),
    st.sampled_from([None, None, "*"]),
    st.sampled_from([AclOperation.ANY, AclOperation.ANY, AclOperation.READ]),
    st.sampled_from([PermissionType.ANY, PermissionType.ANY, PermissionType.DENY]),
)


def is_selected(acl: Acl, acl_filter: AclFilter) -> bool:
    pairs = [
        (acl_filter.principal is None, acl_filter.principal, acl.principal),
        (acl_filter.host is None, acl_filter.host, acl.host),
        (acl_filter.operation == AclOperation.ANY, acl_filter.operation, acl.operation),
        (acl_filter.permission_type == PermissionType.ANY, acl_filter.permission_type, acl.permission_type),
        (acl_filter.resource_type == ResourceType.ANY, acl_filter.resource_type, acl.resource_type),
    ]
    if not all(is_any or expected == actual for is_any, expected, actual in pairs):
        return False
    names_of_types = {PatternType.LITERAL: {PatternType.LITERAL}, PatternType.PREFIXED: {PatternType.PREFIXED}}
    if acl.pattern_type not in names_of_types.get(acl_filter.pattern_type, {PatternType.LITERAL, PatternType.PREFIXED}):
        return False
    if acl_filter.resource_name is None:
        return True
    if acl_filter.pattern_type != PatternType.MATCH:
        return acl_filter.resource_name == acl.resource_name
    if acl.pattern_type == PatternType.LITERAL:
        return acl.resource_name in (acl_filter.resource_name, "*")
    return acl_filter.resource_name.startswith(acl.resource_name)


@settings(max_examples=500)
@given(acls, acl_filters)
def test_random_filters_select_what_the_description_says(acl: Acl, acl_filter: AclFilter) -> None:
    assert acl_filter.matches(acl) is is_selected(acl, acl_filter)
