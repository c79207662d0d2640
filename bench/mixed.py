# SPDX-License-Identifier: Apache-2.0
"""The mixed load: each member sends one heartbeat and one commit of 10 partitions per 5 s.

Each member has a connection of its own, up to MOST_CONNECTIONS. Requests do not wait for responses, so nearly every
request arrives alone. The echo gets the same frames at the same intervals, in alternating rounds of one cycle: on a
busy machine, figures of different minutes cannot be compared.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import uvloop

from bench.report import Report
from bench.requests import SETTINGS, commit, create_topics, join
from bench.wire import Broker, Connection, Echo, Server
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    OffsetCommitResponse,
)

SIZES: Final = (2_000, 10_000)
CYCLE_SECONDS: Final = 5.0
ROUNDS: Final = 5
MOST_CONNECTIONS: Final = 8_000
MOST_FRAME_BYTES: Final = 1 << 20
_LAST_ANSWERS_SECONDS: Final = 10.0
HEARTBEAT, COMMIT = (ApiKey.CONSUMER_GROUP_HEARTBEAT, 1), (ApiKey.OFFSET_COMMIT, 9)


class Outcome(NamedTuple):
    """The cores that the server used in the median round, and percentiles of all response latencies in ms."""

    cores: float
    p50_ms: float
    p99_ms: float


def main(report: Report) -> None:
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    table = report.table(
        "mixed load, kcoord.log.flush.policy=os",
        *("members", "requests per s", "cores", "echo cores", "ratio"),
        *("p50 ms", "p99 ms", "echo p50 ms", "echo p99 ms"),
    )
    for members in SIZES:
        with (
            tempfile.TemporaryDirectory() as folder,
            Echo() as echo,
            Broker(Path(folder), "kcoord.log.flush.policy=os", *SETTINGS) as broker,
        ):
            frames = requests(broker, members)
            measured, echoed = uvloop.run(_measure((broker, echo), frames))
            check_answers(broker, frames)
        cores = (measured.cores, echoed.cores, measured.cores / echoed.cores)
        table.row(members, round(2 * members / CYCLE_SECONDS), *cores, *measured[1:], *echoed[1:])


def requests(broker: Broker, members: int) -> list[tuple[bytes, bytes]]:
    """Creates a group per member. Returns the heartbeat and the commit of each member."""
    connection = Connection(broker.port)
    connection.find_coordinator("g0")
    create_topics(connection, {"t": 10})
    frames = []
    for number in range(members):
        epoch = join(connection, f"g{number}")
        heartbeat = ConsumerGroupHeartbeatRequest(group_id=f"g{number}", member_id="m", member_epoch=epoch).encode(1)
        committed = commit(f"g{number}", "m", epoch, 10, 1000)
        frames.append(
            (encode_request(*HEARTBEAT, 0, "bench", heartbeat), encode_request(*COMMIT, 0, "bench", committed))
        )
    connection.close()
    return frames


def check_answers(broker: Broker, frames: list[tuple[bytes, bytes]]) -> None:
    """Sends the same requests once more, and checks that no response has an error."""
    connection = Connection(broker.port)
    for heartbeat, committed in frames:
        connection.send(heartbeat + committed)
        frame = connection.receive()
        beat = ConsumerGroupHeartbeatResponse.decode(frame[decode_response_header(frame, *HEARTBEAT)[1] :], 1)
        frame = connection.receive()
        done = OffsetCommitResponse.decode(frame[decode_response_header(frame, *COMMIT)[1] :], 9)
        codes = {beat.error_code, *(partition.error_code for topic in done.topics for partition in topic.partitions)}
        assert codes == {0}, (beat, done)
    connection.close()


async def _measure(servers: Sequence[Server], frames: list[tuple[bytes, bytes]]) -> list[Outcome]:
    """Returns the outcome of each server. Each has one cycle before the first round, because members are new in it."""
    loads = [await _Load.to(server, frames) for server in servers]
    for load in loads:
        await load.drive(CYCLE_SECONDS, measured=False)
    for number in range(ROUNDS):
        for load in loads if number % 2 else reversed(loads):
            await load.drive(CYCLE_SECONDS, measured=True)
    return [load.outcome() for load in loads]


class _Load:
    """The clients of one server.

    Member n of N sends its heartbeat at n/N of the cycle, and its commit half a cycle later.
    """

    def __init__(self, server: Server, clients: list[_Client], frames: list[tuple[bytes, bytes]]) -> None:
        self._server = server
        self._clients = clients
        half = len(frames) // 2
        self._order = [
            (clients[member % len(clients)], frames[member][kind])
            for number in range(len(frames))
            for member, kind in ((number, 0), ((number + half) % len(frames), 1))
        ]
        self._cores: list[float] = []

    @classmethod
    async def to(cls, server: Server, frames: list[tuple[bytes, bytes]]) -> _Load:
        loop = asyncio.get_running_loop()
        clients: list[_Client] = []
        while len(clients) < min(len(frames), MOST_CONNECTIONS):
            _, client = await loop.create_connection(_Client, "127.0.0.1", server.port)
            clients.append(client)
        return cls(server, clients, frames)

    async def drive(self, seconds: float, *, measured: bool) -> None:
        """Sends the requests of `seconds`, and waits for their responses."""
        loop = asyncio.get_running_loop()
        gap = CYCLE_SECONDS / len(self._order)
        began, cpu, sent = loop.time(), self._server.cpu_seconds(), 0
        while (now := loop.time()) < began + seconds:
            while began + sent * gap <= now:
                client, frame = self._order[sent % len(self._order)]
                client.send(frame, measured=measured)
                sent += 1
            await asyncio.sleep(began + sent * gap - now)
        if measured:
            self._cores.append((self._server.cpu_seconds() - cpu) / (loop.time() - began))
        deadline = loop.time() + _LAST_ANSWERS_SECONDS
        while any(client.waiting for client in self._clients):
            assert loop.time() < deadline, "a response is missing"
            await asyncio.sleep(0.01)

    def outcome(self) -> Outcome:
        """Closes the connections."""
        latencies = sorted(latency for client in self._clients for latency in client.latencies)
        for client in self._clients:
            client.close()
        p50, p99 = (latencies[len(latencies) * share // 100] * 1000 for share in (50, 99))
        return Outcome(statistics.median(self._cores), p50, p99)


class _Client(asyncio.Protocol):
    """One connection, which measures the latency of its responses."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self.waiting: deque[float | None] = deque()
        """The send time of each pending request; None if its latency is not measured."""
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MOST_FRAME_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, frame: bytes, *, measured: bool) -> None:
        assert self._transport is not None
        self.waiting.append(time.perf_counter() if measured else None)
        self._transport.write(frame)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        for _ in self._reader.feed(data):
            sent = self.waiting.popleft()
            if sent is not None:
                self.latencies.append(now - sent)

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
