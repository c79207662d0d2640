# SPDX-License-Identifier: Apache-2.0
"""The interface through which a worker sends requests to other workers."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import Message


class PeerCalls(Protocol):
    """Sends requests to other workers."""

    def ask(
        self, broker_id: int, request: Message, version: int, *, client_id: str = "", client_host: str = ""
    ) -> asyncio.Future[Message]:
        """Sends a request and returns the future of its response.

        Without a response the call raises KafkaError, or the future ends with it.
        """


class NoPeers:
    """The peers of the only worker: there are none, so every request fails with BROKER_NOT_AVAILABLE."""

    def ask(
        self, broker_id: int, request: Message, version: int, *, client_id: str = "", client_host: str = ""
    ) -> asyncio.Future[Message]:
        raise KafkaError(Errors.BROKER_NOT_AVAILABLE, f"There is no broker {broker_id}.")
