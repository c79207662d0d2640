# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL: all three clients through a TLS proxy, and SASL exchanges of one and two steps."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kcoord.client import (
    AdminClient,
    AdminConfig,
    Consumer,
    Errors,
    KafkaError,
    NewTopic,
    Producer,
    RequestSender,
    Security,
    TopicPartition,
)
from kcoord.testing import KcoordBroker, start_broker
from kcoord_protocol.messages import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.integration.client.secure_front import CERTIFICATE, SecureFront, Step


class Tls:
    """TLS with the test's certificate, without SASL."""

    def ssl_context(self) -> ssl.SSLContext | None:
        return ssl.create_default_context(cafile=str(CERTIFICATE))

    async def authenticate(self, sender: RequestSender) -> None:
        """Does nothing: the client uses TLS alone."""


class Sasl(Tls):
    """A mechanism with scripted messages."""

    def __init__(self, mechanism: str, *messages: bytes) -> None:
        self._mechanism = mechanism
        self._messages = messages
        self.challenges: list[bytes] = []

    async def authenticate(self, sender: RequestSender) -> None:
        shake = await sender.call(SaslHandshakeRequest(mechanism=self._mechanism), SaslHandshakeResponse)
        if shake.error_code:
            raise KafkaError(Errors(shake.error_code), f"the broker offers {', '.join(shake.mechanisms)}")
        for message in self._messages:
            answer = await sender.call(SaslAuthenticateRequest(auth_bytes=message), SaslAuthenticateResponse)
            if answer.error_code:
                raise KafkaError(Errors(answer.error_code), answer.error_message)
            self.challenges.append(answer.auth_bytes)


class PlainSasl(Sasl):
    """SASL without TLS."""

    def ssl_context(self) -> None:
        return None


def expect(expected: bytes, answer: bytes = b"") -> Step:
    def step(received: bytes) -> tuple[Errors, bytes]:
        return (Errors.NONE, answer) if received == expected else (Errors.SASL_AUTHENTICATION_FAILED, b"")

    return step


@asynccontextmanager
async def behind(front: SecureFront) -> AsyncIterator[KcoordBroker]:
    """Yields a broker that advertises the address of the proxy."""
    async with front.open():
        config = {
            "listeners": "PLAINTEXT://127.0.0.1:0,FRONT://127.0.0.1:0",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:0,FRONT://127.0.0.1:{front.port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,FRONT:PLAINTEXT",
        }
        broker = await asyncio.to_thread(start_broker, config)
        try:
            front.broker_port = int(broker.listeners["FRONT"].rpartition(":")[2])
            yield broker
        finally:
            await asyncio.to_thread(broker.stop)


async def use_all(address: str, security: Security | None) -> None:
    """Creates, writes and reads the topic t, with an admin client, a producer and a consumer."""
    async with AdminClient(bootstrap_servers=address, security=security) as admin:
        (await admin.create_topics([NewTopic("t", 1, 1)])).all()
    async with Producer(bootstrap_servers=address, security=security) as producer:
        await producer.send_and_wait("t", "secret")
    async with Consumer(
        bootstrap_servers=address, security=security, group_id="g", auto_offset_reset="earliest"
    ) as consumer:
        consumer.subscribe(["t"])
        assert [record.value for record in await consumer.poll(10_000)] == [b"secret"]
        await consumer.commit()
        assert (await consumer.committed([TopicPartition("t", 0)]))[TopicPartition("t", 0)] is not None


async def test_tls() -> None:
    front = SecureFront()
    async with behind(front) as broker:
        await use_all(f"127.0.0.1:{front.port}", Tls())
        assert [record.value for record in broker.records("t")] == [b"secret"]


@pytest.mark.parametrize("tls", [True, False])
async def test_sasl_with_one_step(tls: bool) -> None:
    """Each connection of each client authenticates with PLAIN."""
    front = SecureFront("PLAIN", (expect(b"\0me\0word"),), tls=tls)
    async with behind(front):
        await use_all(f"127.0.0.1:{front.port}", (Sasl if tls else PlainSasl)("PLAIN", b"\0me\0word"))
        assert front.authenticated >= 3


async def test_the_class_in_the_docs_works() -> None:
    page = (Path(__file__).parents[3] / "docs" / "client.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class SaslPlain" in block)
    names: dict[str, Any] = {}
    exec(compile(source, "docs/client.md", "exec"), names)
    front = SecureFront("PLAIN", (expect(b"\0me\0word"),))
    async with behind(front):
        await use_all(f"127.0.0.1:{front.port}", names["SaslPlain"]("me", "word", str(CERTIFICATE)))
    assert front.authenticated >= 3


async def test_sasl_with_two_steps() -> None:
    """The mechanism has a challenge and a response, as SCRAM has."""
    front = SecureFront("SCRIPT", (expect(b"first", b"challenge"), expect(b"second", b"done")))
    security = Sasl("SCRIPT", b"first", b"second")
    async with behind(front), AdminClient(bootstrap_servers=f"127.0.0.1:{front.port}", security=security) as admin:
        assert await admin.list_topics() == []
    assert security.challenges[:2] == [b"challenge", b"done"]


