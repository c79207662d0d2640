# SPDX-License-Identifier: Apache-2.0
"""Test brokers with TLS and users, in both modes, and the settings that they have for each client."""

from __future__ import annotations

import asyncio
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import aiokafka
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient as ConfluentAdmin
from kafka import KafkaConsumer

from kcoord.client import AdminClient, AdminConfig, Errors, KafkaError, NewTopic
from kcoord.config import ConfigError
from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord.testing import ControlError, KcoordBroker, Mode, allow, start_broker
from kcoord.testing.control_client import acl_to_json
from kcoord.testing.pool import BrokerPool
from kcoord.testing.security import BrokerSecurity, Mechanism, Tls, secure

USERS = {"alice": "apple-pie", "bob": "plum-cake"}
MECHANISMS: tuple[Mechanism, ...] = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


def topics_for(properties: dict[str, str]) -> list[str]:
    async def ask() -> list[str]:
        async with AdminClient(AdminConfig.from_properties(properties)) as admin:
            return [topic.name for topic in await admin.list_topics()]

    return asyncio.run(ask())


def check_all_clients(broker: KcoordBroker, user: str | None, mechanism: Mechanism) -> None:
    """Connects with each client. A client that did not check the certificate, or did not log in, would not."""
    assert topics_for(broker.client_properties(user, mechanism)) == ["orders"]
    assert "orders" in ConfluentAdmin({**broker.confluent_properties(user, mechanism)}).list_topics(timeout=20).topics
    with closing(KafkaConsumer("orders", **broker.python_arguments(user, mechanism))) as consumer:
        assert "orders" in consumer.topics()

    async def ask() -> None:
        async with aiokafka.AIOKafkaConsumer("orders", **broker.python_arguments(user, mechanism)) as consumer:
            assert "orders" in await consumer.topics()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("tls", "users", "protocol"),
    [
        (False, {}, "PLAINTEXT"),
        (True, {}, "SSL"),
        (False, USERS, "SASL_PLAINTEXT"),
        (True, USERS, "SASL_SSL"),
        ("mutual", {}, "SSL"),
        ("mutual", USERS, "SASL_SSL"),
    ],
)
def test_every_client_connects_with_the_settings_that_the_broker_has_for_it(
    tls: Tls, users: dict[str, str], protocol: str
) -> None:
    with start_broker(tls=tls, users=users) as broker:
        assert broker.client_properties()["security.protocol"] == protocol
        broker.create_topic("orders")
        broker.produce("orders", ["one"])
        check_all_clients(broker, "bob" if users else None, "PLAIN")
        assert [record.value for record in broker.records("orders")] == [b"one"]


def test_a_client_that_checks_certificates_strictly_connects() -> None:
    with start_broker(tls=True) as broker:
        context = ssl.create_default_context(cadata=broker.client_properties()["ssl.truststore.certificates"])
        context.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13 sets it by default
        host, _, port = broker.bootstrap_servers.rpartition(":")
        with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host):
            pass


