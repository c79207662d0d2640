# SPDX-License-Identifier: Apache-2.0
"""A listening socket: binding, accepting, suspending."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kcoord.server.net.connection import Connections
from kcoord.server.net.request_path import PathSettings, RequestPath

if TYPE_CHECKING:
    from kcoord.config import Listener
    from kcoord.server.broker import Broker
    from kcoord.server.net.connection_limits import ConnectionLimits

_logger = logging.getLogger(__name__)

SYSTEM_BUFFER = -1
"""As the size of a buffer: the system sizes it, and changes that as a connection needs."""


class SocketListener:
    """One bound address. `bind` raises OSError where it cannot be had. `inherited` are sockets that a supervisor has
    bound to it already.
    """

    def __init__(
        self, address: Listener, broker: Broker, limits: ConnectionLimits, inherited: Sequence[socket.socket] = ()
    ) -> None:
        self.address = address
        self.listener_name = address.name
        self.broker = broker
        self.path_settings = PathSettings.of(broker, address.name)
        self.connections = Connections(
            limits, partial(RequestPath, self.path_settings), broker.config.kcoord_response_buffer_max_bytes
        )
        self._inherited = inherited
        self._servers: list[asyncio.Server] = []

    async def bind(self) -> int:
        """Takes the address; returns the real port, which matters where 0 was asked for."""
        loop = asyncio.get_running_loop()
        backlog = max(self.broker.config.socket_listen_backlog_size, 1)
        for bound in self._inherited:
            # A server closes the socket that it has; the address stays ours.
            self._servers.append(
                await loop.create_server(self.connections.open, sock=bound.dup(), backlog=backlog, start_serving=False)
            )
        if not self._servers:
            host = self.address.host or None
            self._servers.append(
                await loop.create_server(
                    self.connections.open, host, self.address.port, backlog=backlog, start_serving=False
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
        self.connections.close_idle_after(self.broker.config.connections_max_idle_ms / 1000)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        self.connections.stop_reading()

    def suspend(self) -> None:
        """Ends all connections and refuses new ones, but keeps the address. For inherited sockets only."""
        self.stop_accepting()
        self._servers.clear()
        for bound in self._inherited:
            # It listens no more, in whichever process it is open. A socket that does not would keep the mark, and pass
            # it on to the connections that it accepts later.
            if bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                bound.shutdown(socket.SHUT_RDWR)
        self.connections.close()

    async def resume(self) -> None:
        """Takes connections again after `suspend`."""
        await self.bind()
        await self.start_accepting()
