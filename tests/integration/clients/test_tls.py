# SPDX-License-Identifier: Apache-2.0
"""Listeners with SSL and real clients: certificates of clients, new certificates, and bytes that are not TLS."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import aiokafka
import aiokafka.helpers
import pytest
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic
from cryptography import x509
from kafka import KafkaConsumer, KafkaProducer

from kcoord.security.distinguished_name import subject_of
from kcoord_protocol.messages import MetadataRequest, MetadataResponse
from tests.integration.conftest import SERVER
from tests.integration.wire import WireClient
from tests.support.certificates import Authority, Identity
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

PASSWORD = "password-of-the-store"
RULES = "ssl.principal.mapping.rules"
KEYSTORE = "listener.name.clients.ssl.keystore.location"


class SecuredBroker(KcoordProcess):
    """A broker with one SSL listener, CLIENTS, and one PLAINTEXT listener, and the files that its clients need."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.authority = Authority()
        self.authority_file = self.authority.write_pem(folder / "authority.pem")
        self.keystore = folder / "broker.p12"
        self.issue("broker", "localhost", "127.0.0.1").write_pkcs12(self.keystore, PASSWORD)
        super().__init__(
            folder,
            {
                **SERVER,
                "listeners": "CLIENTS://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
                "listener.security.protocol.map": "CLIENTS:SSL,PLAINTEXT:PLAINTEXT",
                KEYSTORE: str(self.keystore),
                "ssl.keystore.type": "PKCS12",
                "ssl.keystore.password": PASSWORD,
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": self.authority_file,
                **{key.replace("_", "."): value for key, value in settings.items()},
            },
        )

    def issue(self, subject: str | x509.Name, *names: str) -> Identity:
        return self.authority.issue(subject, *names)

    def client_file(self, identity: Identity) -> str:
        return identity.write_pem(self.folder / "client.pem")

    def confluent(self, client_file: str | None = None, **more: str) -> dict[str, str | int | float | bool]:
        """Returns the settings of librdkafka."""
        own_key = {"ssl.certificate.location": client_file, "ssl.key.location": client_file} if client_file else {}
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "ssl",
            "ssl.ca.location": self.authority_file,
            **own_key,
            **{key.replace("_", "."): value for key, value in more.items()},
        }

    def subject_shown(self) -> str:
        """Returns the common name of the certificate that a new connection gets."""
        context = ssl.create_default_context(cadata=self.authority.pem)
        with context.wrap_socket(
            socket.create_connection(("127.0.0.1", self.port)), server_hostname="localhost"
        ) as tls:
            certificate = tls.getpeercert(binary_form=True)
        assert certificate is not None
        return subject_of(certificate).removeprefix("CN=")

    def alter(self, name: str, value: str) -> None:
        """Sets a dynamic config over the PLAINTEXT listener."""
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.BROKER, "1", incremental_configs=[entry])
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{self.ports[1]}"})
        admin.incremental_alter_configs([resource])[resource].result(20)


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[..., SecuredBroker]]:
    made: list[SecuredBroker] = []

    def make(**settings: str) -> SecuredBroker:
        made.append(SecuredBroker(tmp_path, **settings))
        return made[-1]

    yield make
    for broker in made:
        broker.kill()


MakeBroker = Callable[..., SecuredBroker]


def create_topic(broker: SecuredBroker, client_file: str | None = None) -> None:
    admin = AdminClient(broker.confluent(client_file))
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(20)


def test_librdkafka_with_a_certificate_joins_a_group_and_reads(make_broker: MakeBroker) -> None:
    broker = make_broker(listener_name_clients_ssl_client_auth="required").start()
    client_file = broker.client_file(broker.issue("client"))
    create_topic(broker, client_file)
    producer = Producer(broker.confluent(client_file))
    sent = [os.urandom(100_000) for _ in range(20)]
    for value in sent:
        producer.produce("t", value)
    assert producer.flush(20) == 0
    settings = broker.confluent(client_file, group_id="g", group_protocol="consumer", auto_offset_reset="earliest")
    consumer = Consumer(settings)
    with closing(consumer):
        consumer.subscribe(["t"])
        received: list[bytes | None] = []

        def poll() -> bool:
            message = consumer.poll(1.0)
            if message is not None:
                assert message.error() is None
                received.append(message.value())
            return len(received) == len(sent)

        wait_until(poll, "all records are read")
    assert received == sent


