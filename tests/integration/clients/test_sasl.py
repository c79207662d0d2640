# SPDX-License-Identifier: Apache-2.0
"""Listeners with SASL and real clients: each mechanism, wrong passwords, changed users, and frames before a login."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import aiokafka
import aiokafka.errors
import aiokafka.helpers
import kafka.errors
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)
from kafka import KafkaConsumer, KafkaProducer

from kcoord import client
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.integration.conftest import SERVER
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.certificates import Authority
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
JAAS = "listener.name.users.plain.sasl.jaas.config"
PASSWORD = 'alice, "her" pässword='
INVALID = "Authentication failed: Invalid username or password"


def plain_users(**passwords: str) -> str:
    """Returns a JAAS line with the users of PLAIN."""
    quoted = [f'user_{user}="{escaped(password)}"' for user, password in passwords.items()]
    return f"org.apache.kafka.common.security.plain.PlainLoginModule required {' '.join(quoted)};"


def escaped(password: str) -> str:
    return password.replace("\\", "\\\\").replace('"', '\\"')


class SaslBroker(KcoordProcess):
    """A broker with a listener USERS, with SASL, and a PLAINTEXT listener for its administrator."""

    def __init__(self, folder: Path, protocol: str = "SASL_PLAINTEXT", **settings: str) -> None:
        self.protocol = protocol
        self.authority = Authority()
        self.authority_file = self.authority.write_pem(folder / "authority.pem")
        keystore = self.authority.issue("broker", "localhost", "127.0.0.1").write_pem(folder / "broker.pem")
        super().__init__(
            folder,
            {
                **SERVER,
                "listeners": "USERS://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
                "listener.security.protocol.map": f"USERS:{protocol},PLAINTEXT:PLAINTEXT",
                "sasl.enabled.mechanisms": ",".join(MECHANISMS),
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": keystore,
                JAAS: plain_users(alice=PASSWORD, bob="bob-secret"),
                **{key.replace("_", "."): value for key, value in settings.items()},
            },
        )

    def admin(self) -> AdminClient:
        return AdminClient({"bootstrap.servers": f"127.0.0.1:{self.ports[1]}"})

    def start_with_users(self) -> SaslBroker:
        """Starts the broker and creates alice's credentials of SCRAM."""
        self.start()
        changes: list[UserScramCredentialAlteration] = [
            UserScramCredentialUpsertion("alice", ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
            for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        ]
        admin = self.admin()
        for change in changes:
            for future in admin.alter_user_scram_credentials([change]).values():
                future.result(20)
        return self

    def alter(self, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        admin = self.admin()
        admin.incremental_alter_configs([resource])[resource].result(20)

    # --- settings of clients ------------------------------------------------------------------------------------------

    def properties(self, mechanism: str, password: str = PASSWORD, user: str = "alice") -> dict[str, str]:
        """Returns Kafka's properties."""
        module = "plain.Plain" if mechanism == "PLAIN" else "scram.Scram"
        return {
            "bootstrap.servers": self.address,
            "security.protocol": self.protocol,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.authority_file,
            "sasl.mechanism": mechanism,
            "sasl.jaas.config": f"org.apache.kafka.common.security.{module}LoginModule required "
            f'username="{user}" password="{escaped(password)}";',
        }

    def confluent(self, mechanism: str, password: str = PASSWORD, **more: str) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.address,
            "security.protocol": self.protocol,
            "ssl.ca.location": self.authority_file,
            "sasl.mechanism": mechanism,
            "sasl.username": "alice",
            "sasl.password": password,
            **{key.replace("_", "."): value for key, value in more.items()},
        }

    def kafka_python(self, mechanism: str, password: str = PASSWORD) -> dict[str, Any]:
        return {
            "bootstrap_servers": self.address,
            "security_protocol": self.protocol,
            "ssl_cafile": self.authority_file,
            "sasl_mechanism": mechanism,
            "sasl_plain_username": "alice",
            "sasl_plain_password": password,
        }

    def aiokafka(self, mechanism: str, password: str = PASSWORD) -> dict[str, Any]:
        settings = self.kafka_python(mechanism, password)
        return settings | {"ssl_context": aiokafka.helpers.create_ssl_context(cafile=settings.pop("ssl_cafile"))}


MakeBroker = Callable[..., SaslBroker]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    made = SaslBroker(tmp_path_factory.mktemp("plaintext")).start_with_users()
    yield made
    made.kill()


@pytest.fixture(scope="module")
def tls_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslBroker]:
    made = SaslBroker(tmp_path_factory.mktemp("tls"), "SASL_SSL").start_with_users()
    yield made
    made.kill()


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[MakeBroker]:
    made: list[SaslBroker] = []

    def make(protocol: str = "SASL_PLAINTEXT", **settings: str) -> SaslBroker:
        made.append(SaslBroker(tmp_path, protocol, **settings))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


