# SPDX-License-Identifier: Apache-2.0
"""The pages for load balancers and supervisors."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from kcoord.metrics import server
from kcoord.metrics.exposition import MetricsSnapshot
from kcoord.metrics.server import MetricsServer


class Pages:
    """A server whose broker is ready, or not for a reason."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._server = MetricsServer("127.0.0.1", 0, self._take, self._why_not_ready, asyncio.get_running_loop())

    async def _take(self) -> MetricsSnapshot:
        raise AssertionError("nobody asks for metrics")

    def _why_not_ready(self) -> str | None:
        return self.reason

    def close(self) -> None:
        self._server.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server.port), timeout=10)

    def get(self, name: str = "ready") -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{self._server.port}/{name}") as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
async def pages() -> AsyncIterator[Pages]:
    pages = Pages()
    yield pages
    pages.close()


async def test_a_broker_is_ready_unless_it_has_a_reason(pages: Pages) -> None:
    assert await asyncio.to_thread(pages.get) == (200, "ready\n")
    pages.reason = "no shards"
    assert await asyncio.to_thread(pages.get) == (503, "no shards\n")
    assert await asyncio.to_thread(pages.get, "health") == (200, "healthy\n"), "a restart would not help"


async def test_an_event_loop_that_hangs_is_not_ready(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READY_SECONDS", 0.05)
    # The test blocks the event loop.
    for name in ("ready", "health"):
        assert pages.get(name) == (503, "the event loop does not answer within 0.05 s\n")


@pytest.mark.parametrize("data", [b"", b"GET /ready HTTP/1.1\r\nX-"])
async def test_a_client_that_sends_no_request_is_disconnected(
    data: bytes, pages: Pages, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would keep a thread and a file descriptor of the broker."""
    monkeypatch.setattr(server.PageHandler, "timeout", 0.05)
    with pages.connect() as silent:
        silent.sendall(data)
        assert await asyncio.to_thread(silent.recv, 1) == b""
    assert capfd.readouterr().err == ""


async def test_a_client_that_resets_its_connection_causes_no_output(
    pages: Pages, capfd: pytest.CaptureFixture[str]
) -> None:
    client = pages.connect()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    assert await asyncio.to_thread(pages.get) == (200, "ready\n")
    assert capfd.readouterr().err == ""
