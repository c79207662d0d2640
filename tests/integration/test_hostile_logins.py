# SPDX-License-Identifier: Apache-2.0
"""Many connections that never log in, and hostile logins, against a running broker (H-3, H-12).

`KCOORD_HOSTILE_CONNECTIONS` sets the number of connections; `make soak` opens 10,000.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kcoord.client.scram import ScramExchange
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ListGroupsRequest,
    ListGroupsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.integration.conftest import SERVER
from tests.integration.wire import ConnectionClosed, WireClient
from tests.support.certificates import Authority
from tests.support.kcoord_process import KcoordProcess
from tests.support.memory import resident_kib
from tests.support.waiting import wait_until

IS_SOAK = "KCOORD_HOSTILE_CONNECTIONS" in os.environ
CONNECTIONS = int(os.environ.get("KCOORD_HOSTILE_CONNECTIONS", "300"))
LOGIN_MS = max(2000, CONNECTIONS * 2)
HANDSHAKE_MS = LOGIN_MS // 2
MOST_KIB_PER_CONNECTION = 40
MOST_RESPONSE_SECONDS = 2.0 if IS_SOAK else 10.0
"""`make test` shares the machine with other tests."""
SCRAM = "SCRAM-SHA-256"
CLOSED = (ConnectionClosed, ConnectionResetError, BrokenPipeError)


class Broker(KcoordProcess):
    """A broker with the listeners USERS (SASL), SECURE (SASL and TLS) and PLAINTEXT."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority()
        keystore = self.authority.issue("broker", "localhost", "127.0.0.1").write_pem(folder / "broker.pem")
        module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        users = {f"listener.name.{name}.plain.sasl.jaas.config": f'{module} user_bob="pie";' for name in LISTENERS}
        super().__init__(
            folder,
            {
                **SERVER,
                **users,
                "listeners": "USERS://127.0.0.1:0,SECURE://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
                "listener.security.protocol.map": "USERS:SASL_PLAINTEXT,SECURE:SASL_SSL,PLAINTEXT:PLAINTEXT",
                "sasl.enabled.mechanisms": f"PLAIN,{SCRAM}",
                "kcoord.bootstrap.scram": f"{SCRAM}=[name=bob,password=pie]",
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": keystore,
                "kcoord.sasl.login.timeout.ms": str(LOGIN_MS),
                "kcoord.ssl.handshake.timeout.ms": str(HANDSHAKE_MS),
                "connection.failed.authentication.delay.ms": "0",
            },
        )

    def shake(self, mechanism: str, port: int | None = None) -> WireClient:
        """Returns a connection that has chosen a mechanism."""
        wire = WireClient(port or self.port)
        assert not wire.call(SaslHandshakeRequest(mechanism=mechanism), 1, SaslHandshakeResponse).error_code
        return wire

    def logged_in(self) -> WireClient:
        wire = self.shake("PLAIN")
        assert send_token(wire, b"\0bob\0pie").error_code == 0
        return wire


LISTENERS = ("users", "secure")


def send_token(wire: WireClient, token: bytes) -> SaslAuthenticateResponse:
    return wire.call(SaslAuthenticateRequest(auth_bytes=token), 2, SaslAuthenticateResponse)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    broker = Broker(tmp_path_factory.mktemp("logins"))
    try:
        broker.start()
        yield broker
        assert "Traceback" not in broker.log
    finally:
        broker.kill()


def half_handshake() -> bytes:
    """Returns the first half of a ClientHello."""
    outgoing = ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()[:-100]


def test_connections_that_never_log_in(broker: Broker) -> None:
    """They are closed after a time, cost little memory, and other clients are served meanwhile."""
    handshake = encode_request(17, 1, 2, "c", SaslHandshakeRequest(mechanism=SCRAM).encode(1))
    versions = encode_request(18, 0, 1, "c", ApiVersionsRequest().encode(0))
    first = SaslAuthenticateRequest(auth_bytes=b"n,,n=bob,r=nonce").encode(2)
    begun = versions + handshake + encode_request(36, 2, 3, "c", first)
    kinds = [
        (broker.ports[0], b""),
        (broker.ports[0], begun),
        (broker.ports[0], b"\0\0\0\x20\0\x11"),
        (broker.ports[1], b""),
        (broker.ports[1], half_handshake()),
    ]
    before_kib, peak_kib, slowest, began = resident_kib(broker.pid), 0, 0.0, time.monotonic()

    served: list[WireClient] = []

    def look() -> None:
        nonlocal peak_kib, slowest
        peak_kib = max(peak_kib, resident_kib(broker.pid))
        for wire in served:
            asked = time.monotonic()
            assert wire.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
            slowest = max(slowest, time.monotonic() - asked)

    with ExitStack() as stack:
        served += [stack.enter_context(broker.logged_in()), stack.enter_context(WireClient(broker.ports[2]))]
        opened: list[socket.socket] = []
        for number in range(CONNECTIONS):
            port, data = kinds[number % len(kinds)]
            address = ("127.0.0.1", port)
            connection = socket.create_connection(address, 30, (f"127.0.0.{2 + number % 5}", 0))
            opened.append(stack.enter_context(connection))
            if data:
                connection.sendall(data)
            if number % 100 == 99:
                look()
        look()
        last = time.monotonic()
        for number, connection in enumerate(opened):
            drain(connection)
            if number % 100 == 99:
                look()
        # Each one is closed by its own timer. connections.max.idle.ms is ten minutes.
        assert time.monotonic() - last < LOGIN_MS / 1000 + 10
        look()
    with broker.logged_in() as wire:
        assert wire.call(ListGroupsRequest(), 5, ListGroupsResponse).error_code == 0
    print(f"{CONNECTIONS} connections: {before_kib} KiB before, {peak_kib} KiB at most, {slowest:.3f} s")
    assert peak_kib - before_kib < MOST_KIB_PER_CONNECTION * CONNECTIONS + 20 * 1024
    assert slowest < MOST_RESPONSE_SECONDS
    assert f"closing, the client has not logged in after {LOGIN_MS / 1000:g} s" in broker.log
    assert f"the TLS handshake failed: it is not finished after {HANDSHAKE_MS / 1000:g} s" in broker.log
    assert broker.log.count(": closing, ") <= 10 * (time.monotonic() - began + 2), "ten lines a second"


