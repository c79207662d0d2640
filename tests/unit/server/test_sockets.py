# SPDX-License-Identifier: Apache-2.0
"""Sockets that are bound before there is an event loop, for workers."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from kcoord.config import Listener, SecurityProtocol
from kcoord.server.errors import StartError
from kcoord.server.net.sockets import bind_listener, bound_port
from kcoord.server.workers.supervisor import Supervisor


def listener(host: str, port: int = 0) -> Listener:
    return Listener("PLAINTEXT", host, port, SecurityProtocol.PLAINTEXT)


def close(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_every_address_of_a_host_has_the_same_port(host: str) -> None:
    bound = bind_listener(listener(host))
    try:
        assert {one.getsockname()[1] for one in bound} == {bound_port(bound)}
        assert len({one.getsockname()[0] for one in bound}) == len(bound)
        for one in bound:
            one.listen()
        target = "127.0.0.1" if host == "127.0.0.1" else "localhost"
        socket.create_connection((target, bound_port(bound)), 5).close()
    finally:
        close(bound)


def test_a_port_that_is_taken_is_an_error() -> None:
    taken = bind_listener(listener("127.0.0.1"))
    try:
        taken[0].listen()
        with pytest.raises(OSError, match="in use") as caught:
            bind_listener(listener("127.0.0.1", bound_port(taken)))
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        close(taken)


def test_a_path_that_is_too_long_for_a_socket_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 200))
    with pytest.raises(StartError, match=f"cannot make the workers' socket {path}"):
        Supervisor._peer_socket(path)
