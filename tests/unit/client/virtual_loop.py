# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop on virtual time, with connections in memory.

If no task can run, the clock jumps to the next timer. So tests of the client do not wait, and they can assert the exact
time of an event.
"""

from __future__ import annotations

import asyncio
import selectors
import ssl
from asyncio import sslproto
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from typing import Any, TypeVar, cast

import pytest

T = TypeVar("T")

_START_SECONDS = 1000.0
"""The start is not 0, because 0 would hide a time that was not set."""
_MOST_TURNS = 10_000
"""More turns of the loop without progress of the clock are an endless loop."""
_LONGEST_SECONDS = 2_000.0
"""A test that takes longer waits for an event that does not happen, while other tasks repeat their work."""

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that connects only to servers that run in it.

    Connections to the `silent` addresses never open. `connections` are the open ends of the clients.
    """

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self._servers: dict[tuple[str, int], ProtocolFactory] = {}
        self._last_port = 1024
        self.silent: set[tuple[str, int]] = set()
        self.connections: set[MemoryTransport] = set()

    def time(self) -> float:
        return self._clock.seconds

    @property
    def now_ms(self) -> float:
        """Milliseconds since the start, rounded to remove floating-point errors."""
        return round((self._clock.seconds - _START_SECONDS) * 1000, 6)

    def block(self, seconds: float) -> None:
        """Advances the clock as work of the application does that does not suspend."""
        self._clock.seconds += seconds

    async def create_server(  # type: ignore[override]
        self, protocol_factory: ProtocolFactory, host: str, port: int, **_: object
    ) -> _Server:
        if not port:
            self._last_port += 1
            port = self._last_port
        self._servers[host, port] = protocol_factory
        return _Server(host, port, lambda: self._servers.pop((host, port), None))

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: ProtocolFactory, host: str, port: int, *, ssl: ssl.SSLContext | None = None, **_: object
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        await asyncio.sleep(0)
        if (host, port) in self.silent:
            await self.create_future()
        accept = self._servers.get((host, port))
        if accept is None:
            raise ConnectionRefusedError(f"nobody listens at {host}:{port}")
        protocol = protocol_factory()
        if ssl is None:
            return _connect(self, protocol, accept()), protocol
        encrypted = self.create_future()
        tls = sslproto.SSLProtocol(self, protocol, ssl, encrypted, False, host)
        _connect(self, tls, accept())
        await encrypted
        return tls._app_transport, protocol


class _Clock(selectors.DefaultSelector):
    """A selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = _START_SECONDS
        self._turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns = 0 if timeout != 0 else self._turns + 1
        if timeout is None:
            raise AssertionError("all tasks wait, and there is no timer")
        if self._turns > _MOST_TURNS:
            self._turns = 0
            raise AssertionError(f"an endless loop: more than {_MOST_TURNS} turns while no time passes")
        self.seconds += max(timeout, 0)
        if self.seconds > _START_SECONDS + _LONGEST_SECONDS:
            raise AssertionError(f"the test takes more than {_LONGEST_SECONDS:g} s of virtual time")
        return super().select(0)


class _Server:
    def __init__(self, host: str, port: int, close: Callable[[], object]) -> None:
        self.sockets = [_Address(host, port)]
        self._close = close

    def close(self) -> None:
        self._close()


class _Address:
    def __init__(self, host: str, port: int) -> None:
        self._address = host, port

    def getsockname(self) -> tuple[str, int]:
        return self._address


def _connect(loop: VirtualLoop, near: asyncio.BaseProtocol, far: asyncio.BaseProtocol) -> asyncio.Transport:
    """Connects two protocols. Returns the transport of the first."""
    ends = MemoryTransport(loop, near), MemoryTransport(loop, far)
    ends[0].peer, ends[1].peer = reversed(ends)
    far.connection_made(ends[1])
    near.connection_made(ends[0])
    loop.connections.add(ends[0])
    return ends[0]


class MemoryTransport(asyncio.Transport):
    """One end of a connection. Data arrives at the other end in the next turn of the loop, in order."""

    peer: MemoryTransport

    def __init__(self, loop: VirtualLoop, protocol: asyncio.BaseProtocol) -> None:
        super().__init__()
        self._loop = loop
        self._protocol = cast(asyncio.Protocol, protocol)
        self._is_closing = False
        self._is_lost = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._loop.call_soon(self.peer._receive, bytes(data))

    def _receive(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def close(self) -> None:
        """Closes this end. The other end reads all data and then the end of the stream."""
        self._close(self.peer._receive_end)

    def abort(self) -> None:
        self._close(self.peer._lose, ConnectionResetError("connection reset by peer"))

    def _force_close(self, error: Exception) -> None:
        """Aborts the connection. asyncio's TLS calls this after a failure."""
        self.abort()

    def _close(self, notify_peer: Callable[..., None], *args: Exception) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose)
            self._loop.call_soon(notify_peer, *args)

    def _receive_end(self) -> None:
        if not self._is_closing and not self._protocol.eof_received():
            self.close()

    def _lose(self, error: Exception | None = None) -> None:
        if not self._is_lost:
            self._is_closing = self._is_lost = True
            self._loop.connections.discard(self)
            self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol


def running_loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


def now_ms() -> float:
    """Returns the time of the running loop."""
    return running_loop().now_ms


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in a loop of its own, for tests that Hypothesis calls repeatedly."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def took_ms(work: Awaitable[object], *errors: type[BaseException]) -> float:
    """Returns how long the work takes. If `errors` are given, it must raise one of them."""
    before = now_ms()
    with pytest.raises(errors) if errors else nullcontext():
        await work
    return now_ms() - before


async def quiet(seconds: float = 5) -> None:
    """Lets time pass, so that the background tasks can do their work."""
    await asyncio.sleep(seconds)


async def cancel_after(turns: int, work: Coroutine[Any, Any, object]) -> None:
    """Runs the work and cancels it after some turns of the loop, unless it has ended."""
    task = asyncio.create_task(work)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
