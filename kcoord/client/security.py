# SPDX-License-Identifier: Apache-2.0
"""The seam for TLS and SASL: a `Security` says how a connection is encrypted and proves who the client is.

Without one, connections are plain.
"""

from __future__ import annotations

import ssl
from typing import Protocol, TypeVar

from kcoord_protocol.message import Message

Response = TypeVar("Response", bound=Message)


class RequestSender(Protocol):
    """What authentication may do with a connection that has negotiated its versions and carries nothing else yet."""

    async def call(self, request: Message, response: type[Response]) -> Response:
        """Sends a request in the highest version that both sides have, and waits for its answer."""
        ...


class Security(Protocol):
    """How connections are secured."""

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS settings, or None for a connection without TLS."""
        ...

    async def authenticate(self, sender: RequestSender) -> None:
        """Runs before any other request (SaslHandshake, SaslAuthenticate); an exception closes the connection."""
        ...
