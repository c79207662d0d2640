# SPDX-License-Identifier: Apache-2.0
"""The connection to a broker of the upstream that belongs to one client connection.

A link is opened by kcoord's own client code, which negotiates versions and logs in, unless the client itself logs in.
Then the link gets the transport. Bytes that are written before that wait in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kcoord.upstream.gateway import Gateway
from kcoord_protocol.errors import Errors, KafkaError


class LinkOwner(Protocol):
    """The path that a link belongs to. Only a Protocol, because each of the two knows the other."""

    def respond(self, data: bytes) -> None:
        """Takes bytes of the upstream."""

    def link_changed(self) -> None:
        """Follows `is_blocked`."""

    def link_lost(self, link: UpstreamLink, reason: str) -> None:
        """Called once, if the link could not be opened or was lost."""


class UpstreamLink(asyncio.Protocol):
    """The connection to the upstream that belongs to one client connection."""

    def __init__(self, path: LinkOwner) -> None:
        self._path = path
        self._transport: asyncio.Transport | None = None
        self._waiting: list[bytes | memoryview] = []
        self.write: Callable[[bytes | memoryview], None] = self._waiting.append
        """Sends bytes to the upstream, after those that wait until the link is open."""
        self._is_paused = False
        self._is_closed = False
        self.was_open = False
        self.is_blocked = True
        """True while the upstream takes no bytes: the link is being opened, or its transport asked for a pause."""

    async def open(self, gateway: Gateway, node_id: int | None) -> None:
        """Connects to a broker; to any broker if `node_id` is None."""
        target = gateway.any_node() if node_id is None else node_id
        try:
            if target is None:
                raise KafkaError(Errors.BROKER_NOT_AVAILABLE, "no broker of the upstream is in service")
            connection = await gateway.upstream.open_connection(target, logs_in=not gateway.passes_logins)
            transport = self._transport = connection.hand_over(self)
        except KafkaError as error:
            self._is_closed = True
            self._path.link_lost(self, f"broker {target} of the upstream cannot be reached: {error.message}")
            return
        self.was_open = True
        for data in self._waiting:
            transport.write(data)
        self._waiting.clear()
        self.write = transport.write
        if self._is_closed:
            transport.close()
            return
        if self._is_paused:
            transport.pause_reading()
        self.resume_writing()

    def pause_reading(self, is_paused: bool) -> None:
        """Stops or continues reading responses."""
        if is_paused is self._is_paused:
            return
        self._is_paused = is_paused
        if self._transport is not None and not self._transport.is_closing():
            if is_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def close(self) -> None:
        """Sends what was written, and closes."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.close()

    # --- called by the event loop -------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._path.respond(data)

    def pause_writing(self) -> None:
        self.is_blocked = True
        self._path.link_changed()

    def resume_writing(self) -> None:
        self.is_blocked = False
        self._path.link_changed()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._path.link_lost(self, f"the upstream closed the connection{f': {exc}' if exc else ''}")