@pytest.mark.parametrize("users", [{}, USERS])
def test_mutual_tls_needs_a_certificate_of_the_broker(users: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """The client tries again until its timeout, so the two attempts are side by side."""

    def fail(properties: dict[str, str]) -> None:
        with pytest.raises(KafkaError):
            topics_for(properties | {"default.api.timeout.ms": "2000"})

    with start_broker(tls="mutual", users=users) as broker, start_broker(tls="mutual", users=users) as other:
        right = broker.client_properties("alice")
        assert topics_for(right) == []
        foreign = {key: text for key, text in other.client_properties("alice").items() if "keystore" in key}
        none = {key: text for key, text in right.items() if "keystore" not in key}
        with ThreadPoolExecutor() as pool:
            list(pool.map(fail, (none, right | foreign)))
        for reason in ("peer did not return a certificate", "the certificate of the client is not valid: self-signed"):
            assert f"the TLS handshake failed: {reason}" in caplog.text
        assert foreign["ssl.keystore.key"] not in repr(other.security)


def test_the_name_in_a_certificate_is_the_user() -> None:
    acls = [allow("alice", "Describe", topic="orders")]
    with start_broker(tls="mutual", acls=acls) as broker:
        broker.create_topic("orders")
        assert topics_for(broker.client_properties("alice")) == ["orders"]
        assert topics_for(broker.client_properties("bob")) == topics_for(broker.client_properties()) == []


def test_the_certificate_is_not_the_user_of_a_login() -> None:
    acls = [allow("alice", "Describe", topic="orders")]
    with start_broker(tls="mutual", users=USERS, acls=acls) as broker:
        broker.create_topic("orders")
        bob = {key: text for key, text in broker.client_properties("bob").items() if key.startswith("sasl")}
        assert topics_for(broker.client_properties("alice")) == ["orders"]
        assert topics_for(broker.client_properties("alice") | bob) == []


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_each_user_logs_in_with_each_mechanism(mechanism: Mechanism) -> None:
    with start_broker(users=USERS) as broker:
        for user in USERS:
            assert topics_for(broker.client_properties(user, mechanism)) == []
        wrong = {
            key: text.replace("apple", "pear") for key, text in broker.client_properties("alice", mechanism).items()
        }
        with pytest.raises(KafkaError) as refused:
            topics_for(wrong)
        assert refused.value.error is Errors.SASL_AUTHENTICATION_FAILED


def test_a_client_without_the_authority_or_a_user_is_refused() -> None:
    with start_broker(tls=True, users=USERS) as broker:
        strange = start_broker(tls=True)
        with strange:
            other_authority = strange.client_properties()["ssl.truststore.certificates"]
        properties = broker.client_properties() | {"default.api.timeout.ms": "3000"}
        with pytest.raises(KafkaError, match="SSL handshake failed"):
            topics_for(properties | {"ssl.truststore.certificates": other_authority})
        with pytest.raises(KafkaError):
            topics_for(properties | {"security.protocol": "SSL"})
        with pytest.raises(KafkaException):
            ConfluentAdmin({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=2)


@pytest.mark.parametrize("mode", ["in-process", "process"])
def test_the_pool_lends_secured_and_plain_brokers(mode: Mode) -> None:
    pool = BrokerPool()
    try:
        for security in (secure({}, tls=True, users=USERS), BrokerSecurity(), secure({}, tls=False, users={"c": "d"})):
            broker = pool.take(mode, {}, security)
            broker.create_topic("orders")
            check_all_clients(broker, None, "PLAIN")
            broker.restart()
            broker.reset()
            broker.create_topic("orders")
            check_all_clients(broker, None, "PLAIN")
            pool.give_back(broker)
    finally:
        pool.close()


def test_faults_apply_to_a_secured_client_and_not_to_the_control() -> None:
    with start_broker(tls=True, users=USERS) as broker:

        async def create() -> KafkaError | None:
            async with AdminClient(AdminConfig.from_properties(broker.client_properties())) as admin:
                return (await admin.create_topics([NewTopic("orders", 1, 1)])).error("orders")

        with broker.inject_fault("CreateTopics", error="POLICY_VIOLATION") as fault:
            broker.create_topic("another")
            refused = asyncio.run(create())
            assert refused is not None
            assert refused.error is Errors.POLICY_VIOLATION
            assert fault.hits == 1
        assert [request.api for request in broker.requests("CreateTopics")] == ["CreateTopics"]


@pytest.mark.parametrize(
    ("config", "users", "text"),
    [
        ({"listeners": "PLAINTEXT://127.0.0.1:0"}, {}, "leave `listeners` out of the config"),
        ({}, {"a b": "c"}, "the name of the user 'a b'"),
        ({}, {"alice": "secret, word"}, "the password of alice must have"),
        ({}, {"alice": ""}, "the password of alice must have"),
    ],
)
def test_what_cannot_be_secured_is_refused(config: dict[str, str], users: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        start_broker(config, tls=True, users=users)
    assert text in str(refused.value)
    assert "secret, word" not in str(refused.value)


def test_an_unknown_user_or_mechanism_is_an_error() -> None:
    security = secure({}, tls=False, users=USERS)
    with pytest.raises(ValueError, match="there is no user 'carol': the users are alice, bob"):
        security.kafka_properties("carol", "PLAIN")
    with pytest.raises(ValueError, match="the mechanism 'GSSAPI' is not one of PLAIN"):
        security.librdkafka_properties("alice", "GSSAPI")  # type: ignore[arg-type]


def test_passwords_are_not_in_the_representation() -> None:
    assert "apple-pie" not in repr(secure({}, tls=True, users=USERS))


@pytest.mark.parametrize("mode", ["in-process", "process"])
@pytest.mark.parametrize(("tls", "users", "user"), [(True, USERS, "alice"), (False, {}, "ANONYMOUS")])
def test_acls_decide_what_a_user_may_do(mode: Mode, tls: bool, users: dict[str, str], user: str) -> None:
    acls = [allow(user, "Describe", topic="ord", prefixed=True)]
    with start_broker(mode=mode, tls=tls, users=users, acls=acls) as broker:
        for name in ("orders", "secrets"):
            broker.create_topic(name)
        assert topics_for(broker.client_properties()) == ["orders"]
        if users:
            assert topics_for(broker.client_properties("bob")) == []
        more = [allow("*", "All", topic="secrets")]
        broker.add_acls(more)
        assert topics_for(broker.client_properties()) == ["orders", "secrets"]
        broker.remove_acls(more)
        broker.restart()
        assert topics_for(broker.client_properties()) == ["orders"]
        broker.add_acls(more)
        broker.reset()
        broker.create_topic("secrets")
        assert topics_for(broker.client_properties()) == [], "the broker has its first ACLs only"
        broker.create_topic("orders")
        assert topics_for(broker.client_properties()) == ["orders"]


@pytest.mark.parametrize(
    ("config", "acls"), [({}, ()), ({"authorizer.class.name": STANDARD_AUTHORIZER}, None)], ids=["acls", "config"]
)
def test_without_acls_only_super_users_have_rights(config: dict[str, str], acls: tuple[()] | None) -> None:
    with start_broker({"super.users": "User:bob", **config}, users=USERS, acls=acls) as broker:
        broker.create_topic("orders")
        assert topics_for(broker.client_properties("alice")) == []
        assert topics_for(broker.client_properties("bob")) == ["orders"]


def test_the_pool_lends_brokers_with_and_without_acls() -> None:
    pool = BrokerPool()
    try:
        for acls in ([allow("ANONYMOUS", "Describe", topic="orders")], None):
            broker = pool.take("process", {}, secure({}, acls=acls))
            broker.create_topic("orders")
            broker.create_topic("secrets")
            assert topics_for(broker.client_properties()) == (["orders", "secrets"] if acls is None else ["orders"])
            pool.give_back(broker)
    finally:
        pool.close()


def test_acls_need_an_authorizer_and_valid_fields() -> None:
    with start_broker() as broker:
        with pytest.raises(ControlError, match="SECURITY_DISABLED"):
            broker.add_acls([allow("alice", "Read", topic="orders")])
        with pytest.raises(ControlError, match="an ACL must be an object"):
            broker.call("POST", "/acls", body={"acls": ["alice"]})
        document = acl_to_json(allow("alice", "Read", group="billing"))
        with pytest.raises(ControlError, match=r"operation must be one of .*, not 'READING'"):
            broker.call("POST", "/acls", body={"acls": [document | {"operation": "READING"}]})


def test_an_acl_is_for_one_resource() -> None:
    assert str(allow("alice", "idempotentwrite", cluster=True)) == (
        "StandardAcl[resourceType=CLUSTER, resourceName=kafka-cluster, patternType=LITERAL, principal=User:alice, "
        "host=*, operation=IDEMPOTENT_WRITE, permissionType=ALLOW]"
    )
    with pytest.raises(ValueError, match="an ACL is for one resource"):
        allow("alice", "Read", topic="orders", group="billing")
    with pytest.raises(ValueError, match="the operation 'Reading' is not one of"):
        allow("alice", "Reading", topic="orders")
