# SPDX-License-Identifier: Apache-2.0
"""Fast paths of a broker with an authorizer: what one has learned holds for one authorizer and one principal.

A change of ACLs makes a new authorizer. The next request on each connection then meets a fast path that knows nothing,
and takes the general path, which checks the client's rights. A fast path that learns after the handler learns only what
the handler has allowed; one that learns before the handler checks `Exchange.rights` itself.

If the audit log has each permission (DEBUG), every request is checked again, so that none is missing there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from kcoord.server.api.api_table import Client, Exchange
from kcoord.server.api.authorization import audit_logger
from kcoord.server.fast.fast_path import FastPath, FastResponse

if TYPE_CHECKING:
    from kcoord.security.authorizer import Authorizer
    from kcoord.server.broker import Broker


class GuardedFastPath(FastPath):
    """Has a fast path, and replaces it by a new one when its authorizer or principal is no longer the current one."""

    __slots__ = ("_authorizer", "_broker", "_client", "_new_path", "_path", "_principal", "learns_before_handler")

    def __init__(self, new_path: Callable[[], FastPath], broker: Broker, client: Client) -> None:
        self._new_path = new_path
        self._path = new_path()
        self._broker = broker
        self._client = client
        self._authorizer: Authorizer | None = None
        self._principal = ""
        self.learns_before_handler = self._path.learns_before_handler

    def respond(self, frame: bytes, now_ms: int) -> FastResponse:
        if self._broker.authorizer is not self._authorizer or self._client.principal is not self._principal:
            self._authorizer, self._principal = self._broker.authorizer, self._client.principal
            self._path = self._new_path()
            return None
        if audit_logger.isEnabledFor(logging.DEBUG):
            return None
        return self._path.respond(frame, now_ms)

    def learn(self, exchange: Exchange, now_ms: int) -> FastResponse:
        return self._path.learn(exchange, now_ms)
