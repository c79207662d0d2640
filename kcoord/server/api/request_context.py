# SPDX-License-Identifier: Apache-2.0
"""What a handler knows about one request besides its body, and the source of the identifiers that operations may use.

Randomness and the clock enter the system here and in `Broker.now_ms`; everything inside takes them as arguments.
"""

from __future__ import annotations

import itertools
import os
from base64 import urlsafe_b64encode
from typing import TYPE_CHECKING, Protocol

from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import OperationContext
from kcoord_protocol.api_keys import ApiKey

if TYPE_CHECKING:
    from kcoord.server.api.api_table import ApiTable
    from kcoord.server.observe.client_telemetry import ClientFacts

_UUID_BYTES = 16
_POOL_BYTES = 256 * _UUID_BYTES

_tokens = itertools.count(1)


class _RandomPool:
    """Random 128-bit identifiers cut from one read of the system's random source at a time: a system call each is too
    dear.
    """

    __slots__ = ("_bytes", "_position")

    def __init__(self) -> None:
        self._bytes = b""
        self._position = 0

    def take(self) -> bytes:
        if self._position == len(self._bytes):
            self._bytes = os.urandom(_POOL_BYTES)
            self._position = 0
        start = self._position
        self._position = start + _UUID_BYTES
        return self._bytes[start : self._position]


_pool = _RandomPool()


def _forget_pool() -> None:
    """What a child process has of its parent's random bytes, its siblings have too."""
    global _pool
    _pool = _RandomPool()


os.register_at_fork(after_in_child=_forget_pool)


def random_uuid() -> bytes:
    """16 random bytes with the version and variant bits of a random UUID."""
    value = bytearray(_pool.take())
    value[6] = value[6] & 0x0F | 0x40
    value[8] = value[8] & 0x3F | 0x80
    return bytes(value)


def candidate_id() -> str:
    """A fresh identifier in Kafka's text form; never one that starts with '-', which command lines would take for an
    option.
    """
    while True:
        text = urlsafe_b64encode(random_uuid())[:22].decode("ascii")
        if text[0] != "-":
            return text


class ClientConnection(Protocol):
    """What a connection knows about its client. `software` is the name and version that the client gave in ApiVersions;
    `apis` is what the broker serves to that software. `begins_with_api_versions`: that was the first request.
    """

    remote_host: str
    remote_port: int
    facts: ClientFacts | None

    begins_with_api_versions: bool

    @property
    def software(self) -> tuple[str, str]: ...

    @property
    def apis(self) -> ApiTable: ...

    def identify(self, software_name: str, software_version: str) -> None:
        """The client has named its software, perhaps not for the first time."""


class RequestContext:
    """The facts about one request: from where, by whom, when, in which version."""

    __slots__ = (
        "api_key",
        "api_version",
        "client_host",
        "client_id",
        "connection",
        "correlation_id",
        "listener_name",
        "now_ms",
        "principal",
    )

    def __init__(
        self,
        api_key: ApiKey,
        api_version: int,
        correlation_id: int,
        client_id: str,
        client_host: str,
        listener_name: str,
        principal: str,
        now_ms: int,
        connection: ClientConnection | None = None,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.listener_name = listener_name
        self.principal = principal
        self.now_ms = now_ms
        self.connection = connection

    @property
    def kip1327_form(self) -> Kip1327Form:
        """What the connection sees of KIP-1327; requests of other workers, which have no connection, see nothing."""
        return self.connection.apis.form if self.connection is not None else Kip1327Form.OFF

    def client_facts(self) -> ClientFacts:
        """What is known about the client of the connection; the same object as long as that lasts."""
        from kcoord.server.observe.client_telemetry import ClientFacts

        connection = self.connection
        if connection is None:
            return ClientFacts(client_id=self.client_id)
        facts = connection.facts
        if facts is None:
            name, version = connection.software
            facts = connection.facts = ClientFacts(
                self.client_id, name, version, connection.remote_host, connection.remote_port
            )
        return facts

    def operation_context(self, *, candidate: bool = True) -> OperationContext:
        """The context for one operation of a state machine; `candidate=False` where it can have no use for a new
        identifier.
        """
        return OperationContext(
            now_ms=self.now_ms,
            api_version=self.api_version,
            client_id=self.client_id,
            client_host=self.client_host,
            candidate_id=candidate_id() if candidate else "",
            token=next(_tokens),
        )


def internal_operation_context(now_ms: int) -> OperationContext:
    """The context of an operation that no client asked for."""
    return OperationContext(now_ms=now_ms, candidate_id=candidate_id(), token=next(_tokens))
