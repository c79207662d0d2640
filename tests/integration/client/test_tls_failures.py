# SPDX-License-Identifier: Apache-2.0
"""A TLS handshake that fails is not repeated: one side does not accept the other's certificate.

The upstream mode is the exception, because a certificate of the cluster may be replaced.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from kcoord.client import (
    AdminClient,
    Consumer,
    ConsumerConfig,
    DisconnectException,
    NewTopic,
    Producer,
    ProducerConfig,
    SslAuthenticationException,
    TopicPartition,
)
from kcoord.client.cluster import Cluster
from kcoord.client.config import AdminConfig, CommonConfig
from kcoord.client.errors import is_retriable
from kcoord.client.repeat import repeat
from kcoord.config import BrokerConfig
from kcoord.server.errors import StartError
from kcoord.testing import start_broker
from kcoord.upstream.cluster import UpstreamCluster
from tests.support.certificates import Authority, Identity
from tests.support.ports import free_ports
from tests.unit.client import fake_broker
from tests.unit.client.fake_broker import FakeBroker

AUTHORITY, OTHER = Authority(), Authority("Other")
SECURITY = "security.protocol"
LONG_MS = 3_600_000
"""A client that repeats a failed handshake would not end within a test."""


class Folder:
    """Files with keys and certificates, and the settings that name them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def server(self, identity: Identity) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity.write_pem(self._path / "server.pem"))
        return context

    def client(self, authority: Authority, identity: Identity | None = None) -> dict[str, str]:
        properties = {
            SECURITY: "SSL",
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": authority.write_pem(self._path / "authority.pem"),
        }
        if identity is not None:
            properties |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": identity.write_pem(self._path / "client.pem"),
            }
        return properties


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    # The fake broker notes the virtual time of requests, and here are real sockets and real time.
    monkeypatch.setattr(fake_broker, "now_ms", lambda: 0.0)
    return Folder(tmp_path)


@asynccontextmanager
async def broker_with(context: ssl.SSLContext) -> AsyncIterator[FakeBroker]:
    broker = FakeBroker()
    broker.tls = context
    async with broker:
        yield broker


@asynccontextmanager
async def kcoord_with(folder: Folder, settings: dict[str, str]) -> AsyncIterator[str]:
    """Yields the address of a kcoord broker with TLS. Unlike asyncio's server, it sends the alerts of TLS."""
    files = {key: value for key, value in folder.client(AUTHORITY, server_identity()).items() if key != SECURITY}
    broker = await asyncio.to_thread(start_broker, {"listeners": "SSL://127.0.0.1:0", **files, **settings})
    try:
        yield broker.bootstrap_servers
    finally:
        await asyncio.to_thread(broker.stop)


async def failure_of(address: str, properties: dict[str, str]) -> str:
    """Returns the text of the error with which a client ends that may repeat its first request for an hour."""
    config = AdminConfig.from_properties(
        properties | {"bootstrap.servers": address, "default.api.timeout.ms": str(LONG_MS)}
    )
    with pytest.raises(SslAuthenticationException) as failure:
        async with AdminClient(config):
            pass
    assert isinstance(failure.value, DisconnectException)
    assert not is_retriable(failure.value)
    return failure.value.message.removeprefix(f"{address}: ")


def server_identity(authority: Authority = AUTHORITY, name: str = "127.0.0.1") -> Identity:
    return authority.issue("broker", name)


async def test_an_authority_that_is_not_trusted(folder: Folder) -> None:
    async with broker_with(folder.server(server_identity())) as broker:
        text = await failure_of(broker.address, folder.client(OTHER))
    assert text.startswith("SSL handshake failed: the broker's certificate is not accepted: ")
    assert text.endswith(" (ssl.truststore.location)")


async def test_a_certificate_that_has_expired(folder: Folder) -> None:
    identity = AUTHORITY.issue("broker", "127.0.0.1", lifetime=timedelta(hours=1))
    async with broker_with(folder.server(identity)) as broker:
        text = await failure_of(broker.address, folder.client(AUTHORITY))
    assert text == (
        "SSL handshake failed: the broker's certificate is not accepted: certificate has expired "
        "(ssl.keystore.location of the broker, or an authority in ssl.truststore.location)"
    )


async def test_a_name_that_is_not_in_the_certificate(folder: Folder) -> None:
    async with broker_with(folder.server(server_identity(name="elsewhere"))) as broker:
        text = await failure_of(broker.address, folder.client(AUTHORITY))
    assert text == (
        "SSL handshake failed: the broker's certificate is not accepted: IP address mismatch, certificate is not valid "
        "for '127.0.0.1' (ssl.endpoint.identification.algorithm)"
    )


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
@pytest.mark.parametrize("has_key", [False, True])
async def test_a_broker_that_rejects_the_client(folder: Folder, version: str, has_key: bool) -> None:
    """With TLS 1.3 the client learns that after its handshake, as the response to its first request."""
    async with kcoord_with(folder, {"ssl.client.auth": "required", "ssl.enabled.protocols": version}) as address:
        text = await failure_of(address, folder.client(AUTHORITY, OTHER.issue("client") if has_key else None))
    assert text.startswith("SSL handshake failed: the broker rejects the client: ")
    assert text.endswith(" (ssl.keystore.location)")


