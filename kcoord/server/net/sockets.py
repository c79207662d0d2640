# SPDX-License-Identifier: Apache-2.0
"""Binds the address of a listener before there is an event loop. The supervisor passes the sockets to its workers."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

from kcoord.config import Listener

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors for an address family that this machine lacks; the host's other addresses are used then."""


def bind_listener(listener: Listener) -> list[socket.socket]:
    """Returns a bound socket, not yet listening, for each address of the host.

    Raises OSError if an address is in use, or if none is available. If the port is 0, all sockets get the same port.
    """
    bound: list[socket.socket] = []
    port, missing = listener.port, None
    try:
        for family, address in _addresses(listener):
            try:
                listening = _bind(family, (address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            bound.append(listening)
            port = listening.getsockname()[1]
    except BaseException:
        for listening in bound:
            listening.close()
        raise
    if not bound:
        raise missing or OSError(errno.EADDRNOTAVAIL, "the host has no address")
    return bound


def bound_port(sockets: Sequence[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1])


def _addresses(listener: Listener) -> Iterator[tuple[socket.AddressFamily, tuple[object, ...]]]:
    infos = socket.getaddrinfo(listener.host or None, listener.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    seen: set[tuple[object, ...]] = set()
    for family, _, _, _, address in sorted(infos, key=lambda info: info[0] != socket.AF_INET):
        if address not in seen:
            seen.add(address)
            yield family, address


def _bind(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        if not address[1]:
            return _bound_by_number(bound)
    except BaseException:
        bound.close()
        raise
    return bound


def _bound_by_number(picked: socket.socket) -> socket.socket:
    """Replaces a socket whose port the system picked by a socket that asks for this port.

    Only a socket that asked for its port keeps the port when it stops listening.
    """
    replacement = socket.socket(picked.family, socket.SOCK_STREAM)
    try:
        replacement.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if picked.family == socket.AF_INET6:
            replacement.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        replacement.bind(picked.getsockname())
    except BaseException:
        replacement.close()
        raise
    picked.close()
    return replacement
