# SPDX-License-Identifier: Apache-2.0
"""What a handler knows about one request besides its body."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import OperationContext
from kcoord_protocol.api_keys import ApiKey

if TYPE_CHECKING:
    from kcoord.server.observe.client_telemetry import ClientFacts

_tokens = itertools.count(1)


class Client:
    """What a connection knows about its client.

    `form` is the form of KIP-1327 that the client is served. `has_begun` is True after its first request that is
    answered; `begins_with_api_versions` says that this was ApiVersions.
    """

    __slots__ = (
        "address",
        "begins_with_api_versions",
        "facts",
        "form",
        "has_begun",
        "remote_host",
        "remote_port",
        "software",
    )

    def __init__(self, form: Kip1327Form, remote_host: str = "", remote_port: int = 0) -> None:
        self.form = form
        self.software = ("", "")
        self.has_begun = False
        self.begins_with_api_versions = False
        self.facts: ClientFacts | None = None
        self.locate(remote_host, remote_port)

    def locate(self, remote_host: str, remote_port: int) -> None:
        """Sets where the client is; `address` is the host in the form that groups describe."""
        self.remote_host = remote_host
        self.remote_port = remote_port
        self.address = f"/{remote_host}"

    def identify(self, software_name: str, software_version: str, form: Kip1327Form) -> None:
        """The client has named its software in ApiVersions, perhaps not for the first time."""
        self.software = (software_name, software_version)
        self.form = form
        if not self.has_begun:
            self.has_begun = self.begins_with_api_versions = True


class RequestContext:
    """The facts about one request: from where, by whom, when, in which version."""

    __slots__ = (
        "api_key",
        "api_version",
        "client",
        "client_host",
        "client_id",
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
        client: Client | None = None,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.listener_name = listener_name
        self.principal = principal
        self.now_ms = now_ms
        self.client = client

    def client_facts(self) -> ClientFacts:
        """What is known about the client of the connection; the same object as long as that lasts."""
        from kcoord.server.observe.client_telemetry import ClientFacts

        client = self.client
        if client is None:
            return ClientFacts(client_id=self.client_id)
        if client.facts is None:
            name, version = client.software
            client.facts = ClientFacts(self.client_id, name, version, client.remote_host, client.remote_port)
        return client.facts

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