async def test_no_common_version_of_tls(folder: Folder) -> None:
    async with kcoord_with(folder, {"ssl.enabled.protocols": "TLSv1.2"}) as address:
        text = await failure_of(address, folder.client(AUTHORITY) | {"ssl.enabled.protocols": "TLSv1.3"})
    assert text.startswith("SSL handshake failed: no common version of TLS: ")
    assert text.endswith(" (ssl.enabled.protocols)")


async def test_a_server_that_is_no_broker(folder: Folder) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        text = await failure_of(f"127.0.0.1:{port}", folder.client(AUTHORITY))
    assert text.startswith("SSL handshake failed: the broker does not speak TLS here: ")
    assert text.endswith(" (security.protocol)")


async def test_requests_about_several_keys_end_too(folder: Folder) -> None:
    """`repeat` makes the outcome of every key of an error that ends the whole request."""
    async with broker_with(folder.server(server_identity())) as broker:
        config = CommonConfig.from_properties(folder.client(OTHER) | {"bootstrap.servers": broker.address})
        cluster = Cluster(config)

        async def attempt(keys: list[str]) -> dict[str, int]:
            await cluster.any_connection()
            return dict.fromkeys(keys, 1)

        outcomes = await repeat(cluster, cluster.deadline(LONG_MS), ["a", "b"], attempt)
        await cluster.close()
    assert [type(outcome) for outcome in outcomes.values()] == [SslAuthenticationException] * 2


async def test_a_broker_that_advertises_a_name_without_certificate(folder: Folder) -> None:
    """The client reaches the cluster, and the handshakes with the leader and the coordinator fail."""
    files = {key: value for key, value in folder.client(AUTHORITY, server_identity()).items() if key != SECURITY}
    port = free_ports()
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:0,SSL://localhost:{port}",
        **files,
    }
    properties = folder.client(AUTHORITY) | {"bootstrap.servers": f"127.0.0.1:{port}"}
    broker = await asyncio.to_thread(start_broker, settings)
    mismatch = rf"^localhost:{port}: SSL handshake failed: .* \(ssl\.endpoint\.identification\.algorithm\)$"

    async def fails(call: Awaitable[object]) -> None:
        with pytest.raises(SslAuthenticationException) as failure:
            await call
        assert re.search(mismatch, failure.value.message), failure.value.message

    try:
        broker.create_topic("t")
        consumer_properties = properties | {"group.id": "g", "auto.offset.reset": "earliest"}
        async with Producer(ProducerConfig.from_properties(properties)) as producer:
            await fails(producer.send_and_wait("t", b"value"))
        async with Consumer(ConsumerConfig.from_properties(consumer_properties)) as consumer:
            consumer.subscribe(["t"])
            await fails(consumer.poll(LONG_MS))
        async with Consumer(ConsumerConfig.from_properties(properties)) as consumer:
            consumer.assign([TopicPartition("t", 0)])
            consumer.seek(TopicPartition("t", 0), 0)
            await fails(consumer.poll(LONG_MS))
        async with AdminClient(AdminConfig.from_properties(properties)) as admin:
            created = await admin.create_topics([NewTopic("u", 1, 1)], timeout_ms=LONG_MS)
            assert isinstance(created.error("u"), SslAuthenticationException)
    finally:
        await asyncio.to_thread(broker.stop)


async def test_the_upstream_is_tried_again(folder: Folder) -> None:
    """The start fails at once, as with a wrong password. A running instance notices a certificate that is replaced."""
    security = {f"kcoord.upstream.{key}": value for key, value in folder.client(AUTHORITY).items()}

    def upstream_of(broker: FakeBroker) -> UpstreamCluster:
        return UpstreamCluster(
            BrokerConfig.from_properties({"kcoord.upstream.bootstrap.servers": broker.address, **security})
        )

    broker = FakeBroker(metadata=(10, 13))
    broker.tls = folder.server(server_identity())
    async with broker:
        upstream = upstream_of(broker)
        await upstream.connect()
        for authority, is_accepted in ((OTHER, False), (OTHER, False), (AUTHORITY, True)):
            await broker.__aexit__()
            broker.tls = folder.server(server_identity(authority))
            await broker.open()
            if is_accepted:
                assert (await upstream.look({})).brokers
                continue
            with pytest.raises(SslAuthenticationException) as failure:
                await upstream.look({})
            assert failure.value.error.retriable, "clients of kcoord get an error that they retry"
            with pytest.raises(StartError, match=r"SSL handshake failed: .* \(ssl\.truststore\.location\)$"):
                await upstream_of(broker).connect()
        await upstream.close()
