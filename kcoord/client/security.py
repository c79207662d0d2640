# SPDX-License-Identifier: Apache-2.0
"""The interface for TLS and SASL. A `Security` encrypts connections and authenticates the client.

Without a `Security`, connections are plain.
"""

from __future__ import annotations

import ssl
from typing import Protocol, TypeVar

from kcoord_protocol.message import Message

Response = TypeVar("Response", bound=Message)


class RequestSender(Protocol):
    """Sends the requests of an authentication before all other requests of the connection."""

    async def call(self, request: Message, response: type[Response]) -> Response:
        """Sends a request in the highest common version. Returns the response."""
        ...


class Security(Protocol):
    """How a client encrypts its connections and authenticates itself."""

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns the TLS settings, None for a connection without TLS."""
        ...

    async def authenticate(self, sender: RequestSender) -> None:
        """Authenticates the client (SaslHandshake, SaslAuthenticate) before any other request.

        It is called for each new connection. If the broker gives the session an end, it is called again on the same
        connection before that end. An exception closes the connection.
        """
        ...