def test_kafka_python_reads_what_it_has_written(make_broker: MakeBroker) -> None:
    broker = make_broker().start()
    create_topic(broker)
    settings = {
        "bootstrap_servers": broker.address,
        "security_protocol": "SSL",
        "ssl_cafile": broker.authority_file,
    }
    with closing(KafkaProducer(**settings)) as producer:
        producer.send("t", b"x" * 50_000).get(20)
    with closing(
        KafkaConsumer("t", group_id="g", auto_offset_reset="earliest", consumer_timeout_ms=20_000, **settings)
    ) as consumer:
        assert next(consumer).value == b"x" * 50_000


async def test_aiokafka_reads_what_it_has_written(make_broker: MakeBroker) -> None:
    broker = make_broker().start()
    create_topic(broker)
    context = aiokafka.helpers.create_ssl_context(cafile=broker.authority_file)
    settings = {"bootstrap_servers": broker.address, "security_protocol": "SSL", "ssl_context": context}
    async with aiokafka.AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait("t", b"x")
    async with aiokafka.AIOKafkaConsumer("t", group_id="g", auto_offset_reset="earliest", **settings) as consumer:
        assert (await consumer.getone()).value == b"x"


@pytest.mark.java
def test_kafkas_tools_with_their_properties_file(make_broker: MakeBroker) -> None:
    broker = make_broker(ssl_client_auth="required").start()
    keystore = broker.issue("client").write_pkcs12(broker.folder / "client.p12", PASSWORD)
    properties = broker.folder / "client.properties"
    properties.write_text(
        f"security.protocol=SSL\nssl.truststore.type=PEM\nssl.truststore.location={broker.authority_file}\n"
        f"ssl.keystore.type=PKCS12\nssl.keystore.location={keystore}\nssl.keystore.password={PASSWORD}\n"
        f"ssl.key.password={PASSWORD}\n"
    )
    arguments = ["--bootstrap-server", broker.address, "--command-config", str(properties)]
    jars = KafkaJars()
    assert "Created topic t" in jars.tool("topics", *arguments, "--create", "--topic", "t", "--partitions", "2")
    assert "PartitionCount: 2" in jars.tool("topics", *arguments, "--describe", "--topic", "t")


def wait_for_log(broker: SecuredBroker, text: str) -> None:
    """Waits until the broker has logged the text; a client may see the end of its connection before."""
    wait_until(lambda: text in broker.log, f"the log has: {text}")


def first_bytes(broker: SecuredBroker, client_file: str | None) -> bytes:
    """Returns what a client with this certificate reads after the handshake; raises ssl.SSLError for an alert."""
    context = ssl.create_default_context(cadata=broker.authority.pem)
    if client_file is not None:
        context.load_cert_chain(client_file)
    with context.wrap_socket(socket.create_connection(("127.0.0.1", broker.port)), server_hostname="localhost") as tls:
        tls.settimeout(10)
        return tls.recv(1)


def test_a_client_without_a_valid_certificate_gets_an_alert(make_broker: MakeBroker) -> None:
    broker = make_broker(ssl_client_auth="required").start()
    stranger = Authority("Other").issue("client").write_pem(broker.folder / "stranger.pem")
    with pytest.raises(ssl.SSLError, match="TLSV1_ALERT_UNKNOWN_CA"):
        first_bytes(broker, stranger)
    with pytest.raises(ssl.SSLError, match="TLSV13_ALERT_CERTIFICATE_REQUIRED"):
        first_bytes(broker, None)
    for reason in ("the certificate of the client is not valid: ", "peer did not return a certificate"):
        wait_for_log(broker, f"closing, the TLS handshake failed: {reason}")


