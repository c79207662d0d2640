# SPDX-License-Identifier: Apache-2.0
"""The supervisor binds sockets for its workers, and waits for their pipes, without an event loop."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
from pathlib import Path

import pytest

from kcoord.config import Listener, SecurityProtocol
from kcoord.server.errors import StartError
from kcoord.server.net.sockets import bind_listener, bound_port
from kcoord.server.workers.supervisor import Supervisor, wait_readable


def listener(host: str, port: int = 0) -> Listener:
    return Listener("PLAINTEXT", host, port, SecurityProtocol.PLAINTEXT)


def close(sockets: list[socket.socket]) -> None:
    for bound in sockets:
        bound.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ""])
def test_every_address_of_a_host_has_the_same_port(host: str) -> None:
    sockets = bind_listener(listener(host))
    try:
        assert {bound.getsockname()[1] for bound in sockets} == {bound_port(sockets)}
        assert len({bound.getsockname()[0] for bound in sockets}) == len(sockets)
        for bound in sockets:
            bound.listen()
        target = "127.0.0.1" if host == "127.0.0.1" else "localhost"
        socket.create_connection((target, bound_port(sockets)), 5).close()
    finally:
        close(sockets)


def test_a_port_in_use_raises_os_error() -> None:
    taken = bind_listener(listener("127.0.0.1"))
    try:
        taken[0].listen()
        with pytest.raises(OSError, match="in use") as caught:
            bind_listener(listener("127.0.0.1", bound_port(taken)))
        assert caught.value.errno == errno.EADDRINUSE
    finally:
        close(taken)


def test_the_error_names_a_path_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 200))
    with pytest.raises(StartError, match=f"cannot make the workers' socket {path}"):
        Supervisor._peer_socket(path)


def test_descriptors_above_1023_can_be_waited_for() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(2048, limits[1])), limits[1]))
    read, write = os.pipe()
    try:
        high = fcntl.fcntl(read, fcntl.F_DUPFD, 1024)
        assert wait_readable([high], 0) == []
        os.write(write, b"ready")
        assert wait_readable([high], 5) == [high]
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
