# SPDX-License-Identifier: Apache-2.0
"""Random ACLs in Apache Kafka 4.4.0 and in kcoord: both allow the same users the same."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
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
from tests.integration.wire import WireClient
from tests.support.authorizing_process import authorizing_process
from tests.support.kafka_broker import KafkaBroker, free_port_pair
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

ROUNDS = 15
SEED = 20261123
TOPICS = ["a", "ab", "abc", "b"]
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


@pytest.mark.parametrize("allow_everyone", ["false", "true"])
def test_random_acls(tmp_path: Path, allow_everyone: str) -> None:
    users_port = free_port_pair()
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,USERS:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.users.plain.sasl.jaas.config": JAAS,
        "allow.everyone.if.no.acl.found": allow_everyone,
        "auto.create.topics.enable": "false",
    }
    kcoord = authorizing_process(tmp_path, **settings, listeners="PLAINTEXT://127.0.0.1:0,USERS://127.0.0.1:0")
    kafka = KafkaBroker(
        KafkaJars("4.4.0"),
        tmp_path,
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
        compare(Side(kafka.port, users_port), Side(*kcoord.ports))
    finally:
        kcoord.kill()
        kafka.stop()


def compare(kafka: Side, kcoord: Side) -> None:
    source = random.Random(SEED)
    for side in (kafka, kcoord):
        side.create_topics()
    for _ in range(ROUNDS):
        acls = list(dict.fromkeys(random_acl(source) for _ in range(source.randrange(14))))
        for side in (kafka, kcoord):
            side.replace_acls(acls)
        for user in USERS:
            actual = kcoord.decisions(user)
            # Kafka responds before its authorizer has the ACLs.
            deadline = time.monotonic() + 5
            while (expected := kafka.decisions(user)) != actual and time.monotonic() < deadline:
                pass
            assert actual == expected, (user, list(map(str, acls)))
