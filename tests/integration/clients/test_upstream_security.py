# SPDX-License-Identifier: Apache-2.0
"""Clients log in at Apache Kafka 4.3.1 through kcoord, with TLS on both sides and Kafka's StandardAuthorizer.

`make soak` takes every right away from kcoord's user, one by one. Otherwise only the last one is taken away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer

from kcoord.client import AdminClient
from kcoord.testing import allow
from kcoord_protocol.acls import Acl, AclFilter
from kcoord_protocol.errors import KafkaError as OwnKafkaError
from tests.integration.upstream.rights import CLIENT_ID, RIGHTS, TOPIC, Right, use
from tests.support.certificates import Authority
from tests.support.command_line import CommandLine, rows
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

SECONDS = 30.0
ALL_RIGHTS = "KCOORD_SOAK_ROUNDS" in os.environ
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"
BEARER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
USERS = {"gateway": "gateway-secret", "alice": "alice-secret", "bob": "bob-secret"}
OF_ALICE = [
    allow("alice", "Read", topic=TOPIC),
    allow("alice", "Write", topic=TOPIC),
    allow("alice", "Read", group="alice-", prefixed=True),
    allow("alice", "Write", transactional_id=CLIENT_ID),
]
OF_ADMIN = [
    allow("bob", "DescribeConfigs", cluster=True),
    allow("bob", "Describe", topic="*"),
    allow("bob", "DescribeConfigs", topic="*"),
    allow("bob", "Describe", group="*"),
]

Settings = Mapping[str, str | int | float | bool]


class SecuredKafka:
    """Kafka with a plain listener for the test, which may do everything, and one with SASL_SSL."""

    def __init__(self, jars: KafkaJars, folder: Path) -> None:
        authority = Authority()
        self.authority_file = authority.write_pem(folder / "authority.pem")
        key = authority.issue("broker", "localhost", "127.0.0.1").write_pem(folder / "broker.pem")
        port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        users = " ".join(f'user_{user}="{password}"' for user, password in USERS.items())
        login = "listener.name.login."
        self.broker = KafkaBroker(
            jars,
            folder,
            listeners=f"PLAINTEXT://127.0.0.1:{{port}},CONTROLLER://127.0.0.1:{{controller_port}},LOGIN://{self.address}",
            advertised_listeners=f"PLAINTEXT://127.0.0.1:{{port}},LOGIN://{self.address}",
            listener_security_protocol_map="PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LOGIN:SASL_SSL",
            authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            super_users="User:ANONYMOUS",
            sasl_enabled_mechanisms="PLAIN,SCRAM-SHA-512,OAUTHBEARER",
            **{
                f"{login}ssl.keystore.type": "PEM",
                f"{login}ssl.keystore.location": key,
                f"{login}plain.sasl.jaas.config": f"{PLAIN} {users};",
                f"{login}scram-sha-512.sasl.jaas.config": f"{SCRAM};",
                f"{login}oauthbearer.sasl.jaas.config": f"{BEARER};",
            },
        )
        self.key = key

    def prepare(self) -> None:
        """Adds the users, the topic and the ACLs."""
        command = CommandLine(self.broker.address)
        for user, password in USERS.items():
            command.succeed("users", "add", "--user", user, "--password-file", "-", stdin=password)
        command.succeed("topics", "--create", "--topic", TOPIC, "--partitions", "3")
        self.replace_acls([*(right.acl("gateway") for right in RIGHTS), *OF_ALICE, *OF_ADMIN])

    def replace_acls(self, acls: Sequence[Acl]) -> None:
        """Replaces all ACLs, and waits until Kafka's authorizer has them."""

        async def run() -> None:
            async with AdminClient(bootstrap_servers=self.broker.address) as admin:
                (await admin.delete_acls([AclFilter()])).all()
                (await admin.create_acls(acls)).all()
                async with asyncio.timeout(SECONDS):
                    while set(await admin.describe_acls()) != set(acls):
                        await asyncio.sleep(0.05)

        asyncio.run(run())


@pytest.fixture(scope="module")
def jars() -> KafkaJars:
    return KafkaJars()