# --- clients ----------------------------------------------------------------------------------------------------------


async def use_kcoord(broker: SaslBroker, mechanism: str, topic: str) -> None:
    properties = broker.properties(mechanism)
    async with client.Producer(client.ProducerConfig.from_properties(properties)) as producer:
        await producer.send_and_wait(topic, "x")
    reading = properties | {"group.id": topic, "auto.offset.reset": "earliest"}
    async with client.Consumer(client.ConsumerConfig.from_properties(reading)) as consumer:
        consumer.subscribe([topic])
        assert [record.value for record in await consumer.poll(20_000)] == [b"x"]


async def use_confluent(broker: SaslBroker, mechanism: str, topic: str) -> None:
    producer = Producer(broker.confluent(mechanism))
    producer.produce(topic, b"x")
    assert producer.flush(20) == 0
    reading = broker.confluent(mechanism, group_id=topic, group_protocol="consumer", auto_offset_reset="earliest")
    with closing(Consumer(reading)) as consumer:
        consumer.subscribe([topic])
        message = consumer.poll(20)
        assert message is not None and message.value() == b"x"


async def use_kafka_python(broker: SaslBroker, mechanism: str, topic: str) -> None:
    settings = broker.kafka_python(mechanism)
    with closing(KafkaProducer(**settings)) as producer:
        producer.send(topic, b"x").get(20)
    reading = {"group_id": topic, "auto_offset_reset": "earliest", "consumer_timeout_ms": 20_000}
    with closing(KafkaConsumer(topic, **reading, **settings)) as consumer:
        assert next(consumer).value == b"x"


async def use_aiokafka(broker: SaslBroker, mechanism: str, topic: str) -> None:
    settings = broker.aiokafka(mechanism)
    async with aiokafka.AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait(topic, b"x")
    async with aiokafka.AIOKafkaConsumer(topic, group_id=topic, auto_offset_reset="earliest", **settings) as consumer:
        assert (await consumer.getone()).value == b"x"


USES = (use_kcoord, use_confluent, use_kafka_python, use_aiokafka)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("use", USES)
async def test_clients_write_and_read(broker: SaslBroker, use: Callable[..., Any], mechanism: str) -> None:
    await use(broker, mechanism, f"{use.__name__}-{mechanism}")


@pytest.mark.parametrize("use", USES)
async def test_clients_write_and_read_with_tls(tls_broker: SaslBroker, use: Callable[..., Any]) -> None:
    await use(tls_broker, "SCRAM-SHA-512", use.__name__)


def first_bytes(broker: SaslBroker) -> bytes:
    """Returns what a client without a certificate reads after a request for ApiVersions."""
    context = ssl.create_default_context(cadata=broker.authority.pem)
    with context.wrap_socket(socket.create_connection(("127.0.0.1", broker.port)), server_hostname="localhost") as tls:
        tls.settimeout(10)
        tls.sendall(encode_request(18, 0, 1, "c", b""))
        return tls.recv(4)