def test_a_name_that_no_rule_maps_is_refused_before_the_first_request(make_broker: MakeBroker) -> None:
    broker = make_broker(ssl_client_auth="required", ssl_principal_mapping_rules="RULE:CN=(good.*)/$1/").start()
    good, bad = (broker.issue(name).write_pem(broker.folder / f"{name}.pem") for name in ("good-1", "bad"))
    admin = AdminClient(broker.confluent(good))
    assert admin.list_topics(timeout=20).brokers
    assert first_bytes(broker, bad) == b""
    refused = "the TLS handshake failed: No rules apply to CN=bad, rules RULE:CN=(good.*)/$1/"
    wait_for_log(broker, refused)


# --- new certificates -------------------------------------------------------------------------------------------------


def test_a_changed_file_is_used_by_new_connections_and_existing_ones_stay(make_broker: MakeBroker) -> None:
    broker = make_broker(ssl_allow_dn_changes="true").start()
    assert broker.subject_shown() == "broker"
    context = ssl.create_default_context(cadata=broker.authority.pem)
    old = context.wrap_socket(socket.create_connection(("127.0.0.1", broker.port)), server_hostname="localhost")
    with closing(old):
        broker.issue("renewed", "localhost", "127.0.0.1").write_pkcs12(broker.keystore, PASSWORD)
        wait_until(lambda: broker.subject_shown() == "renewed", "the new certificate is used")
        wait_for_log(broker, "Listener CLIENTS uses a new certificate: CN=renewed")
        with WireClient(broker.port, connected=old) as client:
            assert client.call(MetadataRequest(topics=None), 12, MetadataResponse).brokers


def test_a_file_that_cannot_be_used_leaves_the_old_certificate(make_broker: MakeBroker) -> None:
    broker = make_broker().start()
    broker.subject_shown()
    broker.issue("other", "localhost", "127.0.0.1").write_pkcs12(broker.keystore, PASSWORD)
    refused = "Listener CLIENTS keeps its certificate: Keystore DistinguishedName does not match: existing=CN=broker"
    wait_until(lambda: broker.subject_shown() == "broker" and refused in broker.log, "another name is refused")
    broker.issue("broker", "localhost").write_pkcs12(broker.keystore, PASSWORD)
    refused = (
        "keeps its certificate: Keystore SubjectAlternativeNames do not match: existing=['127.0.0.1', 'localhost']"
    )
    wait_until(lambda: broker.subject_shown() == "broker" and refused in broker.log, "a missing name is refused")
    broker.keystore.write_bytes(b"half a file")
    refused = "it is no PKCS12 file, or ssl.keystore.password is not its password"
    wait_until(lambda: broker.subject_shown() == "broker" and refused in broker.log, "a damaged file is refused")


def test_a_dynamic_config_names_another_keystore_and_is_kept(make_broker: MakeBroker) -> None:
    broker = make_broker(ssl_allow_dn_changes="true").start()
    assert broker.subject_shown() == "broker"
    second = broker.issue("second", "localhost", "127.0.0.1").write_pkcs12(broker.folder / "second.p12", PASSWORD)
    with pytest.raises(KafkaException, match=r"/no/such for configuration listener\.name\.clients\.ssl\.keystore"):
        broker.alter(KEYSTORE, "/no/such")
    with pytest.raises(KafkaException, match="only per-listener using the listener prefix"):
        broker.alter("ssl.keystore.location", second)
    broker.alter(KEYSTORE, second)
    wait_until(lambda: broker.subject_shown() == "second", "the new certificate is used")
    broker.kill()
    broker.overrides["ssl.allow.dn.changes"] = "false"
    broker.ports.clear()
    broker.start()
    assert broker.subject_shown() == "second"
    # Without the file, the settings of the start would be used, which may protect less.
    broker.kill()
    Path(second).unlink()
    broker.ports.clear()
    broker.spawn()
    wait_until(lambda: broker.exit_code is not None, "the start is refused")
    wait_for_log(broker, "The dynamic TLS configs of listener CLIENTS cannot be used")


