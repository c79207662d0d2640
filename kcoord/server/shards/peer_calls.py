# SPDX-License-Identifier: Apache-2.0
"""How a worker asks the others; where there is one worker, nobody can be asked."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import Message


class PeerCalls(Protocol):
    """Requests to other workers; a KafkaError where there is no answer."""

    def ask(
        self, broker_id: int, request: Message, version: int, *, client_id: str = "", client_host: str = ""
    ) -> asyncio.Future[Message]: ...


class NoPeers:
    """Where there is one worker, nobody else can be asked."""

    def ask(
        self, broker_id: int, request: Message, version: int, *, client_id: str = "", client_host: str = ""
    ) -> asyncio.Future[Message]:
        raise KafkaError(Errors.BROKER_NOT_AVAILABLE, f"There is no broker {broker_id}.")