@pytest.mark.parametrize(
    ("security", "error"),
    [
        (Sasl("PLAIN", b"wrong"), Errors.SASL_AUTHENTICATION_FAILED),
        (Sasl("OTHER", b""), Errors.UNSUPPORTED_SASL_MECHANISM),
    ],
)
async def test_a_rejected_login_is_raised_at_once(security: Sasl, error: Errors) -> None:
    """The client does not retry until the timeout: the next attempt would fail in the same way."""
    front = SecureFront("PLAIN", (expect(b"right"),))
    async with behind(front):
        began = time.monotonic()
        with pytest.raises(KafkaError) as refused:
            async with AdminClient(bootstrap_servers=f"127.0.0.1:{front.port}", security=security) as admin:
                await admin.list_topics()
        assert refused.value.error is error
        assert time.monotonic() - began < 29, "the error comes before the timeout"


@pytest.mark.parametrize("security", [None, PlainSasl("PLAIN", b"")])
async def test_a_client_without_tls_cannot_connect(security: PlainSasl | None) -> None:
    front = SecureFront()
    async with behind(front):
        with pytest.raises(KafkaError):
            async with AdminClient(
                bootstrap_servers=f"127.0.0.1:{front.port}", security=security, default_api_timeout_ms=500
            ) as admin:
                await admin.list_topics()


async def test_an_untrusted_certificate_is_rejected() -> None:
    class Strict(Tls):
        def ssl_context(self) -> ssl.SSLContext:
            return ssl.create_default_context()

    front = SecureFront()
    async with behind(front):
        with pytest.raises(KafkaError, match="SSL handshake failed"):
            async with AdminClient(
                bootstrap_servers=f"127.0.0.1:{front.port}", security=Strict(), default_api_timeout_ms=4000
            ) as admin:
                await admin.list_topics()


def scram_server(password: str) -> tuple[Step, ...]:
    """Returns the server's steps of SCRAM-SHA-256 (RFC 5802)."""
    salt, iterations = b"0123456789abcdef", 4096
    first_messages: list[bytes] = []

    def begin(message: bytes) -> tuple[Errors, bytes]:
        bare = message.removeprefix(b"n,,")
        nonce = dict(part.split(b"=", 1) for part in bare.split(b","))[b"r"] + b"server"
        answer = b"r=%s,s=%s,i=%d" % (nonce, base64.b64encode(salt), iterations)
        first_messages[:] = [bare, answer]
        return Errors.NONE, answer

    def end(message: bytes) -> tuple[Errors, bytes]:
        without_proof, _, proof = message.rpartition(b",p=")
        salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations)
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        whole = b",".join((*first_messages, without_proof))
        signature = hmac.digest(hashlib.sha256(client_key).digest(), whole, "sha256")
        if bytes(a ^ b for a, b in zip(base64.b64decode(proof), signature, strict=True)) != client_key:
            return Errors.SASL_AUTHENTICATION_FAILED, b""
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        return Errors.NONE, b"v=" + base64.b64encode(hmac.digest(server_key, whole, "sha256"))

    return begin, end


@pytest.mark.parametrize(
    ("protocol", "mechanism", "script"),
    [
        ("SSL", None, ()),
        ("SASL_SSL", "PLAIN", (expect(b"\0me\0word"),)),
        ("SASL_PLAINTEXT", "PLAIN", (expect(b"\0me\0word"),)),
        ("SASL_SSL", "SCRAM-SHA-256", scram_server("word")),
    ],
)
async def test_properties_of_kafkas_tools(protocol: str, mechanism: str | None, script: tuple[Step, ...]) -> None:
    """TLS with a PEM file, and logins, work as in a file for --command-config."""
    tls = protocol.endswith("SSL")
    properties = {
        "security.protocol": protocol,
        "sasl.jaas.config": 'any.LoginModule required username="me" password="word";',
    }
    if tls:
        properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(CERTIFICATE)}
    if mechanism is not None:
        properties["sasl.mechanism"] = mechanism
    front = SecureFront(mechanism, script, tls=tls)
    async with behind(front) as broker:
        security = AdminConfig.from_properties({"bootstrap.servers": "h:1", **properties}).security
        await use_all(f"127.0.0.1:{front.port}", security)
        assert [record.value for record in broker.records("t")] == [b"secret"]
    assert mechanism is None or front.authenticated >= 3


async def test_a_wrong_password_is_raised_at_once() -> None:
    front = SecureFront("SCRAM-SHA-256", scram_server("other"), tls=False)
    properties = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.jaas.config": 'any.LoginModule required username="me" password="word";',
    }
    async with behind(front):
        config = AdminConfig.from_properties({"bootstrap.servers": f"127.0.0.1:{front.port}", **properties})
        with pytest.raises(KafkaError) as raised:
            async with AdminClient(config):
                raise AssertionError("the broker accepted a wrong password")
    assert raised.value.error is Errors.SASL_AUTHENTICATION_FAILED
