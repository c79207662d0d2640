# SPDX-License-Identifier: Apache-2.0
"""OAUTHBEARER with real clients and an identity provider that the tests start: it issues tokens over https."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs

import aiokafka
import aiokafka.abc
import aiokafka.helpers
import pytest
from confluent_kafka import Consumer, Producer
from cryptography.hazmat.primitives.asymmetric import rsa
from kafka import KafkaConsumer, KafkaProducer
from kafka.net.sasl.oauth import AbstractTokenProvider

from kcoord.cli import main
from kcoord.client import Consumer as KcoordConsumer
from kcoord.client import ConsumerConfig, ProducerConfig
from kcoord.client import Producer as KcoordProducer
from kcoord.client.oauthbearer import ALLOWED_FILES, ALLOWED_URLS
from kcoord.security.jaas import BEARER_MODULE
from tests.integration.conftest import SERVER
from tests.support.certificates import Authority
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.properties import write_properties
from tests.support.waiting import wait_until
from tests.unit.security.test_oauthbearer import jwk, token

ISSUER = "https://issuer.example"
TOKEN_SECONDS = 300


CLIENT = ("alice", "apple-pie")


class IdentityProvider:
    """Signs tokens, and serves them and its public keys over https on a free port.

    A client gets a token of `token_seconds` for the right secret. `requested` has the scopes of these requests, and
    `failures` the statuses of the next ones.
    """

    def __init__(self, authority: Authority, folder: Path) -> None:
        self._keys: dict[str, rsa.RSAPrivateKey] = {}
        self.asked = 0
        self.token_seconds = float(TOKEN_SECONDS)
        self.requested: list[str] = []
        self.failures: list[int] = []
        self.rotate("first")
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked += 1
                self._answer(200, {"keys": [jwk(key, kid=name) for name, key in provider._keys.items()]})

            def do_POST(self) -> None:
                fields = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode(), strict_parsing=True)
                assert fields.pop("grant_type") == ["client_credentials"]
                provider.requested.append(" ".join(fields.pop("scope", [])))
                expected = f"Basic {base64.b64encode(':'.join(CLIENT).encode()).decode()}"
                if provider.failures:
                    self._answer(provider.failures.pop(0), {})
                elif self.headers["Authorization"] != expected:
                    self._answer(401, {"error": "invalid_client", "error_description": "who are you?"})
                else:
                    self._answer(200, {"access_token": provider.token(CLIENT[0], provider.token_seconds)})

            def _answer(self, status: int, document: object) -> None:
                body = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                if status == 302:
                    self.send_header("Location", provider.token_url)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.issue("issuer", "localhost").write_pem(folder / "issuer.pem"))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = Thread(target=self._server.serve_forever)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"https://localhost:{self._server.server_port}/keys"

    @property
    def token_url(self) -> str:
        return f"https://localhost:{self._server.server_port}/token?tenant=x"

    def rotate(self, name: str) -> None:
        """Signs with another key from now on. The older keys stay valid."""
        self._key_id = name
        self._keys[name] = rsa.generate_private_key(65537, 2048)

    def token(self, subject: str = "alice", seconds: float = TOKEN_SECONDS, **claims: object) -> str:
        now = int(time.time())
        all_claims = {"sub": subject, "iat": now, "exp": now + seconds, "iss": ISSUER, "aud": "kafka", **claims}
        return token(all_claims, key=self._keys[self._key_id], kid=self._key_id)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class BearerBroker(KcoordProcess):
    """A broker with one listener, SASL_SSL with OAUTHBEARER, that trusts the authority of its provider."""

    def __init__(self, folder: Path) -> None:
        authority = Authority()
        self.authority_file = authority.write_pem(folder / "authority.pem")
        self.provider = IdentityProvider(authority, folder)
        super().__init__(
            folder,
            {
                **SERVER,
                "listeners": "SASL_SSL://127.0.0.1:0",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": authority.issue("broker", "localhost", "127.0.0.1").write_pem(
                    folder / "broker.pem"
                ),
                "sasl.enabled.mechanisms": "OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": self.provider.url,
                "org.apache.kafka.sasl.oauthbearer.allowed.urls": self.provider.url,
                "sasl.oauthbearer.expected.audience": "kafka",
                "sasl.oauthbearer.expected.issuer": ISSUER,
            },
        )
        self.environment = {"SSL_CERT_FILE": self.authority_file}

    def close(self) -> None:
        self.kill()
        self.provider.close()

    def properties(self, secret: str = CLIENT[1]) -> dict[str, str]:
        """Returns the properties of Kafka's tools and of kcoord.client, which ask the provider for tokens."""
        authority = f'ssl.truststore.type="PEM" ssl.truststore.location="{self.authority_file}"'
        return {
            "security.protocol": "SASL_SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.authority_file,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f'{BEARER_MODULE} required extension_traceId="7" {authority};',
            "sasl.login.callback.handler.class": BEARER_MODULE.replace("LoginModule", "LoginCallbackHandler"),
            "sasl.oauthbearer.token.endpoint.url": self.provider.token_url,
            "sasl.oauthbearer.client.credentials.client.id": CLIENT[0],
            "sasl.oauthbearer.client.credentials.client.secret": secret,
            "sasl.oauthbearer.scope": "read write",
        }

    def confluent(self, new_token: Callable[[], str] | None = None, **more: str) -> dict[str, Any]:
        make = new_token or self.provider.token
        return {
            "bootstrap.servers": self.address,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": self.authority_file,
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": lambda _: (make(), time.time() + TOKEN_SECONDS),
            **{key.replace("_", "."): value for key, value in more.items()},
        }


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BearerBroker]:
    made = BearerBroker(tmp_path_factory.mktemp("bearer"))
    try:
        made.start()
        yield made
    finally:
        made.close()


