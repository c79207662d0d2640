# SPDX-License-Identifier: Apache-2.0
"""Takes the address of a listener before there is an event loop, for a process that hands it on."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

from kcoord.config import Listener

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""An address family that this machine does not have: another one of the same name will do."""


def bind_listener(listener: Listener) -> list[socket.socket]:
    """A bound socket, not yet listening, for each address that the host's name stands for; OSError where none can be
    had, or where one is taken. Port 0 is the same port for all of them.
    """
    bound: list[socket.socket] = []
    port, missing = listener.port, None
    try:
        for family, address in _addresses(listener):
            try:
                one = _bind(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            bound.append(one)
            port = one.getsockname()[1]
    except BaseException:
        for one in bound:
            one.close()
        raise
    if not bound:
        raise missing or OSError(errno.EADDRNOTAVAIL, "the host has no address")
    return bound


def bound_port(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def _addresses(listener: Listener) -> Iterator[tuple[socket.AddressFamily, tuple[object, ...]]]:
    found = socket.getaddrinfo(listener.host or None, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    seen: set[tuple[object, ...]] = set()
    for family, _, _, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        if address not in seen:
            seen.add(address)
            yield family, address


def _bind(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
        if not address[1]:
            return _bound_by_number(one)
    except BaseException:
        one.close()
        raise
    return one


def _bound_by_number(one: socket.socket) -> socket.socket:
    """Another socket on the port that the system has picked: only one that asked for its port keeps it when it stops
    to listen.
    """
    other = socket.socket(one.family, socket.SOCK_STREAM)
    try:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if one.family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(one.getsockname())
    except BaseException:
        other.close()
        raise
    one.close()
    return other
