# SPDX-License-Identifier: Apache-2.0
"""A listener sets the socket buffers of the connections that it accepts."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import uvloop

from kcoord.config import BrokerConfig, Listener, SecurityProtocol
from kcoord.server.broker import Broker
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.server.net.sockets import bind_listener

ADDRESS = Listener("PLAINTEXT", "127.0.0.1", 0, SecurityProtocol.PLAINTEXT)

Run = Callable[[Coroutine[object, object, tuple[int, int]]], tuple[int, int]]


async def buffers_of_a_connection(inherits: bool, **settings: str) -> tuple[int, int]:
    """Returns the sizes of the send and the receive buffer of an accepted connection."""
    config = BrokerConfig.from_properties({key.replace("_", "."): value for key, value in settings.items()})
    broker = cast("Broker", SimpleNamespace(config=config))
    inherited = bind_listener(ADDRESS) if inherits else []
    listener = SocketListener(ADDRESS, broker, ConnectionLimits(config), inherited)
    accepted: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            own: socket.socket = transport.get_extra_info("socket")
            sizes = [own.getsockopt(socket.SOL_SOCKET, option) for option in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
            accepted.set_result((sizes[0], sizes[1]))

    with mock.patch.object(listener.connections, "open", Connection):
        port = await listener.bind()
        await listener.start_accepting()
        with socket.create_connection(("127.0.0.1", port)):
            sizes = await accepted
    listener.stop_accepting()
    for bound in inherited:
        bound.close()
    return sizes


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("inherits", [False, True])
def test_connections_have_the_configured_buffers(run: Run, inherits: bool) -> None:
    sizes = run(
        buffers_of_a_connection(inherits, socket_send_buffer_bytes="20000", socket_receive_buffer_bytes="30000")
    )
    # Linux adds its own overhead: it doubles the size.
    assert sizes in ((20000, 30000), (40000, 60000))


def test_the_operating_system_chooses_the_buffer_sizes_by_default() -> None:
    with socket.socket() as plain:
        own_bytes = plain.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert asyncio.run(buffers_of_a_connection(False))[0] >= own_bytes
