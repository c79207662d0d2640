# SPDX-License-Identifier: Apache-2.0
"""A listener accepts all connections that wait, and sets their socket buffers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import cast
from unittest import mock

import pytest
import uvloop

from kcoord.config import BrokerConfig, Listener, SecurityProtocol
from kcoord.server.broker import Broker
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import MOST_WAITING_ACCEPTS, SocketListener
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


async def connections_after_turns(clients: int, *, stops: bool = False) -> list[int]:
    """Lets clients connect, and returns the number of open connections after each turn of the event loop.

    If the listener `stops`, it does so when the first connection is opened.
    """
    config = BrokerConfig.from_properties({})
    listener = SocketListener(ADDRESS, cast("Broker", SimpleNamespace(config=config)), ConnectionLimits(config))
    opened: list[asyncio.Protocol] = []

    def open_connection() -> asyncio.Protocol:
        opened.append(asyncio.Protocol())
        if stops:
            listener.stop_accepting()
        return opened[-1]

    counts = []
    with mock.patch.object(listener.connections, "open", open_connection), ExitStack() as sockets:
        port = await listener.bind()
        await listener.start_accepting()
        for _ in range(clients):
            sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
        for _ in range(20):
            await asyncio.sleep(0)
            counts.append(len(opened))
        listener.stop_accepting()
    return counts


def test_connections_that_wait_are_accepted_in_one_turn() -> None:
    """uvloop itself accepts one connection in each turn."""
    counts = uvloop.run(connections_after_turns(20))
    assert counts[-1] == 20
    assert 19 in [after - before for before, after in pairwise(counts)]


def test_a_turn_accepts_a_limited_number_of_connections() -> None:
    clients = MOST_WAITING_ACCEPTS + 20
    counts = uvloop.run(connections_after_turns(clients))
    assert counts[-1] == clients
    assert max(after - before for before, after in pairwise([0, *counts])) <= MOST_WAITING_ACCEPTS + 1


def test_a_listener_that_stops_opens_no_further_connection() -> None:
    assert uvloop.run(connections_after_turns(20, stops=True))[-1] == 1


async def test_many_clients_connect_while_the_event_loop_is_busy() -> None:
    """The kernel drops the packet of a client for whom its queue has no place, so the client waits for a second."""
    config = BrokerConfig.from_properties({})
    listener = SocketListener(ADDRESS, cast("Broker", SimpleNamespace(config=config)), ConnectionLimits(config))
    port = await listener.bind()
    await listener.start_accepting()
    with ExitStack() as sockets:
        for _ in range(500):
            sockets.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
        listener.stop_accepting()
