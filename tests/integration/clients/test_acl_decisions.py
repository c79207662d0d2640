# SPDX-License-Identifier: Apache-2.0
"""Apache Kafka 4.4.0 and kcoord with the same ACLs and users: both allow the same, and refuse with the same errors.

`make authorization` runs these tests alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    CreateAclsRequest,
    CreateAclsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    MetadataRequest,
    MetadataResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.integration.clients.every_api import Row, ask_all
from tests.integration.wire import WireClient
from tests.support.authorizing_process import authorizing_process
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.ports import free_ports
from tests.support.waiting import wait_until
from tests.unit.server.authorization_examples import TOPIC

pytestmark = pytest.mark.java

ROUNDS = 15
SEED = 20261123
TOPICS = ["a", "ab", "abc", "b", TOPIC]
GROUPS = ["a", "ab", "g"]
NAMES = ["a", "ab", "abc", "b", "*", "g", "hardcode"]
PRINCIPALS = ["User:alice", "User:bob", "User:*", "Group:alice"]
HOSTS = ["*", "*", "*", "127.0.0.1", "127.0.0.0/8", "10.0.0.1", "::1"]
USERS = ("alice", "bob")
JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    + " ".join(f'user_{user}="{user}-secret"' for user in USERS)
    + ";"
)
SCRAM_JAAS = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
OPERATIONS = {
    ResourceType.TOPIC: [2, 3, 4, 5, 6, 7, 8, 10, 11],
    ResourceType.GROUP: [2, 3, 6, 8, 10, 11],
    ResourceType.CLUSTER: [2, 5, 7, 8, 9, 10, 11, 12],
    ResourceType.TRANSACTIONAL_ID: [2, 4, 8],
}
KINDS = [*[ResourceType.TOPIC] * 4, *[ResourceType.GROUP] * 2, ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID]


def random_acl(source: random.Random) -> Acl:
    kind = source.choice(KINDS)
    is_cluster = kind is ResourceType.CLUSTER
    return Acl(
        kind,
        "kafka-cluster" if is_cluster else source.choice(NAMES),
        PatternType.LITERAL if is_cluster else source.choice([PatternType.LITERAL, PatternType.PREFIXED]),
        source.choice(PRINCIPALS),
        source.choice(HOSTS),
        AclOperation(source.choice(OPERATIONS[kind])),
        source.choice([*[PermissionType.ALLOW] * 3, PermissionType.DENY]),
    )


class Side:
    """A broker with a listener for its super user and another listener for the logins of users."""

    def __init__(self, port: int, users_port: int) -> None:
        self.port = port
        self.users_port = users_port
        self.users = {user: login(users_port, user) for user in USERS}

    def replace_acls(self, acls: Sequence[Acl]) -> None:
        every = DeleteAclsRequest.DeleteAclsFilter(
            resource_type_filter=ResourceType.ANY,
            resource_name_filter=None,
            pattern_type_filter=PatternType.ANY,
            principal_filter=None,
            host_filter=None,
            operation=AclOperation.ANY,
            permission_type=PermissionType.ANY,
        )
        creations = [
            CreateAclsRequest.AclCreation(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                resource_pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission_type,
            )
            for acl in acls
        ]
        with WireClient(self.port) as client:
            client.call(DeleteAclsRequest(filters=[every]), 3, DeleteAclsResponse)
            created = client.call(CreateAclsRequest(creations=creations), 3, CreateAclsResponse)
        assert [result.error_code for result in created.results] == [0] * len(acls)

    def create_topics(self) -> None:
        topics = [
            CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1) for name in TOPICS
        ]
        with WireClient(self.port) as client:
            client.call(CreateTopicsRequest(topics=topics, timeout_ms=5000), 7, CreateTopicsResponse)
            request = FindCoordinatorRequest(key_type=0, coordinator_keys=["a"])

            def has_coordinator() -> bool:
                response = client.call(request, 4, FindCoordinatorResponse)
                return response.coordinators[0].error_code == 0

            wait_until(has_coordinator, "groups have a coordinator", 30)

    def refusals(self, left_out: frozenset[ApiKey]) -> dict[str, list[Row]]:
        """Returns what the responses of all APIs tell alice about rights, without the texts about the cluster."""
        told = ask_all(lambda: login(self.users_port, "alice"), left_out)
        return {
            request: [row[:2] if row[1] == Errors.CLUSTER_AUTHORIZATION_FAILED.name else row for row in rows]
            for request, rows in told.items()
        }

    def decisions(self, user: str) -> list[object]:
        """Returns what a user may do, as several APIs tell it."""
        client = self.users[user]
        named = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in [*TOPICS, "nope"]],
            allow_auto_topic_creation=False,
            include_topic_authorized_operations=True,
        )
        every = MetadataRequest(topics=None, include_topic_authorized_operations=True)
        decisions: list[object] = []
        for request in (named, every):
            described = client.call(request, 12, MetadataResponse).topics
            shown = [(topic.name, topic.error_code, topic.topic_authorized_operations) for topic in described]
            decisions.append(sorted(row for row in shown if row[0] in [*TOPICS, "nope"]))
        cluster = client.call(
            DescribeClusterRequest(include_cluster_authorized_operations=True), 1, DescribeClusterResponse
        )
        decisions.append((cluster.error_code, cluster.cluster_authorized_operations))
        groups = client.call(
            DescribeGroupsRequest(groups=GROUPS, include_authorized_operations=True), 5, DescribeGroupsResponse
        ).groups
        decisions.append([(group.group_id, group.error_code, group.authorized_operations) for group in groups])
        for transactional_id in (None, "ab"):
            begin = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=1000)
            error = client.call(begin, 4, InitProducerIdResponse).error_code
            refusals = (Errors.CLUSTER_AUTHORIZATION_FAILED, Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
            decisions.append(error if error in refusals else 0)
        return decisions


def login(port: int, user: str) -> WireClient:
    client = WireClient(port)
    assert client.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse).error_code == 0
    request = SaslAuthenticateRequest(auth_bytes=f"\0{user}\0{user}-secret".encode())
    assert client.call(request, 2, SaslAuthenticateResponse).error_code == 0
    return client


@pytest.fixture(scope="module", params=["false", "true"], ids=["strict", "allow-everyone"])
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Side, Side]]:
    """Kafka and kcoord, with and without allow.everyone.if.no.acl.found."""
    folder = tmp_path_factory.mktemp("brokers")
    users_port = free_ports(2)
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,USERS:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.users.plain.sasl.jaas.config": JAAS,
        "listener.name.users.scram-sha-256.sasl.jaas.config": SCRAM_JAAS,
        "listener.name.users.scram-sha-512.sasl.jaas.config": SCRAM_JAAS,
        "allow.everyone.if.no.acl.found": request.param,
        "auto.create.topics.enable": "false",
    }
    kcoord = authorizing_process(folder, **settings, listeners="PLAINTEXT://127.0.0.1:0,USERS://127.0.0.1:0")
    kafka = KafkaBroker(
        KafkaJars("4.4.0"),
        folder,
        **settings,
        **{
            "listeners": "PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port},"
            f"USERS://127.0.0.1:{users_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{{port}},USERS://127.0.0.1:{users_port}",
            "authorizer.class.name": STANDARD_AUTHORIZER,
            "super.users": "User:ANONYMOUS",
        },
    )
    try:
        kcoord.start()
        yield Side(kafka.port, users_port), Side(*kcoord.ports)
    finally:
        kcoord.kill()
        kafka.stop()


def test_random_acls(sides: tuple[Side, Side]) -> None:
    kafka, kcoord = sides
    source = random.Random(SEED)
    for side in sides:
        side.create_topics()
    for _ in range(ROUNDS):
        acls = list(dict.fromkeys(random_acl(source) for _ in range(source.randrange(14))))
        for side in sides:
            side.replace_acls(acls)
        for user in USERS:
            actual = kcoord.decisions(user)
            # Kafka responds before its authorizer has the ACLs.
            deadline = time.monotonic() + 5
            while (expected := kafka.decisions(user)) != actual and time.monotonic() < deadline:
                pass
            assert actual == expected, (user, list(map(str, acls)))


RIGHTS: list[tuple[ResourceType, AclOperation] | None] = [
    None,
    *((kind, AclOperation(operation)) for kind, operations in OPERATIONS.items() for operation in operations),
]
"""Each right alone on all resources of a type, and no right."""


def not_compared(right: tuple[ResourceType, AclOperation] | None) -> frozenset[ApiKey]:
    """Returns the APIs whose responses differ, or that take the right away."""
    # Without the right to it, Kafka does not respond to DescribeUserScramCredentials for all users.
    # Kafka does not have the APIs of client-side assignors.
    left_out = {
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT,
        ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT,
    }
    if right is not None and right[0] is ResourceType.GROUP:
        # Kafka describes a group that has nothing but a member without an id yet. `test_random_acls` has this API.
        left_out.add(ApiKey.DESCRIBE_GROUPS)
    if right in ((ResourceType.CLUSTER, AclOperation.ALL), (ResourceType.CLUSTER, AclOperation.ALTER)):
        left_out |= {ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS}
    return frozenset(left_out)


@pytest.mark.parametrize("sides", ["false"], indirect=True)
def test_every_api_with_a_single_right(sides: tuple[Side, Side]) -> None:
    kafka, kcoord = sides
    for right in RIGHTS:
        acls = []
        if right is not None:
            kind, operation = right
            name = "kafka-cluster" if kind is ResourceType.CLUSTER else "*"
            acls = [Acl(kind, name, PatternType.LITERAL, "User:alice", "*", operation, PermissionType.ALLOW)]
        for side in sides:
            # Some requests delete topics, if they may.
            side.create_topics()
            side.replace_acls(acls)
        # Kafka responds before its authorizer has the ACLs.
        wait_until(lambda: kafka.decisions("alice") == kcoord.decisions("alice"), f"Kafka has {right}", 30)
        left_out = not_compared(right)
        actual, expected = kcoord.refusals(left_out), kafka.refusals(left_out)
        different = {request: (rows, actual[request]) for request, rows in expected.items() if rows != actual[request]}
        assert not different, right


def deletion(name: str, mechanism: int = 1) -> AlterUserScramCredentialsRequest.ScramCredentialDeletion:
    return AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=mechanism)


def upsertion(
    name: str, mechanism: int = 1, iterations: int = 4096
) -> AlterUserScramCredentialsRequest.ScramCredentialUpsertion:
    return AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name=name, mechanism=mechanism, iterations=iterations, salt=b"salt", salted_password=b"salted"
    )


SCRAM_CHANGES = [
    AlterUserScramCredentialsRequest(deletions=deletions, upsertions=upsertions)
    for deletions, upsertions in (
        ([], [upsertion("carol"), upsertion("dave", 2, 16384)]),
        ([], [upsertion("carol", 2, 8192)]),
        ([], [upsertion("few", iterations=4095), upsertion("many", iterations=16385), upsertion("erin")]),
        ([], [upsertion(""), upsertion("unknown", 0), upsertion("other", 3)]),
        ([], [upsertion("twice"), upsertion("twice", 2)]),
        ([deletion("carol")], [upsertion("carol")]),
        ([deletion("nobody"), deletion("dave"), deletion("dave", 2), deletion(""), deletion("x", 7)], []),
        ([deletion("dave", 2)], []),
        ([], []),
    )
]
SCRAM_QUESTIONS = [None, [], ["carol"], ["carol", "carol", "nobody"], ["dave", "erin"], [""]]


def scram_results(side: Side) -> list[object]:
    """Changes the users of SCRAM and returns all results.

    They are sorted: Kafka has users and their mechanisms in the order of hash maps.
    """
    results: list[object] = []
    with WireClient(side.port) as client:
        for change in SCRAM_CHANGES:
            altered = client.call(change, 0, AlterUserScramCredentialsResponse)
            results.append(sorted((row.user, row.error_code, row.error_message) for row in altered.results))

        def describe(names: Sequence[str] | None) -> DescribeUserScramCredentialsResponse:
            users = None
            if names is not None:
                users = [DescribeUserScramCredentialsRequest.UserName(name=name) for name in names]
            request = DescribeUserScramCredentialsRequest(users=users)
            return client.call(request, 0, DescribeUserScramCredentialsResponse)

        def has_all_changes() -> bool:
            """Whether erin exists, whom a late change creates, and no longer dave, whom the last change removes."""
            errors = {row.user: row.error_code for row in describe(["dave", "erin"]).results}
            return errors == {"dave": Errors.RESOURCE_NOT_FOUND, "erin": 0}

        # Kafka responds before it has applied a change.
        wait_until(has_all_changes, "all changes are applied", 30)
        for names in SCRAM_QUESTIONS:
            described = describe(names)
            infos = {
                row.user: sorted((info.mechanism, info.iterations) for info in row.credential_infos)
                for row in described.results
            }
            rows = [(row.user, row.error_code, row.error_message) for row in described.results]
            results.append((described.error_code, described.error_message, sorted(rows), infos))
    return results


LOGINS = [
    ("PLAIN", b""),
    ("PLAIN", b"\0alice"),
    ("PLAIN", b"\0alice\0wrong"),
    ("PLAIN", b"\0nobody\0secret"),
    ("PLAIN", b"\0\0secret"),
    ("PLAIN", b"\0alice\0"),
    ("PLAIN", b"bob\0alice\0alice-secret"),
    ("PLAIN", b"\0a\0b\0c"),
    ("SCRAM-SHA-256", b"nonsense"),
    ("SCRAM-SHA-256", b"n,a=bob,n=carol,r=nonce"),
    ("SCRAM-SHA-512", b"p=tls-unique,,n=carol,r=nonce"),
    ("SCRAM-SHA-512", b"n,,n=token,r=nonce,tokenauth=true"),
    ("GSSAPI", b""),
    ("plain", b""),
]


def login_results(side: Side) -> list[object]:
    """Returns the errors and texts of logins that fail."""
    results: list[object] = []
    for mechanism, token in LOGINS:
        with WireClient(side.users_port) as client:
            shaken = client.call(SaslHandshakeRequest(mechanism=mechanism), 1, SaslHandshakeResponse)
            results.append((mechanism, shaken.error_code, sorted(shaken.mechanisms)))
            if not shaken.error_code:
                answer = client.call(SaslAuthenticateRequest(auth_bytes=token), 2, SaslAuthenticateResponse)
                results.append((token, answer.error_code, answer.error_message, answer.auth_bytes))
    return results


@pytest.mark.parametrize("sides", ["false"], indirect=True)
@pytest.mark.parametrize("results", [scram_results, login_results])
def test_users_and_logins(sides: tuple[Side, Side], results: Callable[[Side], list[object]]) -> None:
    kafka, kcoord = map(results, sides)
    assert kcoord == kafka
