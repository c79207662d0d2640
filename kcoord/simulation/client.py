# SPDX-License-Identifier: Apache-2.0
"""What all model clients do alike: one request at a time, and a new connection where the answer does not come.

`ModelClient` is the protocol for consumer logic from elsewhere: see `docs/simulation.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kcoord.simulation.clock import Clock
from kcoord.simulation.network import Network, Request
from kcoord.simulation.options import Options
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import Message

RETRIABLE = frozenset({Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE})
"""Answers after which a client asks again a little later: it does not know whether the request took effect."""
RETRY_MS = 100


class ModelClient(Protocol):
    """A client that the simulation drives. It lives in virtual time: it acts when it is started, when one of its timers
    fires, or when an answer arrives, and never by itself.
    """

    def start(self) -> None:
        """The simulation begins; requests may be sent from now on."""

    def settle(self) -> None:
        """Faults are over: what the client does from here on has to succeed."""

    def is_settled(self) -> bool:
        """Whether the client has reached what it wants; asked after every step once faults are over."""


@dataclass(slots=True)
class _InFlight:
    correlation_id: int
    on_answer: Callable[[bytes], None]


class Client(ABC):
    """Subclasses call `request` and get their callback, or `on_timeout`, and never both."""

    def __init__(self, name: str, clock: Clock, random: Random, network: Network, options: Options) -> None:
        self.name = name
        self.clock = clock
        self.random = random
        self.options = options
        self._network = network
        self._correlation_id = 0
        self._in_flight: _InFlight | None = None
        self._repeated: _InFlight | None = None
        self.answers_to_come = 0
        """More than 0 once a request was answered that was sent twice: the second one may still do something."""
        self._connection = network.connect(name, self._on_response)

    @property
    def is_waiting(self) -> bool:
        return self._in_flight is not None

    def request(
        self,
        api_key: ApiKey,
        version: int,
        group_id: str,
        message: Message,
        on_answer: Callable[[bytes], None],
        *,
        hears_both: bool = False,
        timeout_ms: int | None = None,
    ) -> None:
        """`hears_both`: where the request was sent twice, each answer counts, because it may bring something new."""
        assert self._in_flight is None, "one request at a time"
        self._correlation_id += 1
        correlation_id = self._correlation_id
        self._in_flight = _InFlight(correlation_id, on_answer)
        if hears_both:
            self._repeated = self._in_flight
        request = Request(self._connection, correlation_id, api_key, version, group_id, message.encode(version))
        self.answers_to_come = self._network.send(request)
        patience_ms = self.options.request_timeout_ms if timeout_ms is None else timeout_ms
        self.clock.after(patience_ms, lambda: self._expire(correlation_id))

    def reconnect(self) -> None:
        """Nothing that is under way on the old connection arrives any more, in either direction."""
        self._connection.close()
        self._connection = self._network.connect(self.name, self._on_response)
        self._in_flight = self._repeated = None

    def forget(self) -> None:
        """No answer is of interest any more; what was sent may still arrive."""
        self._in_flight = self._repeated = None

    @abstractmethod
    def on_timeout(self) -> None:
        """The answer did not come; the connection is a new one."""

    def unexpected(self, error: int, text: str | None) -> ViolationError:
        """A client that obeys the protocol is never told this."""
        return ViolationError("I-0 no unexpected error", f"{self.name} got {Errors(error).name}: {text}")

    def _on_response(self, correlation_id: int, body: bytes) -> None:
        in_flight, repeated = self._in_flight, self._repeated
        if in_flight is not None and in_flight.correlation_id == correlation_id:
            self._in_flight = None
            self.answers_to_come -= 1
            in_flight.on_answer(body)
        elif repeated is not None and repeated.correlation_id == correlation_id:
            self.answers_to_come = 0
            repeated.on_answer(body)
        elif correlation_id > self._correlation_id:
            raise ViolationError("I-27 answers come in order", f"{self.name} was answered {correlation_id}")

    def _expire(self, correlation_id: int) -> None:
        if self._in_flight is not None and self._in_flight.correlation_id == correlation_id:
            self.reconnect()
            self.on_timeout()
