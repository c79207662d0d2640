# SPDX-License-Identifier: Apache-2.0
"""What real clients may do on a listener with SASL, by ACLs that `kcoord acls` and librdkafka create."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclBindingFilter, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType
from confluent_kafka.cimpl import NewTopic

from kcoord.config.security import STANDARD_AUTHORIZER
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SETTINGS = {
    **FAST,
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN",
    "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{MODULE} user_admin="a" user_alice="b" user_bob="c";',
    "authorizer.class.name": STANDARD_AUTHORIZER,
    "super.users": "User:admin",
    "group.consumer.regex.refresh.interval.ms": "10000",
}


class Broker(KcoordProcess):
    def settings_of(self, user: str) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": {"admin": "a", "alice": "b", "bob": "c"}[user],
        }

    def admin(self, user: str = "admin") -> AdminClient:
        return AdminClient(self.settings_of(user))

    def grant(self, user: str, operation: AclOperation, kind: ResourceType, name: str) -> None:
        acl = AclBinding(
            kind, name, ResourcePatternType.LITERAL, f"User:{user}", "*", operation, AclPermissionType.ALLOW
        )
        admin = self.admin()
        admin.create_acls([acl])[acl].result(20)

    def revoke(self, user: str, kind: ResourceType, name: str) -> None:
        """Deletes the ACLs of the user on a resource."""
        acls = AclBindingFilter(
            kind,
            name,
            ResourcePatternType.LITERAL,
            f"User:{user}",
            None,  # type: ignore[arg-type]
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        admin = self.admin()
        assert admin.delete_acls([acls])[acls].result(20)

    def properties(self, user: str, folder: Path) -> str:
        """Returns the path of a properties file for Kafka's tools."""
        settings = self.settings_of(user)
        jaas = f'{MODULE} username="{user}" password="{settings["sasl.password"]}";'
        path = folder / f"{user}.properties"
        path.write_text(f"security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\nsasl.jaas.config={jaas}\n")
        return str(path)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    process = Broker(tmp_path, SETTINGS).start()
    admin = process.admin()
    topics = [NewTopic(name, 1, 1) for name in ("orders", "orders-secret")]
    for future in admin.create_topics(topics).values():
        future.result(20)
    yield process
    assert process.stop() == 0, process.log


def produce(broker: Broker, user: str, topic: str) -> int | None:
    """Returns the code of the error, None if the record was written."""
    codes: list[int | None] = []
    producer = Producer({**broker.settings_of(user), "message.timeout.ms": 20_000})
    producer.produce(
        topic, b"value", on_delivery=lambda error, _: codes.append(None if error is None else error.code())
    )
    producer.flush(20)
    (code,) = codes
    return code


def test_a_client_sees_and_does_what_acls_allow(broker: Broker) -> None:
    alice = broker.admin("alice")
    assert alice.list_topics(timeout=20).topics == {}
    assert produce(broker, "alice", "orders") == KafkaError.TOPIC_AUTHORIZATION_FAILED
    with pytest.raises(KafkaException) as caught:
        alice.create_topics([NewTopic("new", 1, 1)])["new"].result(20)
    assert caught.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    bob = broker.admin("bob")
    with pytest.raises(KafkaException) as caught:
        bob.describe_consumer_groups(["g"])["g"].result(20)
    assert caught.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    broker.grant("alice", AclOperation.WRITE, ResourceType.TOPIC, "orders")
    assert set(alice.list_topics(timeout=20).topics) == {"orders"}
    assert produce(broker, "alice", "orders") is None
    assert produce(broker, "alice", "orders-secret") == KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_consumer_reads_the_topics_that_it_may_read_until_it_may_not(broker: Broker, protocol: str) -> None:
    for topic in ("orders", "orders-secret"):
        assert produce(broker, "admin", topic) is None
    settings = {
        **broker.settings_of("alice"),
        "group.id": "g",
        "group.protocol": protocol,
        "auto.offset.reset": "earliest",
    }

    def first_error(consumer: Consumer) -> int:
        codes: list[int] = []

        def has_failed() -> bool:
            message = consumer.poll(0.1)
            if message is not None and (error := message.error()) is not None:
                codes.append(error.code())
            return bool(codes)

        wait_until(has_failed, "the consumer gets an error", 20)
        return codes[0]

    with closing(Consumer(settings)) as consumer:
        consumer.subscribe(["orders"])
        assert first_error(consumer) in (
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
        )
    broker.grant("alice", AclOperation.READ, ResourceType.GROUP, "g")
    broker.grant("alice", AclOperation.READ, ResourceType.TOPIC, "orders")
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe(["^orders.*"])
        topics: set[str | None] = set()

        def has_record() -> bool:
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                topics.add(message.topic())
            return bool(topics)

        wait_until(has_record, "the consumer gets a record", 20)
        consumer.poll(1)
        assert topics == {"orders"}
        assert {partition.topic for partition in consumer.assignment()} == {"orders"}
        consumer.commit(asynchronous=False)
        broker.revoke("alice", ResourceType.TOPIC, "orders")
        assert first_error(consumer) == KafkaError.TOPIC_AUTHORIZATION_FAILED


@pytest.mark.java
def test_kafkas_tools_show_what_the_client_may_describe(broker: Broker, tmp_path: Path) -> None:
    jars = KafkaJars()
    at = ("--bootstrap-server", broker.address, "--command-config", broker.properties("alice", tmp_path))
    assert jars.tool("topics", *at, "--list").split() == []
    broker.grant("alice", AclOperation.DESCRIBE, ResourceType.TOPIC, "orders")
    assert jars.tool("topics", *at, "--list").split() == ["orders"]
    # The tool also asks for the configs.
    assert "Topic authorization failed." in jars.tool("topics", *at, "--describe", check=False)
    broker.grant("alice", AclOperation.DESCRIBE_CONFIGS, ResourceType.TOPIC, "orders")
    described = jars.tool("topics", *at, "--describe")
    assert "Topic: orders\t" in described
    assert "orders-secret" not in described
    as_admin = ("--bootstrap-server", broker.address, "--command-config", broker.properties("admin", tmp_path))
    consumer = ("--allow-principal", "User:alice", "--consumer", "--topic", "orders", "--group", "g")
    assert "operation=READ" in jars.tool("acls", *as_admin, "--add", *consumer)
    for group, text in (("g", "Group g not found"), ("other", "GroupAuthorizationException")):
        assert text in jars.tool("consumer-groups", *at, "--describe", "--group", group, check=False)
