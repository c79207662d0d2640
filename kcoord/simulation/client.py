# SPDX-License-Identifier: Apache-2.0
"""The base of all model clients: requests, responses, timeouts and reconnects in virtual time.

`ModelClient` is the protocol for a user's own client: see `docs/simulation.md`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.network import Network
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import Message

RETRIABLE = frozenset({Errors.COORDINATOR_LOAD_IN_PROGRESS, Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE})
"""Errors after which a client retries a little later. It cannot know whether the request took effect."""
RETRY_MS = 100


class ModelClient(Protocol):
    """A client that the simulation drives in virtual time.

    It acts only in `start` and `settle`, when one of its timers fires, and when a response arrives.
    """

    def start(self) -> None:
        """Called when the simulation begins: the client may send requests from now on."""

    def settle(self) -> None:
        """Called when the faults end: requests from now on have to succeed."""

    def is_settled(self) -> bool:
        """True if the client has reached its goal. Called after every step once the faults have ended."""


@dataclass(frozen=True, slots=True)
class Scene:
    """The parts of a run that all clients share. `stream` returns the random generator of a client, by its name."""

    clock: VirtualClock
    network: Network
    options: Options
    trace: Trace
    stream: Callable[[str], Random]


@dataclass(slots=True, eq=False)
class _Sent:
    """A request that was sent. `on_answer` is None once the client ignores its response."""

    correlation_id: int
    api_key: ApiKey
    version: int
    on_answer: Callable[[bytes], None] | None
    hears_both: bool
    copies: int = 0
    """Number of responses that may still arrive."""
    is_answered: bool = False

    @property
    def is_waited_for(self) -> bool:
        return self.on_answer is not None and not self.is_answered


class SimulatedClient(ABC):
    """A client with one connection at a time.

    For each `request` a subclass gets either its callback or `on_timeout`, never both. A subclass that sends several
    requests without waiting gets its responses in the order of the requests, and a single `on_timeout`.
    """

    def __init__(self, name: str, scene: Scene, random: Random | None = None) -> None:
        self.name = name
        self.client_id = name
        """The client id in the headers of requests."""
        self.clock = scene.clock
        self.random = random if random is not None else scene.stream(name)
        self.options = scene.options
        self._network = scene.network
        self._correlation_id = 0
        self._sent: deque[_Sent] = deque()
        self._connection = self._network.connect(name, self._on_data)

    @property
    def is_waiting(self) -> bool:
        return any(sent.is_waited_for for sent in self._sent)

    @property
    def answers_to_come(self) -> int:
        """Number of responses that may still arrive to requests with `hears_both`.

        Above 0 after the first response to a duplicated request: the second copy may still take effect.
        """
        return sum(sent.copies for sent in self._sent if sent.hears_both)

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
    ) -> int:
        """Sends a request. Returns how many copies the network sent: 1 or 2.

        `hears_both`: if the request is duplicated, `on_answer` is called for both responses, because the second may
        contain something new. The default of `timeout_ms` is the option `request_timeout_ms`.
        """
        self._correlation_id += 1
        correlation_id = self._correlation_id
        sent = _Sent(correlation_id, api_key, version, on_answer, hears_both)
        self._sent.append(sent)
        data = encode_request(api_key, version, correlation_id, self.client_id, message.encode(version))
        sent.copies = self._network.send(self._connection, data)
        patience_ms = self.options.request_timeout_ms if timeout_ms is None else timeout_ms
        self.clock.after(patience_ms, lambda: self._expire(sent))
        return sent.copies

    def reconnect(self) -> None:
        """Opens another connection. Messages under way on the old one are lost in both directions."""
        self._connection.close()
        self._connection = self._network.connect(self.name, self._on_data)
        self._sent.clear()

    def forget(self) -> None:
        """Ignores all responses that are still to come. Requests that were sent may still arrive."""
        for sent in self._sent:
            sent.on_answer = None

    @abstractmethod
    def on_timeout(self) -> None:
        """Called when a response did not arrive in time. The client has already reconnected."""

    def unexpected(self, error: int, text: str | None) -> ViolationError:
        """Returns the violation for an error that a client that obeys the protocol never gets."""
        return ViolationError("I-0 no unexpected error", f"{self.name} got {Errors(error).name}: {text}")

    def _on_data(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            end = position + 4 + int.from_bytes(data[position : position + 4], "big")
            self._on_response(data[position + 4 : end])
            position = end

    def _on_response(self, frame: bytes) -> None:
        """Takes one response. Responses have the order of the requests; a duplicated request has two."""
        correlation_id = int.from_bytes(frame[:4], "big")
        while self._sent and self._sent[0].is_answered and self._sent[0].correlation_id < correlation_id:
            self._sent.popleft()
        sent = self._sent[0] if self._sent else None
        if sent is None or sent.correlation_id != correlation_id:
            text = f"{self.name} got a response to request {correlation_id}, not to {sent and sent.correlation_id}"
            raise ViolationError("I-27 answers come in order", text)
        on_answer = sent.on_answer if sent.hears_both or not sent.is_answered else None
        sent.is_answered = True
        sent.copies -= 1
        if on_answer is not None:
            on_answer(frame[decode_response_header(frame, sent.api_key, sent.version)[1] :])

    def _expire(self, sent: _Sent) -> None:
        # `reconnect` clears the queue: requests of an earlier connection no longer time out.
        if sent.is_waited_for and sent in self._sent:
            self.reconnect()
            self.on_timeout()