def test_certificates_of_clients_are_required_by_a_key_of_the_listener_only(make_broker: MakeBroker) -> None:
    broker = make_broker("SASL_SSL", ssl_client_auth="required").start()
    assert len(first_bytes(broker)) == 4
    broker.kill()
    broker.ports.clear()
    broker.overrides |= {
        "listener.name.users.ssl.client.auth": "required",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": broker.authority_file,
    }
    broker.start()
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        first_bytes(broker)


@pytest.mark.java
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_kafkas_tools_with_their_properties_file(tls_broker: SaslBroker, mechanism: str) -> None:
    file = tls_broker.data.parent / f"{mechanism}.properties"
    lines = [f"{key}={value}\n" for key, value in tls_broker.properties(mechanism).items()]
    # Java reads these files as ISO 8859-1.
    file.write_text("".join(lines).replace("\\", "\\\\"), encoding="iso-8859-1")
    arguments = ["--bootstrap-server", tls_broker.address, "--command-config", str(file)]
    topic = f"java-{mechanism}"
    assert f"Created topic {topic}" in KafkaJars().tool("topics", *arguments, "--create", "--topic", topic)


# --- wrong passwords --------------------------------------------------------------------------------------------------


def text_of(mechanism: str) -> str:
    """Returns Kafka's text for a wrong password."""
    general = "Authentication failed during authentication due to invalid credentials with SASL mechanism"
    return INVALID if mechanism == "PLAIN" else f"{general} {mechanism}"


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("user", ["alice", "nobody"])
async def test_kcoord_shows_why_a_login_failed(broker: SaslBroker, mechanism: str, user: str) -> None:
    config = client.AdminConfig.from_properties(broker.properties(mechanism, "wrong", user))
    with pytest.raises(client.KafkaError, match=text_of(mechanism)) as caught:
        async with client.AdminClient(config) as admin:
            await admin.list_topics()
    assert caught.value.error is Errors.SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka_shows_why_a_login_failed(broker: SaslBroker, mechanism: str) -> None:
    errors: list[str] = []
    settings = broker.confluent(mechanism, "wrong") | {"error_cb": lambda error: errors.append(error.str())}
    producer = Producer(settings)

    def is_reported() -> bool:
        producer.poll(0.1)
        return any(text_of(mechanism) in error for error in errors)

    wait_until(is_reported, "the error is reported")


def test_kafka_python_does_not_connect_with_a_wrong_password(broker: SaslBroker) -> None:
    # Its error has no text: it retries until the timeout.
    with pytest.raises(kafka.errors.KafkaError):
        KafkaProducer(bootstrap_timeout_ms=1000, **broker.kafka_python("PLAIN", "wrong"))


async def test_aiokafka_does_not_connect_with_a_wrong_password(broker: SaslBroker) -> None:
    producer = aiokafka.AIOKafkaProducer(**broker.aiokafka("PLAIN", "wrong"))
    with pytest.raises(aiokafka.errors.KafkaError):
        await producer.start()
    await producer.stop()


def test_the_log_has_failures_and_no_secrets(broker: SaslBroker) -> None:
    login(broker, b"\0alice\0wrong-secret")
    wait_until(
        lambda: f"closing, the authentication with PLAIN failed: {INVALID}" in broker.log, "the failure is logged"
    )
    for secret in ("wrong-secret", PASSWORD, "bob-secret", "alice"):
        assert secret not in broker.log


# --- single frames ----------------------------------------------------------------------------------------------------


def log_in(wire: WireClient, token: bytes) -> SaslAuthenticateResponse:
    """Authenticates with PLAIN."""
    shake = wire.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse)
    assert (shake.error_code, shake.mechanisms) == (0, list(MECHANISMS))
    return wire.call(SaslAuthenticateRequest(auth_bytes=token), 2, SaslAuthenticateResponse)


