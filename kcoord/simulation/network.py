# SPDX-License-Identifier: Apache-2.0
"""The network between clients and the broker: connections that keep order and fail as a whole, as TCP's do.

Messages are frames of the Kafka protocol. Faults of the network:

* A dropped message closes its connection: all later messages are lost, too. The client finds out by its timeout and
  opens another connection.
* A duplicated request arrives twice in a row, as if the client had sent it twice.
* A held-up request arrives up to six seconds later, often after its client's timeout.
* A client that is cut off loses its requests, its responses, or both, and neither side is notified.
* A slow link carries down to one byte per second, in both directions or (a slow reader) only to the client.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Protocol

from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace

_LONGEST_HOLD_UP_MS = 6_000


class SimulatedConnection:
    """One connection of one client. `on_data` receives what the broker writes; nothing arrives after `close`."""

    __slots__ = (
        "_network",
        "_to_broker_ms",
        "_to_client_ms",
        "accepted_by",
        "client_id",
        "is_open",
        "number",
        "on_data",
    )

    def __init__(self, network: Network, number: int, client_id: str, on_data: Callable[[bytes], None]) -> None:
        self._network = network
        self.number = number
        self.client_id = client_id
        self.on_data = on_data
        self.is_open = True
        self.accepted_by: object = None
        """The process that accepted the connection, if any; it may have ended since."""
        self._to_broker_ms = 0
        self._to_client_ms = 0

    def close(self) -> None:
        """Closes the connection. The broker is notified later, after all earlier messages."""
        if self.is_open:
            self._network.close(self)

    def arrival_at_broker_ms(self, at_ms: int) -> int:
        """Returns the arrival time of a message that would arrive at `at_ms`: never before an earlier message."""
        self._to_broker_ms = max(self._to_broker_ms, at_ms)
        return self._to_broker_ms

    def arrival_at_client_ms(self, at_ms: int) -> int:
        self._to_client_ms = max(self._to_client_ms, at_ms)
        return self._to_client_ms


class BrokerSide(Protocol):
    """The receiver of the clients' messages."""

    def receive(self, connection: SimulatedConnection, data: bytes) -> None: ...

    def hang_up(self, connection: SimulatedConnection) -> None:
        """The client has closed the connection."""


class Network:
    """Delivers, delays, drops and duplicates messages. `broker` has to be set before the first connection."""

    broker: BrokerSide

    def __init__(self, clock: VirtualClock, random: Random, options: Options, trace: Trace) -> None:
        self.faults_on = True
        self._clock = clock
        self._random = random
        self._options = options
        self._trace = trace
        self._connections = 0
        self._cut_off: dict[str, tuple[int, bool, bool]] = {}
        self._slow: dict[str, tuple[int, int, bool]] = {}
        self._open: dict[int, SimulatedConnection] = {}

    def connect(self, client_id: str, on_data: Callable[[bytes], None]) -> SimulatedConnection:
        self._connections += 1
        connection = self._open[self._connections] = SimulatedConnection(self, self._connections, client_id, on_data)
        return connection

    def cut_off(self, client_id: str, until_ms: int, *, requests: bool, responses: bool) -> None:
        """Loses the client's requests, its responses, or both until `until_ms`; neither side is notified."""
        self._trace.add("cut-off", f"{client_id} {requests} {responses}")
        self._cut_off[client_id] = until_ms, requests, responses

    def slow_down(self, client_id: str, until_ms: int, bytes_per_s: int, *, reads_only: bool) -> None:
        """Delays messages by their size until `until_ms`: responses, and requests unless `reads_only`."""
        self._trace.add("slow-reader" if reads_only else "slow-link", f"{client_id} {bytes_per_s}")
        self._slow[client_id] = until_ms, bytes_per_s, reads_only

    def reset_all(self) -> None:
        """Closes all connections at once, so that all clients reconnect together."""
        self._trace.add("reset-all")
        for connection in list(self._open.values()):
            self.close(connection)

    def send(self, connection: SimulatedConnection, data: bytes) -> int:
        """Sends a request. Returns how many copies were sent: 1 or 2."""
        if self._is_lost(connection, is_request=True):
            return 1
        copies = 2 if self._happens(self._options.duplicate_probability, "duplicate", connection) else 1
        for _ in range(copies):
            if self._happens(self._options.drop_probability, "drop", connection):
                self.close(connection)
                return copies
            at_ms = self._arrival_ms() + self._transfer_ms(connection.client_id, len(data), is_request=True)
            if self._happens(self._options.delay_probability, "hold-up", connection):
                at_ms += self._random.randint(0, _LONGEST_HOLD_UP_MS)
            self._clock.at(connection.arrival_at_broker_ms(at_ms), lambda: self._arrive(connection, data))
        return copies

    def respond(self, connection: SimulatedConnection, data: bytes) -> None:
        if self._is_lost(connection, is_request=False):
            return
        if self._happens(self._options.drop_probability, "drop-response", connection):
            self.close(connection)
            return

        def deliver() -> None:
            if connection.is_open:
                connection.on_data(data)

        at_ms = self._arrival_ms() + self._transfer_ms(connection.client_id, len(data), is_request=False)
        self._clock.at(connection.arrival_at_client_ms(at_ms), deliver)

    def close(self, connection: SimulatedConnection) -> None:
        """Closes the connection: messages under way are lost in both directions, and the broker is notified later."""
        self.lose(connection)
        self._clock.at(connection.arrival_at_broker_ms(self._arrival_ms()), lambda: self.broker.hang_up(connection))

    def lose(self, connection: SimulatedConnection) -> None:
        """Loses all messages of the connection from now on, without notice to either side."""
        connection.is_open = False
        self._open.pop(connection.number, None)

    def _arrive(self, connection: SimulatedConnection, data: bytes) -> None:
        if connection.is_open:
            self.broker.receive(connection, data)

    def _is_lost(self, connection: SimulatedConnection, *, is_request: bool) -> bool:
        """True if the message is lost because its client is cut off; the rest of the connection is lost with it."""
        until_ms, requests, responses = self._cut_off.get(connection.client_id, (0, False, False))
        if self.faults_on and self._clock.now_ms < until_ms and (requests if is_request else responses):
            self.lose(connection)
        return not connection.is_open

    def _transfer_ms(self, client_id: str, size: int, *, is_request: bool) -> int:
        until_ms, bytes_per_s, reads_only = self._slow.get(client_id, (0, 1, False))
        if not self.faults_on or self._clock.now_ms >= until_ms or (is_request and reads_only):
            return 0
        return size * 1000 // bytes_per_s

    def _arrival_ms(self) -> int:
        delay_ms = self._options.network_delay_ms if self.faults_on else 1
        return self._clock.now_ms + self._random.randint(1, max(delay_ms, 1))

    def _happens(self, probability: float, kind: str, connection: SimulatedConnection) -> bool:
        if not self.faults_on or not probability or self._random.random() >= probability:
            return False
        self._trace.add(kind, f"{connection.client_id}#{connection.number}")
        return True