@pytest.fixture(scope="module")
def kafka(jars: KafkaJars, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    secured = SecuredKafka(jars, tmp_path_factory.mktemp("kafka"))
    try:
        secured.prepare()
        yield secured
    finally:
        secured.broker.stop()


def new_gateway(kafka: SecuredKafka, folder: Path) -> KcoordProcess:
    prefix = "kcoord.upstream."
    return KcoordProcess(
        folder,
        {
            **FAST,
            "listeners": "SASL_SSL://127.0.0.1:0",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": kafka.key,
            f"{prefix}authentication": "pass-through",
            f"{prefix}bootstrap.servers": kafka.address,
            f"{prefix}ports": "0",
            f"{prefix}security.protocol": "SASL_SSL",
            f"{prefix}ssl.truststore.type": "PEM",
            f"{prefix}ssl.truststore.location": kafka.authority_file,
            f"{prefix}sasl.mechanism": "SCRAM-SHA-512",
            f"{prefix}sasl.jaas.config": f'{SCRAM} username="gateway" password="gateway-secret";',
        },
    )


@pytest.fixture(scope="module")
def gateway(kafka: SecuredKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    process = new_gateway(kafka, tmp_path_factory.mktemp("gateway")).start()
    yield process
    process.stop(signal.SIGKILL)


def login(kafka: SecuredKafka, gateway: KcoordProcess, user: str, mechanism: str) -> Settings:
    settings = {
        "bootstrap.servers": gateway.address,
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": kafka.authority_file,
        "sasl.mechanism": mechanism,
    }
    if mechanism == "OAUTHBEARER":
        return {
            **settings,
            "enable.sasl.oauthbearer.unsecure.jwt": True,
            "sasl.oauthbearer.config": f"principal={user}",
        }
    return {**settings, "sasl.username": user, "sasl.password": USERS[user]}


def properties(kafka: SecuredKafka, user: str) -> dict[str, str]:
    """Returns the settings of Kafka's tools and of kcoord's commands."""
    return {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.jaas.config": f'{SCRAM} username="{user}" password="{USERS[user]}";',
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": kafka.authority_file,
    }


def write_properties(kafka: SecuredKafka, user: str, folder: Path) -> str:
    """Writes the settings to a file. Returns its name."""
    file = folder / f"{user}.properties"
    file.write_text("".join(f"{key}={value}\n" for key, value in properties(kafka, user).items()))
    return str(file)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512", "OAUTHBEARER"])
def test_confluent_kafka(kafka: SecuredKafka, gateway: KcoordProcess, mechanism: str) -> None:
    settings, value = login(kafka, gateway, "alice", mechanism), mechanism.encode()
    errors: list[KafkaError | None] = []
    producer = Producer(dict(settings))
    producer.produce(TOPIC, value, on_delivery=lambda error, _: errors.append(error))
    producer.flush(SECONDS)
    assert errors == [None]
    consumer = Consumer(
        {**settings, "group.id": f"alice-{mechanism}", "group.protocol": "consumer", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([TOPIC])

    def has_value() -> bool:
        message = consumer.poll(0.2)
        return message is not None and not message.error() and message.value() == value

    wait_until(has_value, f"{mechanism} gets its record", SECONDS)
    consumer.commit(asynchronous=False)
    consumer.close()


def test_transaction(kafka: SecuredKafka, gateway: KcoordProcess) -> None:
    settings = {"bootstrap.servers": gateway.address, **properties(kafka, "alice")}
    asyncio.run(use(settings, "alice-commits"))


def test_another_user_may_neither_write_nor_join(kafka: SecuredKafka, gateway: KcoordProcess) -> None:
    settings = login(kafka, gateway, "bob", "SCRAM-SHA-512")
    errors: list[KafkaError | None] = []
    producer = Producer(dict(settings))
    producer.produce(TOPIC, b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(SECONDS)
    assert [error.code() for error in errors if error] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    consumer = Consumer({**settings, "group.id": "alice-1", "group.protocol": "consumer"})
    consumer.subscribe([TOPIC])

    def is_refused() -> bool:
        message = consumer.poll(0.2)
        return message is not None and "Group authorization failed" in str(message.error())

    wait_until(is_refused, "the group is refused", SECONDS)
    consumer.close()


def test_java(kafka: SecuredKafka, gateway: KcoordProcess, jars: KafkaJars, tmp_path: Path) -> None:
    server = ("--bootstrap-server", gateway.address)
    config = write_properties(kafka, "alice", tmp_path)
    jars.tool(
        "console-producer", *server, "--topic", TOPIC, "--command-config", config, stdin="java-1\njava-2\njava-3\n"
    )
    output = jars.tool(
        "console-consumer",
        *(*server, "--topic", TOPIC, "--group", "alice-java", "--from-beginning", "--command-config", config),
        *("--max-messages", "3", "--timeout-ms", "30000", "--command-property", "group.protocol=consumer"),
    )
    assert "Processed a total of 3 messages" in output
    described = jars.tool("consumer-groups", *server, "--command-config", config, "--describe", "--group", "alice-java")
    assert sum(int(row["CURRENT-OFFSET"]) for row in rows(described)) == 3


def test_commands_log_in_at_both_sides(kafka: SecuredKafka, gateway: KcoordProcess, tmp_path: Path) -> None:
    config = write_properties(kafka, "bob", tmp_path)
    shown = CommandLine(gateway.address).succeed("upstream", "status", "--command-config", config).out
    assert "__kcoord_offsets" in shown


@pytest.mark.parametrize("right", RIGHTS[::-1] if ALL_RIGHTS else RIGHTS[-1:], ids=str)
def test_a_missing_right_is_named(kafka: SecuredKafka, right: Right, tmp_path: Path) -> None:
    if right.operation == "Create":  # The last one. The others find the topics.
        CommandLine(kafka.broker.address).succeed(
            "topics", "--delete", "--topic", "__kcoord_offsets", "--topic", "__kcoord_metadata"
        )
    kafka.replace_acls([*(other.acl("gateway") for other in RIGHTS if other is not right), *OF_ALICE])
    gateway = new_gateway(kafka, tmp_path)
    gateway.spawn()
    text = f"lacks the right {right.operation} on "
    try:
        if right.is_for_clients:
            ready = wait_until(
                lambda: re.findall(r"kcoord is ready: SASL_SSL://127.0.0.1:(\d+),", gateway.log), "it is ready", SECONDS
            )
            gateway.ports = [int(ready[0])]
            settings = {"bootstrap.servers": gateway.address, "default.api.timeout.ms": "2000"}
            with contextlib.suppress(OwnKafkaError):
                asyncio.run(use({**settings, **properties(kafka, "alice")}, f"alice-{RIGHTS.index(right)}"))
        wait_until(lambda: text in gateway.log, f"{right} is named; log: {gateway.log_file}", SECONDS)
    finally:
        gateway.stop(signal.SIGKILL)