def test_librdkafka(broker: BearerBroker) -> None:
    producer = Producer(broker.confluent())
    producer.produce("librdkafka", b"x")
    assert producer.flush(20) == 0
    reading = broker.confluent(group_id="librdkafka", group_protocol="consumer", auto_offset_reset="earliest")
    with closing(Consumer(reading)) as consumer:
        consumer.subscribe(["librdkafka"])
        message = consumer.poll(20)
        assert message is not None and message.value() == b"x"


def test_kafka_python(broker: BearerBroker) -> None:
    class Tokens(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            return broker.provider.token()

    settings = {
        "bootstrap_servers": broker.address,
        "security_protocol": "SASL_SSL",
        "ssl_cafile": broker.authority_file,
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": Tokens(),
    }
    with closing(KafkaProducer(**settings)) as producer:
        producer.send("kafka-python", b"x").get(20)
    reading = {"group_id": "kafka-python", "auto_offset_reset": "earliest", "consumer_timeout_ms": 20_000}
    with closing(KafkaConsumer("kafka-python", **reading, **settings)) as consumer:
        assert next(consumer).value == b"x"


async def test_aiokafka(broker: BearerBroker) -> None:
    class Tokens(aiokafka.abc.AbstractTokenProvider):  # type: ignore[misc]
        async def token(self) -> str:
            return broker.provider.token()

    settings = {
        "bootstrap_servers": broker.address,
        "security_protocol": "SASL_SSL",
        "ssl_context": aiokafka.helpers.create_ssl_context(cafile=broker.authority_file),
        "sasl_mechanism": "OAUTHBEARER",
        "sasl_oauth_token_provider": Tokens(),
    }
    async with aiokafka.AIOKafkaProducer(**settings) as producer:
        await producer.send_and_wait("aiokafka", b"x")
    reading = {"group_id": "aiokafka", "auto_offset_reset": "earliest"}
    async with aiokafka.AIOKafkaConsumer("aiokafka", **reading, **settings) as consumer:
        assert (await consumer.getone()).value == b"x"


@pytest.fixture
def allowed(broker: BearerBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_URLS, broker.provider.token_url)


@pytest.mark.usefixtures("allowed")
async def test_kcoord_client(broker: BearerBroker) -> None:
    """The first request of a token fails. Then three tokens of three seconds are three sessions on a connection."""
    provider = broker.provider
    servers = {"bootstrap.servers": broker.address}
    provider.requested, provider.failures, provider.token_seconds = [], [503], 3.0
    begin = len(broker.log)
    try:
        notes: list[str] = []
        config = ProducerConfig.from_properties({**broker.properties(), **servers}, notes.append)
        reading = {"group.id": "kcoord", "auto.offset.reset": "earliest", **servers}
        consumer_config = ConsumerConfig.from_properties({**broker.properties(), **reading})
        consumer_config.security = config.security
        sent: list[bytes] = []
        received: list[bytes | None] = []
        async with KcoordProducer(config) as producer, KcoordConsumer(consumer_config) as consumer, asyncio.timeout(30):
            consumer.subscribe(["kcoord-client"])
            while len(provider.requested) < 4 or len(received) < len(sent):
                if len(provider.requested) < 4:
                    sent.append(str(len(sent)).encode())
                    await producer.send_and_wait("kcoord-client", sent[-1])
                received += [record.value for record in await consumer.poll(100)]
                await asyncio.sleep(0.02)
        assert received == sent
        assert not notes
        assert set(provider.requested) == {"read write"}
        assert "closing" not in broker.log[begin:]
    finally:
        provider.token_seconds = TOKEN_SECONDS


@pytest.mark.usefixtures("allowed")
def test_commands_with_their_properties_file(
    broker: BearerBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "client.properties"
    common = ("--bootstrap-server", broker.address, "--command-config", str(file))
    write_properties(file, broker.properties())
    assert main(["topics", "--create", "--topic", "commands", *common]) == 0
    assert main(["groups", "expiry", *common]) == 0
    assert main(["health", *common]) == 0
    capsys.readouterr()
    write_properties(file, broker.properties("wrong"))
    assert main(["topics", "--list", *common]) == 1
    assert main(["health", *common]) == 1
    errors = capsys.readouterr().err
    assert errors.count("status 401, invalid_client - who are you?") == 2 and "wrong" not in errors
    write_properties(file, broker.properties())
    broker.provider.failures = [302]
    assert main(["topics", "--list", *common]) == 1, "a redirect would get the secret"
    assert "status 302" in capsys.readouterr().err
    monkeypatch.delenv(ALLOWED_URLS)
    assert main(["topics", "--list", *common]) == 1
    assert f"{broker.provider.token_url} is not allowed" in capsys.readouterr().err
    token_file = tmp_path / "token"
    token_file.write_text(broker.provider.token())
    monkeypatch.setenv(ALLOWED_FILES, str(token_file))
    write_properties(file, {**broker.properties(), "sasl.oauthbearer.token.endpoint.url": token_file.as_uri()})
    assert main(["topics", "--describe", "--topic", "commands", *common]) == 0
    assert "Topic: commands" in capsys.readouterr().out


@pytest.mark.java
def test_kafkas_tools_with_their_properties_file(broker: BearerBroker) -> None:
    folder = broker.data.parent
    tokens = folder / "token"
    tokens.write_text(broker.provider.token())
    properties = folder / "java.properties"
    properties.write_text(
        "security.protocol=SASL_SSL\n"
        "ssl.truststore.type=PEM\n"
        f"ssl.truststore.location={broker.authority_file}\n"
        "sasl.mechanism=OAUTHBEARER\n"
        "sasl.jaas.config=org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required;\n"
        f"sasl.oauthbearer.token.endpoint.url={tokens.as_uri()}\n"
        "sasl.login.callback.handler.class="
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler\n"
    )
    prefix = "org.apache.kafka.sasl.oauthbearer.allowed."
    allowed = {f"{prefix}urls": tokens.as_uri(), f"{prefix}files": str(tokens)}
    arguments = ["--bootstrap-server", broker.address, "--command-config", str(properties)]
    output = KafkaJars().tool("topics", *arguments, "--create", "--topic", "java", properties=allowed)
    assert "Created topic java" in output


def test_a_new_key_of_the_provider_is_found(broker: BearerBroker) -> None:
    broker.provider.rotate("second")
    producer = Producer(broker.confluent())
    producer.produce("rotated", b"x")
    assert producer.flush(20) == 0
    assert broker.provider.asked == 2, "at the start, and for the unknown key id"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "another"}, "the audience is not an expected one"),
        ({"seconds": -3600}, "the token has expired"),
        ({"iss": "https://evil.example"}, "the issuer is not the expected one"),
    ],
)
def test_a_token_that_is_not_accepted(broker: BearerBroker, claims: dict[str, Any], reason: str) -> None:
    errors: list[str] = []
    settings = broker.confluent(lambda: broker.provider.token(**claims))
    producer = Producer(settings | {"error_cb": lambda error: errors.append(error.str())})

    def is_reported() -> bool:
        producer.poll(0.1)
        return any('{"status":"invalid_token"}' in error for error in errors)

    wait_until(is_reported, "the client reports the error")
    text = f"closing, the authentication with OAUTHBEARER failed: {reason}"
    wait_until(lambda: text in broker.log, f"the log has: {text}")
    assert "eyJ" not in broker.log, "no token is logged"