def login(broker: SaslBroker, token: bytes) -> SaslAuthenticateResponse:
    """Authenticates with PLAIN on a new connection."""
    with WireClient(broker.port) as wire:
        return log_in(wire, token)


def test_before_a_login_requests_close_the_connection(broker: SaslBroker) -> None:
    with WireClient(broker.port) as wire:
        versions = wire.call(
            ApiVersionsRequest(client_software_name="a", client_software_version="1"), 3, ApiVersionsResponse
        )
        listed = {entry.api_key: (entry.min_version, entry.max_version) for entry in versions.api_keys}
        assert (listed[17], listed[36]) == ((0, 1), (0, 2))
        with pytest.raises(ConnectionClosed):
            wire.call(MetadataRequest(topics=None), 12, MetadataResponse)


def test_a_failure_is_answered_after_the_delay_and_closes(make_broker: MakeBroker) -> None:
    broker = make_broker(connection_failed_authentication_delay_ms="700").start()
    with WireClient(broker.port) as wire:
        began = time.monotonic()
        response = log_in(wire, b"\0alice\0wrong")
        assert time.monotonic() - began >= 0.69
        assert (response.error_code, response.error_message) == (58, INVALID)
        assert wire.socket.recv(1) == b""


def test_raw_tokens_of_old_clients(broker: SaslBroker) -> None:
    with WireClient(broker.port) as wire:
        wire.call(SaslHandshakeRequest(mechanism="PLAIN"), 0, SaslHandshakeResponse)
        token = b"\0bob\0bob-secret"
        wire.socket.sendall(len(token).to_bytes(4, "big") + token)
        assert wire.receive_frame() == b""
        assert wire.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers


def test_h_12_hostile_logins(broker: SaslBroker) -> None:
    """Frames out of order, tokens that are too long, and exchanges without an end close the connection."""
    shake = encode_request(17, 0, 1, "c", SaslHandshakeRequest(mechanism="SCRAM-SHA-256").encode(0))
    first = b"n,,n=alice,r=nonce"
    for data in (
        (600_000).to_bytes(4, "big"),
        shake + (600_000).to_bytes(4, "big"),
        shake + shake,
        shake + bytes(4),
        shake + 2 * (len(first).to_bytes(4, "big") + first),
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with WireClient(broker.port) as wire:
            wire.socket.sendall(data)
            with pytest.raises((ConnectionClosed, ConnectionResetError)):
                for _ in range(3):
                    wire.receive_frame()
    assert login(broker, b"\0bob\0bob-secret").error_code == 0
    assert "Traceback" not in broker.log


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x20\0\x11"])
def test_clients_that_never_log_in_are_closed_when_they_are_idle(make_broker: MakeBroker, data: bytes) -> None:
    broker = make_broker(connections_max_idle_ms="300").start()
    with WireClient(broker.port) as wire:
        wire.socket.sendall(data)
        assert wire.socket.recv(1) == b""


def test_a_session_is_renewed_on_the_same_connection(make_broker: MakeBroker) -> None:
    broker = make_broker(**{"listener.name.users.plain.connections.max.reauth.ms": "60000"}).start()
    with WireClient(broker.port) as wire:
        for _ in range(2):
            assert log_in(wire, b"\0bob\0bob-secret").session_lifetime_ms == 60_000
            assert wire.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers
        shake = wire.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse)
        assert shake.error_code == Errors.ILLEGAL_SASL_STATE, "it is the third within a second"
        assert wire.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers


def test_other_listeners_have_no_sasl(broker: SaslBroker) -> None:
    with WireClient(broker.ports[1]) as wire:
        shake = wire.call(SaslHandshakeRequest(mechanism="PLAIN"), 1, SaslHandshakeResponse)
        assert (shake.error_code, shake.mechanisms) == (Errors.ILLEGAL_SASL_STATE, [])
        response = wire.call(SaslAuthenticateRequest(auth_bytes=b""), 2, SaslAuthenticateResponse)
        text = "SaslAuthenticate request received after successful authentication"
        assert (response.error_code, response.error_message) == (Errors.ILLEGAL_SASL_STATE, text)


