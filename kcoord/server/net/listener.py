# SPDX-License-Identifier: Apache-2.0
"""A listening socket and its connections: limits on their number, the idle sweep, log lines about refused bytes,
orderly closing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from kcoord.server.net.connection import ConnectionOwner, KafkaConnection
from kcoord.server.net.request_path import PathSettings, RequestPath

if TYPE_CHECKING:
    from kcoord.config import Listener
    from kcoord.server.broker import Broker
    from kcoord.server.net.connection_limits import ConnectionLimits

_logger = logging.getLogger(__name__)

SYSTEM_BUFFER = -1
"""As the size of a buffer: the system sizes it, and changes that as a connection needs."""

_REPORTS_PER_SECOND = 10
_IDLE_SWEEPS_PER_TIMEOUT = 10
_SHORTEST_SWEEP_SECONDS = 0.05
_LONGEST_SWEEP_SECONDS = 30.0


class ReportLimiter:
    """Log lines that strangers can cause, at most so many per second; the number of those left out is told later."""

    __slots__ = ("_count", "_second", "_suppressed")

    def __init__(self) -> None:
        self._second = -1
        self._count = 0
        self._suppressed = 0

    def report(self, now_seconds: float, text: str) -> None:
        second = int(now_seconds)
        if second != self._second:
            if self._suppressed:
                _logger.warning("%d more lines about refused connections were left out", self._suppressed)
            self._second, self._count, self._suppressed = second, 0, 0
        self._count += 1
        if self._count > _REPORTS_PER_SECOND:
            self._suppressed += 1
        else:
            _logger.warning("%s", text)


class SocketListener:
    """One bound address. `bind` raises OSError where it cannot be had. `inherited` are sockets that a supervisor has
    bound to it already.
    """

    connection_class: ClassVar[type[KafkaConnection]] = KafkaConnection

    def __init__(
        self, address: Listener, broker: Broker, limits: ConnectionLimits, inherited: Sequence[socket.socket] = ()
    ) -> None:
        self.address = address
        self.listener_name = address.name
        self.broker = broker
        self.max_unread_bytes: int = broker.config.kcoord_response_buffer_max_bytes
        self.path_settings = PathSettings.of(broker, address.name)
        self.new_path: Callable[[Callable[[], None]], RequestPath] = partial(RequestPath, self.path_settings)
        self._limits = limits
        self._limiter = ReportLimiter()
        self.new_connection: Callable[[ConnectionOwner], KafkaConnection] = self.connection_class
        self._connections: set[KafkaConnection] = set()
        self._inherited = inherited
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None

    async def bind(self) -> int:
        """Takes the address; returns the real port, which matters where 0 was asked for."""
        loop = asyncio.get_running_loop()
        backlog = max(self.broker.config.socket_listen_backlog_size, 1)
        for bound in self._inherited:
            # A server closes the socket that it has; the address stays ours.
            self._servers.append(
                await loop.create_server(
                    lambda: self.new_connection(self), sock=bound.dup(), backlog=backlog, start_serving=False
                )
            )
        if not self._servers:
            host = self.address.host or None
            self._servers.append(
                await loop.create_server(
                    lambda: self.new_connection(self), host, self.address.port, backlog=backlog, start_serving=False
                )
            )
        for server in self._servers:
            self._size_buffers(server)
        return int(self._servers[0].sockets[0].getsockname()[1])

    def _size_buffers(self, server: asyncio.Server) -> None:
        """Connections have the buffers of the socket that accepts them. The system rounds, and may set a limit."""
        config = self.broker.config
        for option, size_bytes in (
            (socket.SO_SNDBUF, config.socket_send_buffer_bytes),
            (socket.SO_RCVBUF, config.socket_receive_buffer_bytes),
        ):
            if size_bytes != SYSTEM_BUFFER:
                for bound in server.sockets:
                    bound.setsockopt(socket.SOL_SOCKET, option, size_bytes)

    async def start_accepting(self) -> None:
        for server in self._servers:
            await server.start_serving()
        self._schedule_sweep()

    # --- what a connection asks ---------------------------------------------------------------------------------------

    def admit(self, connection: KafkaConnection, host: str) -> bool:
        refusal = self._limits.refusal(host)
        if refusal is not None:
            self.report(f"{connection.peer}: connection refused, {refusal}")
            return False
        self._connections.add(connection)
        wait_seconds = self._limits.wait_seconds(asyncio.get_running_loop().time())
        if wait_seconds:
            connection.hold(wait_seconds)
        return True

    def forget(self, connection: KafkaConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._limits.release(connection.path.client.remote_host)

    def report(self, text: str) -> None:
        self._limiter.report(asyncio.get_running_loop().time(), text)

    # --- idle connections ---------------------------------------------------------------------------------------------

    def _schedule_sweep(self) -> None:
        idle_seconds = self.broker.config.connections_max_idle_ms / 1000
        if idle_seconds <= 0:
            return
        delay = min(max(idle_seconds / _IDLE_SWEEPS_PER_TIMEOUT, _SHORTEST_SWEEP_SECONDS), _LONGEST_SWEEP_SECONDS)
        self._sweep = asyncio.get_running_loop().call_later(delay, self._close_idle, idle_seconds)

    def _close_idle(self, idle_seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            if connection.close_if_idle(now, idle_seconds):
                _logger.debug("%s: closing, idle longer than connections.max.idle.ms", connection.peer)
        self._schedule_sweep()

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.stop_reading()

    def suspend(self) -> None:
        """Ends all connections and refuses new ones, but keeps the address. For inherited sockets only."""
        self.stop_accepting()
        self._servers.clear()
        for bound in self._inherited:
            # It listens no more, in whichever process it is open. A socket that does not would keep the mark, and pass
            # it on to the connections that it accepts later.
            if bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                bound.shutdown(socket.SHUT_RDWR)
        self.close_connections()

    async def resume(self) -> None:
        """Takes connections again after `suspend`."""
        await self.bind()
        await self.start_accepting()

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def queued(self) -> int:
        """Requests that were read and wait to be processed, for metrics."""
        return sum(connection.path.queued for connection in self._connections)

    @property
    def in_flight(self) -> int:
        return sum(connection.path.in_flight for connection in self._connections)

    def close_connections(self) -> None:
        for connection in list(self._connections):
            connection.close()
