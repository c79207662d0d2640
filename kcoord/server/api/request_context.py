# SPDX-License-Identifier: Apache-2.0
"""What a handler knows about one request besides its body."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import OperationContext
from kcoord_protocol.api_keys import ApiKey

if TYPE_CHECKING:
    from kcoord.server.api.api_table import ApiTable
    from kcoord.server.observe.client_telemetry import ClientFacts

_tokens = itertools.count(1)


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

    def operation_context(self, candidate_id: str = "") -> OperationContext:
        """The context for one operation of a state machine; `candidate_id` is a fresh identifier for a member."""
        return OperationContext(
            now_ms=self.now_ms,
            api_version=self.api_version,
            client_id=self.client_id,
            client_host=self.client_host,
            candidate_id=candidate_id,
            token=next(_tokens),
        )


def internal_operation_context(now_ms: int) -> OperationContext:
    """The context of an operation that no client asked for."""
    return OperationContext(now_ms=now_ms, token=next(_tokens))
