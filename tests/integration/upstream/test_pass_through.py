# SPDX-License-Identifier: Apache-2.0
"""Clients log in at the upstream, another kcoord, through kcoord. The ACLs of the upstream decide."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient as ConfluentAdmin

from kcoord.client import AdminClient
from kcoord.client.config import AdminConfig
from kcoord.testing import KcoordBroker, allow, start_broker
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    MetadataRequest,
    MetadataResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from tests.integration.upstream.rights import CLIENT_ID, RIGHTS
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.command_line import CommandLine
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "orders"
USERS = {"gateway": "gateway-secret", "alice": "alice-secret", "bob": "bob-secret"}
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"
GATEWAY = {
    "kcoord.upstream.ports": "0",
    "kcoord.upstream.authentication": "pass-through",
    "kcoord.upstream.acls.max.age.ms": "600",
    "kcoord.upstream.security.protocol": "SASL_PLAINTEXT",
    "kcoord.upstream.sasl.mechanism": "PLAIN",
    "kcoord.upstream.sasl.jaas.config": f'{MODULE} username="gateway" password="gateway-secret";',
    "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
}
OF_ALICE = [
    allow("alice", "Read", topic=TOPIC),
    allow("alice", "Write", topic=TOPIC),
    allow("alice", "Read", group="alice-", prefixed=True),
    allow("alice", "Write", transactional_id=CLIENT_ID),
]
INSTANCE = 1_000_000
SESSION_MS = 1_500
SECONDS = 20.0


def login(address: str, user: str, mechanism: str = "PLAIN", password: str = "") -> dict[str, str | int | float | bool]:
    return {
        "bootstrap.servers": address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.username": user,
        "sasl.password": password or USERS[user],
        "socket.timeout.ms": "3000",
    }


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    acls = [*(right.acl("gateway") for right in RIGHTS), *OF_ALICE]
    with start_broker({"connections.max.reauth.ms": str(SESSION_MS)}, users=USERS, acls=acls) as broker:
        broker.create_topic(TOPIC, 3)
        yield broker


def start(upstream: KcoordBroker, folder: Path, **settings: str) -> KcoordProcess:
    own = {key.replace("_", "."): value for key, value in settings.items()}
    overrides = {**FAST, **GATEWAY, "kcoord.upstream.bootstrap.servers": upstream.bootstrap_servers, **own}
    return KcoordProcess(folder, overrides)


@pytest.fixture(scope="module")
def gateway(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    process = start(upstream, tmp_path_factory.mktemp("gateway")).start()
    yield process
    process.kill()


def produce(settings: Mapping[str, str | int | float | bool], value: bytes) -> KafkaError | None:
    """Produces a record. Returns its error."""
    errors: list[KafkaError | None] = []
    producer = Producer(dict(settings))
    producer.produce(TOPIC, value, partition=0, on_delivery=lambda error, _: errors.append(error))
    producer.flush(SECONDS)
    return errors[0]


def consume(settings: Mapping[str, str | int | float | bool], group: str, expected: bytes) -> None:
    """Consumes until the value arrives, and commits."""
    consumer = Consumer({**settings, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])

    def has_value() -> bool:
        message = consumer.poll(0.2)
        return message is not None and not message.error() and message.value() == expected

    wait_until(has_value, f"{group} gets {expected!r}", SECONDS)
    consumer.commit(asynchronous=False)
    consumer.close()


def group_error(address: str, user: str, group: str) -> Errors | None:
    """Returns the error of a fetch of committed offsets, None if it succeeds."""
    properties = {
        "bootstrap.servers": address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f'{MODULE} username="{user}" password="{USERS[user]}";',
        "default.api.timeout.ms": "1000",
    }

    async def run() -> Errors | None:
        async with AdminClient(AdminConfig.from_properties(properties)) as admin:
            error = (await admin.list_consumer_group_offsets([group])).error(group)
        return None if error is None else error.error

    return asyncio.run(run())


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_client_works_with_its_own_rights(gateway: KcoordProcess, mechanism: str, protocol: str) -> None:
    settings = login(gateway.address, "alice", mechanism)
    value = f"{mechanism}-{protocol}".encode()
    assert produce(settings, value) is None
    consume({**settings, "group.protocol": protocol}, f"alice-{protocol}-{mechanism}", value)


def test_the_upstream_sees_the_client_as_its_user(gateway: KcoordProcess) -> None:
    error = produce(login(gateway.address, "bob"), b"x")
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_groups_are_judged_by_the_acls_of_the_upstream(gateway: KcoordProcess) -> None:
    assert group_error(gateway.address, "alice", "alice-1") is None
    assert group_error(gateway.address, "alice", "bobs") == Errors.GROUP_AUTHORIZATION_FAILED
    assert group_error(gateway.address, "bob", "alice-1") == Errors.GROUP_AUTHORIZATION_FAILED


def test_every_port_asks_for_a_login(gateway: KcoordProcess) -> None:
    admin = ConfluentAdmin(login(gateway.address, "alice"))
    ports = {broker.port for broker in admin.list_topics(timeout=10).brokers.values()}
    assert len(ports) == 2
    for port in ports:
        with WireClient(port) as client, pytest.raises(ConnectionClosed):
            client.call(MetadataRequest(topics=[]), 9, MetadataResponse)
        for password, error in (("wrong", Errors.SASL_AUTHENTICATION_FAILED), (USERS["alice"], Errors.NONE)):
            with WireClient(port) as client:
                shaken = client.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse)
                assert (shaken.error_code, "PLAIN" in shaken.mechanisms) == (Errors.NONE, True)
                token = SaslAuthenticateRequest(auth_bytes=f"\0alice\0{password}".encode())
                answer = client.call(token, 2, SaslAuthenticateResponse)
                assert answer.error_code == error
                if error is Errors.NONE:
                    assert answer.session_lifetime_ms == SESSION_MS
                    client.call(MetadataRequest(topics=[]), 9, MetadataResponse)
                    continue
                assert answer.error_message == "Authentication failed: Invalid username or password"
                with pytest.raises((ConnectionClosed, ConnectionResetError)):
                    client.call(MetadataRequest(topics=[]), 9, MetadataResponse)


def test_offsets_in_transactions(gateway: KcoordProcess) -> None:
    settings = login(gateway.address, "alice")
    producer = Producer({**settings, "transactional.id": CLIENT_ID})
    producer.init_transactions(SECONDS)
    groups = {group: Consumer({**settings, "group.id": group}) for group in ("alice-pays", "bobs")}
    for offset, finish in ((3, producer.commit_transaction), (4, producer.abort_transaction)):
        producer.begin_transaction()
        producer.produce(TOPIC, b"paid", partition=2)
        offsets = [TopicPartition(TOPIC, 0, offset)]
        producer.send_offsets_to_transaction(offsets, groups["alice-pays"].consumer_group_metadata(), SECONDS)
        finish(SECONDS)
        assert groups["alice-pays"].committed([TopicPartition(TOPIC, 0)], SECONDS)[0].offset == 3
    producer.begin_transaction()
    with pytest.raises(KafkaException) as error:
        producer.send_offsets_to_transaction(offsets, groups["bobs"].consumer_group_metadata(), SECONDS)
    assert error.value.args[0].code() == KafkaError.GROUP_AUTHORIZATION_FAILED
    producer.abort_transaction(SECONDS)


def test_a_client_cannot_use_the_rights_of_kcoord_in_transactions(gateway: KcoordProcess) -> None:
    """kcoord's user may write with alice's transactional id, and bob may not, on any port."""
    admin = ConfluentAdmin(login(gateway.address, "alice"))
    for broker in admin.list_topics(timeout=10).brokers.values():
        with logged_in(broker.port, "bob") as client:
            request = AddOffsetsToTxnRequest(transactional_id=CLIENT_ID, group_id="bobs")
            answer = client.call(request, 3, AddOffsetsToTxnResponse)
            assert answer.error_code == Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
            committed = commit_in_transaction(client, "bobs", producer_id=0)
            expected = Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED if broker.id == INSTANCE else Errors.NOT_COORDINATOR
            assert committed == expected


def test_offsets_without_a_producer_are_rejected(gateway: KcoordProcess) -> None:
    """They would be in no transaction, so the cluster would not verify them."""
    admin = ConfluentAdmin(login(gateway.address, "alice"))
    with logged_in(admin.list_topics(timeout=10).brokers[INSTANCE].port, "alice") as client:
        assert commit_in_transaction(client, "alice-pays", producer_id=-1) == Errors.INVALID_PRODUCER_ID_MAPPING


@contextmanager
def logged_in(port: int, user: str) -> Iterator[WireClient]:
    with WireClient(port) as client:
        client.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse)
        token = SaslAuthenticateRequest(auth_bytes=f"\0{user}\0{USERS[user]}".encode())
        client.call(token, 2, SaslAuthenticateResponse)
        yield client


def commit_in_transaction(client: WireClient, group_id: str, producer_id: int) -> int:
    """Sends a TxnOffsetCommit for one partition and returns its error code."""
    partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=1)
    commit = TxnOffsetCommitRequest(
        transactional_id=CLIENT_ID,
        group_id=group_id,
        producer_id=producer_id,
        topics=[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=TOPIC, partitions=[partition])],
    )
    return client.call(commit, 3, TxnOffsetCommitResponse).topics[0].partitions[0].error_code


def test_changed_acls_count_soon_and_at_once_if_they_come_through_kcoord(
    upstream: KcoordBroker, gateway: KcoordProcess
) -> None:
    change = [allow("bob", "Read", group="bobs"), allow("bob", "Read", topic=TOPIC)]
    assert group_error(gateway.address, "bob", "bobs") == Errors.GROUP_AUTHORIZATION_FAILED
    upstream.add_acls(change)
    wait_until(lambda: group_error(gateway.address, "bob", "bobs") is None, "the ACLs are read", SECONDS)
    upstream.remove_acls(change)
    wait_until(
        lambda: group_error(gateway.address, "bob", "bobs") == Errors.GROUP_AUTHORIZATION_FAILED,
        "the ACLs are read",
        SECONDS,
    )
    admin = [allow("bob", "Alter", cluster=True), allow("bob", "Describe", cluster=True)]
    upstream.add_acls(admin)
    command = CommandLine(gateway.address)
    config = gateway.data.parent / "bob.properties"
    config.write_text(
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=PLAIN\n"
        f'sasl.jaas.config={MODULE} username="bob" password="bob-secret";\n'
    )
    own = ("--allow-principal", "User:bob", "--operation", "Read", "--command-config", str(config))
    for change_, expected in (("--add", None), ("--remove", Errors.GROUP_AUTHORIZATION_FAILED)):
        force = ("--force",) if change_ == "--remove" else ()
        command.succeed("acls", change_, *own, "--group", "bobs", *force)
        assert group_error(gateway.address, "bob", "bobs") == expected
    upstream.remove_acls(admin)


def test_no_group_is_served_while_the_acls_cannot_be_read(upstream: KcoordBroker, gateway: KcoordProcess) -> None:
    """A member that is there notices nothing but a coordinator that is away. Data is still served."""
    settings = login(gateway.address, "alice")
    consumer = Consumer({**settings, "group.id": "alice-stays", "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])
    wait_until(lambda: consumer.poll(0.1) or consumer.assignment(), "the member has partitions", SECONDS)
    with upstream.inject_fault("DescribeAcls", error="CLUSTER_AUTHORIZATION_FAILED", times=None):
        wait_until(lambda: "No group is served" in gateway.log, "kcoord notices", SECONDS)
        assert "kcoord's user in the upstream lacks the right Describe on the cluster" in gateway.log
        assert group_error(gateway.address, "alice", "alice-1") is Errors.COORDINATOR_NOT_AVAILABLE
        assert produce(settings, b"still") is None
        consumer.poll(0.5)
    wait_until(lambda: group_error(gateway.address, "alice", "alice-1") is None, "groups are served again", SECONDS)
    assert "Groups are served again" in gateway.log
    wait_until(lambda: consumer.poll(0.1) or consumer.assignment(), "the member is still there", SECONDS)
    consumer.commit(asynchronous=False)
    consumer.close()


def test_sessions_are_renewed(gateway: KcoordProcess) -> None:
    """The upstream ends a session after 1.5 s. The clients renew it, on all connections, and lose nothing."""
    settings = login(gateway.address, "alice")
    producer = Producer(settings)
    consumer = Consumer({**settings, "group.id": "alice-renews", "auto.offset.reset": "earliest"})
    consumer.subscribe([TOPIC])
    errors: list[KafkaError | None] = []
    received: set[bytes] = set()
    sent = 0
    deadline = time.monotonic() + 3 * SESSION_MS / 1000

    def has_all() -> bool:
        message = consumer.poll(0.1)
        if message is not None and not message.error() and (message.value() or b"").startswith(b"renewed-"):
            received.add(message.value() or b"")
        return len(received) == sent

    while time.monotonic() < deadline:
        producer.produce(TOPIC, f"renewed-{sent}".encode(), on_delivery=lambda error, _: errors.append(error))
        sent += 1
        producer.poll(0)
        has_all()
    producer.flush(SECONDS)
    assert set(errors) <= {None}
    wait_until(has_all, "all records arrive", SECONDS)
    consumer.close()
    assert "closing, the session" not in gateway.log


def test_an_upstream_without_an_authorizer(tmp_path: Path) -> None:
    with start_broker(users=USERS) as open_upstream:
        open_upstream.create_topic(TOPIC)
        gateway = start(open_upstream, tmp_path).start()
        try:
            assert group_error(gateway.address, "bob", "g") is None
            assert "The upstream has no authorizer, so every client that logs in may use every group" in gateway.log
        finally:
            gateway.kill()
        authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        strict = tmp_path / "strict"
        strict.mkdir()
        assert failed_start(start(open_upstream, strict, authorizer_class_name=authorizer)) == (
            "kcoord: the ACLs of the upstream cannot be read: the upstream has no authorizer, but "
            "authorizer.class.name demands one"
        )


def failed_start(gateway: KcoordProcess) -> str:
    """Starts a gateway that cannot start. Returns its last line."""
    gateway.spawn()
    wait_until(lambda: not gateway.is_running, "the process ends", SECONDS)
    return gateway.log.splitlines()[-1]