# --- what the start refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "settings", "text"),
    [
        (
            "1",
            {KEYSTORE: "/no/such"},
            "Invalid value /no/such for configuration listener.name.clients.ssl.keystore.loc",
        ),
        (
            "2",
            {KEYSTORE: "/no/such"},
            "Invalid value /no/such for configuration listener.name.clients.ssl.keystore.loc",
        ),
        ("1", {KEYSTORE: ""}, "a listener with SSL needs a private key and a certificate"),
        (
            "1",
            {"ssl.keystore.password": "wrong-one"},
            "it is no PKCS12 file, or ssl.keystore.password is not its password",
        ),
        ("1", {f"listener.name.clients.{RULES}": "RULE:("}, f"listener.name.clients.{RULES}: Invalid rule: RULE:("),
    ],
)
def test_the_start_is_refused(make_broker: MakeBroker, workers: str, settings: dict[str, str], text: str) -> None:
    broker = make_broker(**settings, group_coordinator_threads=workers)
    broker.spawn()
    wait_until(lambda: broker.exit_code is not None, "the start is refused")
    wait_for_log(broker, text)
    assert "wrong-one" not in broker.log


def test_several_workers_share_a_secured_listener(make_broker: MakeBroker) -> None:
    broker = make_broker(group_coordinator_threads="2")
    broker.overrides["listeners"] = "CLIENTS://127.0.0.1:0"
    broker.start()
    create_topic(broker)
    producer = Producer(broker.confluent())
    producer.produce("t", b"x")
    assert producer.flush(20) == 0


# --- hostile input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x10\0\x12\0\0\0\0\0\1\0\0\0\0\0\0\0\0"])
def test_plain_text_is_refused_with_a_remark(make_broker: MakeBroker, data: bytes) -> None:
    broker = make_broker().start()
    with socket.create_connection(("127.0.0.1", broker.port)) as client:
        client.sendall(data)
        client.settimeout(10)
        while client.recv(1000):
            pass
    wait_for_log(broker, "the first bytes are not TLS: the client does not use SSL, this listener does")


def test_handshakes_that_are_not_finished_count_and_end(make_broker: MakeBroker) -> None:
    broker = make_broker(kcoord_ssl_handshake_timeout_ms="1000", max_connections="10").start()
    client_hello = handshake_begin()
    silent = [socket.create_connection(("127.0.0.1", broker.port)) for _ in range(10)]
    for number, client in enumerate(silent):
        client.sendall(client_hello[: number * 20])
    wait_until(lambda: is_refused(broker), "silent connections count")
    for client in silent:
        with client:
            client.settimeout(10)
            while client.recv(1000):
                pass
    wait_for_log(broker, "closing, the TLS handshake failed: it is not finished after 1 s")
    assert broker.subject_shown() == "broker"


def handshake_begin() -> bytes:
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def is_refused(broker: SecuredBroker) -> bool:
    with socket.create_connection(("127.0.0.1", broker.port)) as client:
        client.settimeout(0.2)
        try:
            return client.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True


def test_requests_that_arrive_in_single_bytes_are_answered(make_broker: MakeBroker) -> None:
    """The first request comes with the end of the handshake, and TLS records end anywhere."""
    broker = make_broker().start()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cadata=broker.authority.pem)
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    frame = b"\0\0\0\x0a\0\x12\0\0\0\0\0\x07\xff\xff"
    with socket.create_connection(("127.0.0.1", broker.port)) as client:
        client.settimeout(10)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                client.sendall(outgoing.read())
                incoming.write(client.recv(65536))
        tls.write(frame)
        for byte in outgoing.read():
            client.sendall(bytes([byte]))
            time.sleep(0.0005)
        answer = b""
        while len(answer) < 8:
            incoming.write(client.recv(65536))
            try:
                answer += tls.read(65536)
            except ssl.SSLWantReadError:
                continue
        assert answer[4:8] == b"\0\0\0\x07"
