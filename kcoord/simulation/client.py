# SPDX-License-Identifier: Apache-2.0
"""What all model clients do alike: one request at a time, and a new connection where the answer does not come.

`ModelClient` is the protocol for consumer logic from elsewhere: see `docs/simulation.md`.
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


@dataclass(frozen=True, slots=True)
class Scene:
    """What all clients of a run share. `stream` makes a random stream of a client's own, by its name."""

    clock: VirtualClock
    network: Network
    options: Options
    trace: Trace
    stream: Callable[[str], Random]


@dataclass(slots=True, eq=False)
class _Sent:
    """A request; `on_answer` is None where no answer is of interest any more."""

    correlation_id: int
    api_key: ApiKey
    version: int
    on_answer: Callable[[bytes], None] | None
    hears_both: bool
    copies: int = 0
    """Answers that may still come."""
    is_answered: bool = False

    @property
    def is_waited_for(self) -> bool:
        return self.on_answer is not None and not self.is_answered


class SimulatedClient(ABC):
    """Subclasses call `request` and get their callback, or `on_timeout`, and never both. Most wait for an answer before
    they ask again; one that does not gets its answers in the order in which it asked, and a single `on_timeout`.
    """

    def __init__(self, name: str, scene: Scene, random: Random | None = None) -> None:
        self.name = name
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
        """More than 0 once a request was answered that was sent twice: the second one may still do something."""
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
        """Sends a request about a group; returns how many times. `hears_both`: where it is sent twice, each answer
        counts, because it may bring something new.
        """
        self._correlation_id += 1
        correlation_id = self._correlation_id
        sent = _Sent(correlation_id, api_key, version, on_answer, hears_both)
        self._sent.append(sent)
        data = encode_request(api_key, version, correlation_id, self.name, message.encode(version))
        sent.copies = self._network.send(self._connection, data)
        patience_ms = self.options.request_timeout_ms if timeout_ms is None else timeout_ms
        self.clock.after(patience_ms, lambda: self._expire(sent))
        return sent.copies

    def reconnect(self) -> None:
        """Nothing that is under way on the old connection arrives any more, in either direction."""
        self._connection.close()
        self._connection = self._network.connect(self.name, self._on_data)
        self._sent.clear()

    def forget(self) -> None:
        """No answer is of interest any more; what was sent may still arrive."""
        for sent in self._sent:
            sent.on_answer = None

    @abstractmethod
    def on_timeout(self) -> None:
        """The answer did not come; the connection is a new one."""

    def unexpected(self, error: int, text: str | None) -> ViolationError:
        """A client that obeys the protocol is never told this."""
        return ViolationError("I-0 no unexpected error", f"{self.name} got {Errors(error).name}: {text}")

    def _on_data(self, data: bytes) -> None:
        position = 0
        while position < len(data):
            end = position + 4 + int.from_bytes(data[position : position + 4], "big")
            self._on_response(data[position + 4 : end])
            position = end

    def _on_response(self, frame: bytes) -> None:
        """Answers come in the order of the requests; where one was sent twice, both are answered."""
        correlation_id = int.from_bytes(frame[:4], "big")
        while self._sent and self._sent[0].is_answered and self._sent[0].correlation_id < correlation_id:
            self._sent.popleft()
        sent = self._sent[0] if self._sent else None
        if sent is None or sent.correlation_id != correlation_id:
            text = f"{self.name} was answered {correlation_id} instead of {sent and sent.correlation_id}"
            raise ViolationError("I-27 answers come in order", text)
        on_answer = sent.on_answer if sent.hears_both or not sent.is_answered else None
        sent.is_answered = True
        sent.copies -= 1
        if on_answer is not None:
            on_answer(frame[decode_response_header(frame, sent.api_key, sent.version)[1] :])

    def _expire(self, sent: _Sent) -> None:
        if sent.is_waited_for and any(one is sent for one in self._sent):
            self.reconnect()
            self.on_timeout()