def drain(connection: socket.socket) -> None:
    """Reads until the broker closes the connection."""
    connection.settimeout(LOGIN_MS / 1000 + 30)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return


NO_LOGINS = [
    ((600_000).to_bytes(4, "big"), "frame of 600000 bytes"),
    ((0x7FFFFFFF).to_bytes(4, "big"), "frame of 2147483647 bytes"),
    (b"\xff\xff\xff\xff", "frame of -1 bytes"),
    (half_handshake(), "looks like a TLS handshake"),
    (b"GET / HTTP/1.1\r\n\r\n", "looks like HTTP"),
    (encode_request(16, 5, 1, "c", ListGroupsRequest().encode(5)), "a valid SaslHandshake request was expected"),
    (
        encode_request(36, 2, 1, "c", SaslAuthenticateRequest(auth_bytes=b"\0bob\0pie").encode(2)),
        "a valid SaslHandshake request was expected",
    ),
]
"""Bytes, and the reason that the log of a listener without TLS gives."""


@pytest.mark.parametrize(
    ("listener", "data", "reason"),
    [
        *((0, data, reason) for data, reason in NO_LOGINS),
        *((1, data, "the first bytes are not TLS") for data, _ in NO_LOGINS[4:]),
    ],
)
def test_bytes_that_are_no_login_close_the_connection(broker: Broker, listener: int, data: bytes, reason: str) -> None:
    """Also TLS on a plain port, and plain text on a port with TLS. No timeout closes them."""

    def logged() -> list[str]:
        """Returns the line about a new connection. There is none if the log has had ten in this second."""
        begin = len(broker.log)
        with WireClient(broker.ports[listener]) as wire:
            host, port = wire.socket.getsockname()
            wire.socket.sendall(data)
            drain(wire.socket)
        return re.findall(rf"{host}:{port}: closing, .*", broker.log[begin:])

    (line,) = wait_until(logged, "the log says why")
    assert reason in line
    with broker.logged_in():
        pass


def test_a_recorded_login_cannot_be_replayed(broker: Broker) -> None:
    exchange = ScramExchange(SCRAM, "bob", "pie", "nonce")
    with broker.shake(SCRAM) as wire:
        final = exchange.final(send_token(wire, exchange.first()).auth_bytes)
        exchange.verify(send_token(wire, final).auth_bytes)
        assert send_token(wire, final).error_code == Errors.ILLEGAL_SASL_STATE
    with broker.shake(SCRAM) as wire:
        assert send_token(wire, exchange.first()).error_code == 0
        assert send_token(wire, final).error_code == Errors.SASL_AUTHENTICATION_FAILED


def test_tokens_of_the_largest_size(broker: Broker) -> None:
    """A token just below sasl.server.max.receive.size is refused like a wrong password, and one above it at once."""
    with broker.shake("PLAIN") as wire:
        assert send_token(wire, b"\0bob\0" + b"p" * 500_000).error_code == Errors.SASL_AUTHENTICATION_FAILED
    with broker.shake("PLAIN") as wire, pytest.raises(CLOSED):
        send_token(wire, b"\0bob\0" + b"p" * 530_000)


def test_a_server_does_not_renegotiate(broker: Broker, tmp_path: Path) -> None:
    """OpenSSL's client asks for a renegotiation with TLS 1.2, and gets the alert no_renegotiation."""
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{broker.ports[1]}", "-tls1_2"]
    output = tmp_path / "output"
    with output.open("wb") as file:
        client = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT)
    stdin = client.stdin
    assert stdin is not None

    def is_refused() -> bool:
        with suppress(BrokenPipeError):
            stdin.write(b"R\n")
        return b"no renegotiation" in output.read_bytes()

    try:
        wait_until(is_refused, "the renegotiation is refused")
        assert b"RENEGOTIATING" in output.read_bytes()
    finally:
        client.kill()
        client.wait()
        stdin.close()
    with broker.logged_in():
        pass
