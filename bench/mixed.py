# SPDX-License-Identifier: Apache-2.0
"""The mixed load: each member sends one heartbeat and one commit of 10 partitions per 5 s.

Each member has a connection of its own, up to MOST_CONNECTIONS. Requests do not wait for responses, so nearly every
request arrives alone. The echo gets the same frames at the same times, since most of a request's cost here is that it
arrives alone.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
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
SECONDS: Final = 10.0
MOST_CONNECTIONS: Final = 8_000
MOST_FRAME_BYTES: Final = 1 << 20
HEARTBEAT, COMMIT = (ApiKey.CONSUMER_GROUP_HEARTBEAT, 1), (ApiKey.OFFSET_COMMIT, 9)
_LAST_ANSWERS_SECONDS: Final = 10.0


class Outcome(NamedTuple):
    """The cores that the server used in the measured time, and percentiles of the response latencies in ms."""

    cores: float
    p50_ms: float
    p99_ms: float


def main(report: Report) -> None:
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
            measured, echoed = (uvloop.run(_drive(server, frames)) for server in (broker, echo))
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


async def _drive(server: Server, frames: list[tuple[bytes, bytes]]) -> Outcome:
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    while len(clients) < min(len(frames), MOST_CONNECTIONS):
        _, client = await loop.create_connection(_Client, "127.0.0.1", server.port)
        clients.append(client)
    half = len(frames) // 2
    # Member n of N sends its heartbeat at n/N of the cycle, and its commit half a cycle later.
    order = [
        (clients[member % len(clients)], frames[member][kind])
        for number in range(len(frames))
        for member, kind in ((number, 0), ((number + half) % len(frames), 1))
    ]
    gap = CYCLE_SECONDS / len(order)
    began = loop.time()
    measured_from, ends = began + CYCLE_SECONDS, began + CYCLE_SECONDS + SECONDS
    sent, cpu = 0, None
    while (now := loop.time()) < ends:
        if cpu is None and now >= measured_from:
            cpu = server.cpu_seconds()
        while began + sent * gap <= now:
            client, frame = order[sent % len(order)]
            client.send(frame, measured=cpu is not None)
            sent += 1
        await asyncio.sleep(began + sent * gap - now)
    assert cpu is not None
    cores = (server.cpu_seconds() - cpu) / (loop.time() - measured_from)
    deadline = loop.time() + _LAST_ANSWERS_SECONDS
    while any(client.waiting for client in clients):
        assert loop.time() < deadline, "a response is missing"
        await asyncio.sleep(0.01)
    latencies = sorted(latency for client in clients for latency in client.latencies)
    for client in clients:
        client.close()
    p50, p99 = (latencies[len(latencies) * share // 100] * 1000 for share in (50, 99))
    return Outcome(cores, p50, p99)


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
