# SPDX-License-Identifier: Apache-2.0
"""When a TLS handshake begins and ends: after the wait of max.connection.creation.rate, and within its timeout."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.certificates import ListenerCertificates
from kcoord.server.net.connection import KafkaConnection
from kcoord.server.net.tls_transport import TlsTransport
from kcoord_protocol.messages import ListGroupsResponse
from tests.support.certificates import Authority
from tests.unit.server.test_connection import FakeTransport, Owner, request

HELD_SECONDS = 3.0


class Timers:
    """The timers that the connection starts. They fire when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting: list[tuple[float, Callable[[], object]]] = []
        self.cancelled = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)

    def _call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timers:
        self.waiting.append((seconds, lambda: function(*arguments)))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def fire(self) -> None:
        """Fires the oldest timer."""
        self.waiting.pop(0)[1]()

    @property
    def seconds(self) -> list[float]:
        return [seconds for seconds, _ in self.waiting]


class HoldingOwner(Owner):
    """Holds every connection that it admits."""

    def __init__(self) -> None:
        super().__init__(lambda request: ListGroupsResponse())
        self.hold_seconds = HELD_SECONDS

    def admit(self, connection: KafkaConnection, host: str, descriptor: int) -> bool:
        if self.hold_seconds:
            connection.hold(self.hold_seconds)
        return super().admit(connection, host, descriptor)


class Socket(FakeTransport):
    """A socket that is closing also after `abort`, as those of the event loops."""

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def is_reading(self) -> bool:
        return self.reading


class TlsPeer:
    """A client, and the TLS transport of its connection."""

    def __init__(self, folder: Path, owner: HoldingOwner) -> None:
        authority = Authority()
        config = BrokerConfig.from_properties(
            {
                "listeners": "SSL://127.0.0.1:0",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": authority.issue("broker", "localhost").write_pem(folder / "broker.pem"),
                "kcoord.ssl.handshake.timeout.ms": "10000",
            }
        )
        (listener,) = config.open_listeners
        self.socket = Socket()
        self.owner = owner
        self.connection = KafkaConnection(owner)
        self.transport = TlsTransport(self.connection, ListenerCertificates(config, listener), owner.report)
        self.transport.connection_made(self.socket)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.create_default_context(cadata=authority.pem)
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    def shake_hands(self) -> bool:
        """Takes one step of the handshake. Returns True once the client has finished."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self.send()
        return True

    def send(self, data: bytes = b"", plain: bytes = b"") -> None:
        """Sends encrypted data, and `plain` after it in the same packet."""
        if data:
            self._tls.write(data)
        if self._outgoing.pending:
            self.transport.data_received(self._outgoing.read() + plain)
        self._incoming.write(b"".join(self.socket.writes))
        self.socket.writes.clear()


@pytest.fixture
async def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    return Timers(monkeypatch)


async def test_a_handshake_above_the_creation_rate_begins_after_the_wait(tmp_path: Path, timers: Timers) -> None:
    peer = TlsPeer(tmp_path, HoldingOwner())
    assert timers.seconds == [HELD_SECONDS]
    assert not peer.socket.is_reading()
    # The event loop passes on what it has read before the pause.
    assert not peer.shake_hands()
    assert not peer.shake_hands(), "the broker has answered nothing"
    timers.fire()
    assert peer.socket.is_reading()
    assert timers.seconds == [10], "the time for the handshake begins with the handshake"
    peer.send()
    assert peer.shake_hands()
    assert timers.cancelled == 1
    peer.send(request(1))
    await asyncio.sleep(0)
    assert peer.owner.handled == 1


async def test_a_handshake_within_the_rate_begins_at_once(tmp_path: Path, timers: Timers) -> None:
    owner = HoldingOwner()
    owner.hold_seconds = 0.0
    peer = TlsPeer(tmp_path, owner)
    assert timers.seconds == [10]
    assert not peer.shake_hands()
    assert peer.shake_hands()
    assert peer.connection.path._settings.logins == {"successful_authentication": 1}


async def test_a_handshake_that_is_not_finished_in_time_is_closed(tmp_path: Path, timers: Timers) -> None:
    peer = TlsPeer(tmp_path, HoldingOwner())
    timers.fire()
    peer.shake_hands()
    timers.fire()
    assert peer.socket.closed
    assert peer.owner.reports[-1].endswith("closing, the TLS handshake failed: it is not finished after 10 s")
    assert peer.connection.path._settings.logins == {"failed_authentication": 1}


async def test_a_client_that_leaves_during_the_wait_costs_no_handshake(tmp_path: Path, timers: Timers) -> None:
    peer = TlsPeer(tmp_path, HoldingOwner())
    peer.socket.close()
    peer.transport.connection_lost(None)
    timers.fire()
    assert timers.waiting == []


async def test_a_refused_connection_costs_no_handshake(tmp_path: Path, timers: Timers) -> None:
    owner = HoldingOwner()
    owner.hold_seconds, owner.refuse = 0.0, True
    peer = TlsPeer(tmp_path, owner)
    assert peer.socket.aborted
    assert timers.waiting == []


async def test_bytes_that_are_not_encrypted_close_a_connection_with_responses(tmp_path: Path, timers: Timers) -> None:
    owner = HoldingOwner()
    owner.hold_seconds = 0.0
    peer = TlsPeer(tmp_path, owner)
    while not peer.shake_hands():
        pass
    # The response to the request is ready, and cannot be encrypted any more.
    peer.send(request(1), plain=b"not a record of TLS")
    assert owner.handled == 1
    assert peer.socket.closed
    assert "closing, TLS failed" in owner.reports[-1]


@pytest.mark.parametrize(
    ("client_auth", "has_own", "warns"), [("required", False, True), ("none", False, False), ("requested", True, False)]
)
def test_certificates_of_public_authorities_are_warned_of(
    client_auth: str, has_own: bool, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Kafka accepts them, too. Everyone can have such a certificate."""
    authority = Authority()
    settings = {
        "listeners": "SSL://127.0.0.1:0",
        "ssl.client.auth": client_auth,
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": authority.issue("broker", "localhost").write_pem(tmp_path / "broker.pem"),
    }
    if has_own:
        settings |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority.pem}
    config = BrokerConfig.from_properties(settings)
    ListenerCertificates(config, config.open_listeners[0])
    assert ("any authority of the system" in caplog.text) is warns
