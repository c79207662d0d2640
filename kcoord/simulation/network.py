# SPDX-License-Identifier: Apache-2.0
"""Connections that keep order and fail as a whole, as TCP's do.

A dropped message takes everything after it on its connection along; the client finds out by its timeout and connects
anew. A duplicated request is one that the client sent twice in a row; a held-up one arrives much later than its
client's patience lasts. A client can be cut off in one direction, and its link can be slow, down to a byte per
second; one that reads slowly is slow in one direction. Requests and responses travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kcoord.simulation.clock import Clock
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace
from kcoord_protocol.api_keys import ApiKey

_LONGEST_HOLD_UP_MS = 6_000


@dataclass(slots=True)
class Request:
    """A request on its way. `group_id` is there for routing: a real broker reads it from the body."""

    connection: Connection
    correlation_id: int
    api_key: ApiKey
    api_version: int
    group_id: str
    body: bytes


class Connection:
    """One connection of one client. `on_response` gets correlation id and body; nothing arrives after `close`."""

    __slots__ = ("_to_broker_ms", "_to_client_ms", "client_id", "is_open", "number", "on_response")

    def __init__(self, number: int, client_id: str, on_response: Callable[[int, bytes], None]) -> None:
        self.number = number
        self.client_id = client_id
        self.on_response = on_response
        self.is_open = True
        self._to_broker_ms = 0
        self._to_client_ms = 0

    def close(self) -> None:
        self.is_open = False

    def arrival_at_broker_ms(self, at_ms: int) -> int:
        """No message overtakes an earlier one."""
        self._to_broker_ms = max(self._to_broker_ms, at_ms)
        return self._to_broker_ms

    def arrival_at_client_ms(self, at_ms: int) -> int:
        self._to_client_ms = max(self._to_client_ms, at_ms)
        return self._to_client_ms


class Network:
    """Delivers, delays, drops and duplicates. `broker` is whoever takes the requests."""

    def __init__(self, clock: Clock, random: Random, options: Options, trace: Trace) -> None:
        self.faults_on = True
        self.broker: Callable[[Request], None] = lambda request: None
        self._clock = clock
        self._random = random
        self._options = options
        self._trace = trace
        self._connections = 0
        self._cut_off: dict[str, tuple[int, bool, bool]] = {}
        self._slow: dict[str, tuple[int, int, bool]] = {}
        self._open: dict[int, Connection] = {}

    def connect(self, client_id: str, on_response: Callable[[int, bytes], None]) -> Connection:
        self._connections += 1
        connection = self._open[self._connections] = Connection(self._connections, client_id, on_response)
        return connection

    def cut_off(self, client_id: str, until_ms: int, *, requests: bool, responses: bool) -> None:
        """What the client sends, or what is sent to it, gets lost until then; connections stay half open."""
        self._trace.add("cut-off", f"{client_id} {requests} {responses}")
        self._cut_off[client_id] = until_ms, requests, responses

    def slow_down(self, client_id: str, until_ms: int, bytes_per_s: int, *, reads_only: bool) -> None:
        """All that the client receives, and mostly what it sends, takes its time by its size until then."""
        self._trace.add("slow-reader" if reads_only else "slow-link", f"{client_id} {bytes_per_s}")
        self._slow[client_id] = until_ms, bytes_per_s, reads_only

    def reset_all(self) -> None:
        """All connections break at once, and all clients come back at once."""
        self._trace.add("reset-all")
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def send(self, request: Request) -> int:
        """Returns how many times it was sent."""
        connection = request.connection
        if not connection.is_open or self._is_cut_off(connection.client_id, is_request=True):
            return 1
        copies = 2 if self._happens(self._options.duplicate_probability, "duplicate", connection) else 1
        for _ in range(copies):
            if self._happens(self._options.drop_probability, "drop", connection):
                self._close(connection)
                return copies
            at_ms = self._arrival_ms() + self._transfer_ms(connection.client_id, len(request.body), is_request=True)
            if self._happens(self._options.delay_probability, "hold-up", connection):
                at_ms += self._random.randint(0, _LONGEST_HOLD_UP_MS)
            self._clock.at(connection.arrival_at_broker_ms(at_ms), lambda: self._arrive(request))
        return copies

    def respond(self, request: Request, body: bytes) -> None:
        connection = request.connection
        if not connection.is_open or self._is_cut_off(connection.client_id, is_request=False):
            return
        if self._happens(self._options.drop_probability, "drop-response", connection):
            self._close(connection)
            return

        def deliver() -> None:
            if connection.is_open:
                connection.on_response(request.correlation_id, body)

        at_ms = self._arrival_ms() + self._transfer_ms(connection.client_id, len(body), is_request=False)
        self._clock.at(connection.arrival_at_client_ms(at_ms), deliver)

    def _close(self, connection: Connection) -> None:
        connection.close()
        self._open.pop(connection.number, None)

    def _arrive(self, request: Request) -> None:
        if request.connection.is_open:
            self.broker(request)

    def _is_cut_off(self, client_id: str, *, is_request: bool) -> bool:
        until_ms, requests, responses = self._cut_off.get(client_id, (0, False, False))
        return self.faults_on and self._clock.now_ms < until_ms and (requests if is_request else responses)

    def _transfer_ms(self, client_id: str, size: int, *, is_request: bool) -> int:
        until_ms, bytes_per_s, reads_only = self._slow.get(client_id, (0, 1, False))
        if not self.faults_on or self._clock.now_ms >= until_ms or (is_request and reads_only):
            return 0
        return size * 1000 // bytes_per_s

    def _arrival_ms(self) -> int:
        delay_ms = self._options.network_delay_ms if self.faults_on else 1
        return self._clock.now_ms + self._random.randint(1, max(delay_ms, 1))

    def _happens(self, probability: float, kind: str, connection: Connection) -> bool:
        if not self.faults_on or not probability or self._random.random() >= probability:
            return False
        self._trace.add(kind, f"{connection.client_id}#{connection.number}")
        return True
