# SPDX-License-Identifier: Apache-2.0
"""Every served API makes the checks of the table, and no other, and gives nothing to a client without rights.

Each API has example requests here. They are sent through the real request path to a broker whose authorizer denies
one kind of operation, or all.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kcoord.security.authorizer import DEFAULT_ALLOW, DEFAULT_DENY, Rule
from kcoord.server.api.authorization_table import CHECKS, Check
from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.json_form import to_json
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.server.authorization_examples import EXAMPLES, SECRETS, TOPIC, fill
from tests.unit.server.people import Cluster, Person, running_cluster

Kind = tuple[AclOperation, ResourceType]


class Deny:
    """An authorizer that denies some kinds of operations and allows all others. `asked` has what it was asked for."""

    def __init__(self, denied: set[Kind] | None) -> None:
        self.denied = denied
        self.asked: set[Kind] = set()

    def is_allowed(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType, name: str
    ) -> bool:
        self.asked.add((operation, resource_type))
        return self.denied is not None and (operation, resource_type) not in self.denied

    def is_allowed_by_type(
        self, principal: str, host: str, operation: AclOperation, resource_type: ResourceType
    ) -> bool:
        return self.denied is not None and (AclOperation.IDEMPOTENT_WRITE, ResourceType.CLUSTER) not in self.denied

    def rule_of(self, *asked: object) -> Rule:
        return DEFAULT_ALLOW if self.denied is not None else DEFAULT_DENY


AUTHORIZATION_ERRORS = {
    Errors.TOPIC_AUTHORIZATION_FAILED,
    Errors.GROUP_AUTHORIZATION_FAILED,
    Errors.CLUSTER_AUTHORIZATION_FAILED,
    Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    Errors.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
}


SETTINGS = {
    "auto_create_topics_enable": "true",
    "delegation_token_secret_key": "pepper",
    "kcoord_client_assignors_enable": "true",
}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with running_cluster(**SETTINGS) as running:
        await fill(running)
        yield running


async def answers(cluster: Cluster, key: ApiKey, denied: set[Kind] | None) -> tuple[list[bytes], Deny]:
    """Returns the responses to the examples of an API, with an authorizer that denies some operations (None: all)."""
    authorizer = Deny(denied)
    cluster.broker.authorizer = cast("Any", authorizer)
    person = Person(cluster.broker, "User:anyone")
    bodies = [await person.answer_bytes(request, version) for request, version in EXAMPLES[key]]
    return bodies, authorizer


def fields_named(document: Any, suffix: str) -> list[Any]:
    """Returns the values of all fields whose name ends with `suffix`."""
    if isinstance(document, list):
        return [value for item in document for value in fields_named(item, suffix)]
    if not isinstance(document, dict):
        return []
    return [
        value
        for name, content in document.items()
        for value in ([content] if name.lower().endswith(suffix) else fields_named(content, suffix))
    ]


def error_codes(key: ApiKey, bodies: list[bytes]) -> list[set[int]]:
    """Returns the error codes of each response."""
    versions = [version for _, version in EXAMPLES[key]]
    response = response_class(key)
    documents = [
        to_json(response.decode(body, version), version) for body, version in zip(bodies, versions, strict=True)
    ]
    return [set(fields_named(document, "errorcode")) for document in documents]


def kinds(checks: tuple[Check, ...]) -> set[Kind]:
    return {(check.operation, check.resource_type) for check in checks}


def test_every_served_api_is_in_the_table() -> None:
    assert CHECKS.keys() == SERVED_VERSIONS.keys()
    assert EXAMPLES.keys() == SERVED_VERSIONS.keys()


@pytest.mark.parametrize("key", SERVED_VERSIONS, ids=lambda key: key.name)
async def test_a_handler_makes_the_checks_of_the_table(cluster: Cluster, key: ApiKey) -> None:
    asked: set[Kind] = set()
    authorized_operations = {
        (operation, kind)
        for kind in (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER)
        for operation in AclOperation
    }
    on_cluster = {(operation, ResourceType.CLUSTER) for operation in AclOperation}
    for denied in (None, on_cluster, set()):
        _, authorizer = await answers(cluster, key, denied)
        asked |= authorizer.asked
    if key in (
        ApiKey.METADATA,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
    ):
        # These responses list the operations that the client may perform.
        assert kinds(CHECKS[key]) <= asked <= authorized_operations
    else:
        assert asked == kinds(CHECKS[key])


DENIABLE = [(key, check) for key, checks in CHECKS.items() for check in checks if check.error is not None]


@pytest.mark.parametrize(
    ("key", "check"),
    DENIABLE,
    ids=lambda value: value.name if isinstance(value, ApiKey) else f"{value.operation.name}-{value.resource_type.name}",
)
async def test_without_one_right_a_client_gets_the_error_of_the_table(
    cluster: Cluster, key: ApiKey, check: Check
) -> None:
    substitutes = kinds(tuple(other for other in CHECKS[key] if other.note.startswith("suffices")))
    bodies, _ = await answers(cluster, key, {(check.operation, check.resource_type)} | substitutes)
    assert any(check.error in codes for codes in error_codes(key, bodies))


@pytest.mark.parametrize("key", SERVED_VERSIONS, ids=lambda key: key.name)
async def test_with_all_rights_no_client_gets_an_authorization_error(cluster: Cluster, key: ApiKey) -> None:
    bodies, _ = await answers(cluster, key, set())
    for codes in error_codes(key, bodies):
        assert codes.isdisjoint(AUTHORIZATION_ERRORS)


@pytest.mark.parametrize("key", SERVED_VERSIONS, ids=lambda key: key.name)
async def test_without_any_right_a_client_sees_and_changes_nothing(cluster: Cluster, key: ApiKey) -> None:
    image, end_offset = cluster.broker.image, cluster.broker.metadata.end_offset
    bodies, _ = await answers(cluster, key, None)
    requests = EXAMPLES[key]
    needed = {check.error for check in CHECKS[key] if check.error is not None}
    for (request, version), body, codes in zip(requests, bodies, error_codes(key, bodies), strict=True):
        sent = request.encode(version)
        for secret in SECRETS:
            assert secret.encode() not in body or secret.encode() in sent
        topic_id = image.topics[TOPIC].id
        assert topic_id != ZERO_UUID
        assert topic_id not in body
        if needed:
            # A request for all topics or groups is answered without those that the client may not see.
            assert codes & needed or not codes - {0}
    assert cluster.broker.image is image
    assert cluster.broker.metadata.end_offset == end_offset
