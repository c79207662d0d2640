# SPDX-License-Identifier: Apache-2.0
"""ACLs by Kafka's kafka-acls, by `kcoord acls` and by librdkafka's admin client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from kcoord_protocol.errors import Errors
from tests.support.authorizing_process import authorizing_process
from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    process = authorizing_process(tmp_path_factory.mktemp("kcoord")).start()
    yield process
    assert process.stop() == 0, process.log


def lines(text: str) -> list[str]:
    """Returns the lines in alphabetical order: Kafka's tool prints ACLs in the order of a hash map."""
    return sorted(line.strip() for line in text.splitlines() if line.strip())


@pytest.mark.java
def test_kafkas_tool_and_kcoord_acls_print_the_same(broker: KcoordProcess) -> None:
    jars, kcoord = KafkaJars(), CommandLine(broker.address)

    def both(*arguments: str) -> list[str]:
        """Runs both tools, and returns the lines that both print."""
        ours = kcoord.succeed("acls", *arguments).out
        theirs = jars.tool("acls", "--bootstrap-server", broker.address, *arguments)
        assert lines(ours) == lines(theirs)
        return lines(ours)

    def added(*arguments: str) -> list[str]:
        """Adds ACLs with both tools, each to a cluster without them. Then both say that the ACLs exist."""
        ours = kcoord.succeed("acls", "--add", *arguments).out
        kcoord.succeed("acls", "--remove", "--force", *arguments)
        theirs = jars.tool("acls", "--bootstrap-server", broker.address, "--add", *arguments)
        assert lines(ours) == lines(theirs)
        assert all(line.endswith("already exists.") for line in both("--add", *arguments))
        return lines(ours)

    assert "(principal=User:eve, host=10.0.0.0/8, operation=READ, permissionType=DENY)" in added(
        *("--allow-principal", "User:alice", "--deny-principal", "User:eve"),
        *("--allow-host", "192.0.2.1", "--deny-host", "10.0.0.0/8", "--operation", "Read", "--operation", "Describe"),
        *("--topic", "orders", "--group", "billing"),
    )
    added(
        *("--allow-principal", "User:bob", "--producer", "--idempotent"),
        *("--topic", "ord", "--transactional-id", "tx", "--resource-pattern-type", "prefixed"),
    )
    listed = both("--list")
    assert len([line for line in listed if line.startswith("(")]) == 14
    assert len(both("--list", "--topic", "orders", "--resource-pattern-type", "match")) == 9
    assert both("--list", "--topic", "ord") == []
    both("--list", "--principal", "User:bob", "--principal", "User:nobody")
    both("--remove", "--force", "--deny-principal", "User:eve", "--deny-host", "10.0.0.0/8", "--topic", "orders")
    both("--remove", "--force", "--allow-principal", "User:bob", "--producer", "--topic", "ord")
    both("--remove", "--force", "--topic", "orders", "--resource-pattern-type", "match")
    kcoord.succeed("acls", "--remove", "--group", "billing", stdin="y\n")
    assert {line for line in both("--list") if "Current" in line} == {
        "Current ACLs for resource `ResourcePattern(resourceType=CLUSTER, name=kafka-cluster, patternType=LITERAL)`:",
        "Current ACLs for resource `ResourcePattern(resourceType=TRANSACTIONAL_ID, name=tx, patternType=PREFIXED)`:",
    }
    both("--remove", "--force", "--cluster", "--transactional-id", "tx", "--resource-pattern-type", "any")
    assert both("--list") == []


def test_librdkafka(broker: KcoordProcess) -> None:
    admin = AdminClient({"bootstrap.servers": broker.address})
    read = AclBinding(
        ResourceType.TOPIC,
        "ord",
        ResourcePatternType.PREFIXED,
        "User:carol",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    wrong = AclBinding(
        ResourceType.TOPIC,
        "t",
        ResourcePatternType.LITERAL,
        "carol",
        "*",
        AclOperation.ALL,
        AclPermissionType.DENY,
    )
    created = admin.create_acls([read, wrong])
    assert created[read].result(20) is None
    with pytest.raises(KafkaException) as caught:
        created[wrong].result(20)
    assert caught.value.args[0].code() == Errors.INVALID_REQUEST
    assert caught.value.args[0].str().startswith("Could not parse principal from `carol`")
    by_match = AclBindingFilter(
        ResourceType.TOPIC,
        "orders",
        ResourcePatternType.MATCH,
        "User:carol",
        None,  # type: ignore[arg-type]
        AclOperation.ANY,
        AclPermissionType.ANY,
    )
    assert admin.describe_acls(by_match).result(20) == [read]
    assert admin.delete_acls([by_match])[by_match].result(20) == [read]
    assert admin.describe_acls(by_match).result(20) == []