# --- users that change, and what is refused ---------------------------------------------------------------------------


def test_a_dynamic_config_changes_the_users_and_is_kept(make_broker: MakeBroker) -> None:
    broker = make_broker().start()
    assert login(broker, b"\0bob\0bob-secret").error_code == 0
    for wrong in ("no module", plain_users(), plain_users(carol="")):
        with pytest.raises(KafkaException, match=f"Invalid value .hidden. for configuration {JAAS}"):
            broker.alter(JAAS, wrong)
    broker.alter(JAAS, plain_users(bob="new-secret"))
    wait_until(lambda: login(broker, b"\0bob\0new-secret").error_code == 0, "the new password is used")
    assert login(broker, b"\0bob\0bob-secret").error_code == 58
    resource = ConfigResource(ResourceType.BROKER, "1")
    admin = broker.admin()
    entry = admin.describe_configs([resource])[resource].result(20)[JAAS]
    assert (entry.value, entry.is_sensitive) == (None, True)
    broker.kill()
    broker.ports.clear()
    broker.start()
    assert login(broker, b"\0bob\0new-secret").error_code == 0
    assert login(broker, b"\0bob\0bob-secret").error_code == 58


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"sasl.enabled.mechanisms": "GSSAPI"}, "set sasl.enabled.mechanisms to one or more of PLAIN, SCRAM-SHA-256,"),
        ({JAAS: plain_users()}, f"{JAAS}: PLAIN has no users; set it to org.apache.kafka.common.security.plain.Plain"),
        (
            {JAAS: 'x.PlainLoginModule required user_a="hid-den";'},
            f"{JAAS}: the login module must be org.apache.kafka.",
        ),
        ({JAAS: 'x.PlainLoginModule required user_a="hid-den"'}, f"{JAAS}: it must end with a semicolon"),
        (
            {"listener.name.users.scram-sha-256.sasl.jaas.config": plain_users(a="hid-den")},
            "the login module must be org.apache.kafka.common.security.scram.ScramLoginModule",
        ),
    ],
)
@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_start_is_refused(make_broker: MakeBroker, workers: str, settings: dict[str, str], text: str) -> None:
    broker = make_broker(**settings, group_coordinator_threads=workers)
    broker.spawn()
    wait_until(lambda: broker.exit_code is not None, "the start is refused")
    wait_until(lambda: text in broker.log, "the reason is logged")
    assert "hid-den" not in broker.log


def salt_of(port: int, user: str) -> str:
    """Returns the salt that the broker sends for a user of SCRAM-SHA-512."""
    with WireClient(port) as wire:
        wire.call(SaslHandshakeRequest(mechanism="SCRAM-SHA-512"), 1, SaslHandshakeResponse)
        first = wire.call(
            SaslAuthenticateRequest(auth_bytes=f"n,,n={user},r=nonce".encode()), 2, SaslAuthenticateResponse
        )
    return first.auth_bytes.decode().split(",")[1]


async def test_users_log_in_at_every_worker(make_broker: MakeBroker) -> None:
    broker = make_broker(group_coordinator_threads="2")
    broker.overrides["listeners"] = "USERS://127.0.0.1:0"
    broker.start()
    await use_kcoord(broker, "PLAIN", "t")
    # If the salt of an unknown user changed, it would show that the user is unknown.
    first, second = broker.ports
    salt = salt_of(first, "nobody")
    assert salt == salt_of(second, "nobody") != salt_of(first, "nobody-else")
    broker.kill()
    broker.ports.clear()
    broker.start()
    assert salt_of(broker.port, "nobody") == salt
