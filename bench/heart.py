# SPDX-License-Identifier: Apache-2.0
"""A steady load: 1,000 members in 50 groups, each with a connection of its own and one heartbeat a second.

The load runs in a process of its own, so that other work of the measurement delays none of its requests.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Final, NamedTuple, cast

import uvloop

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

MEMBERS: Final = 1_000
GROUPS: Final = 50
CYCLE_SECONDS: Final = 1.0
_SETTLED_CYCLES: Final = 3
_MOST_FRAME_BYTES: Final = 1 << 20
_KEY, _VERSION = ApiKey.CONSUMER_GROUP_HEARTBEAT, 1


class Beats(NamedTuple):
    """The latencies of the heartbeats between two calls."""

    p99_ms: float
    longest_ms: float


class Heart:
    """The load, which runs from the constructor until `close`."""

    def __init__(self, port: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other_end = spawn.Pipe()
        self._process = spawn.Process(target=_run, args=(port, other_end))
        self._process.start()
        self.take()

    def take(self) -> Beats:
        """Returns the heartbeats since the last call. The first call returns when all members are steady."""
        self._pipe.send(True)
        return cast("Beats", self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


def _run(port: int, pipe: Pipe) -> None:
    uvloop.run(_beat(port, pipe))


async def _beat(port: int, pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    members: list[_Member] = []
    for number in range(MEMBERS):
        _, member = await loop.create_connection(_new_member(number, latencies), "127.0.0.1", port)
        members.append(member)
    began, gap, sent = loop.time(), CYCLE_SECONDS / MEMBERS, 0
    has_ended = False

    def on_request() -> None:
        nonlocal has_ended
        try:
            has_ended = not pipe.recv()
        except EOFError:  # the measurement was killed
            has_ended = True
        if has_ended:
            return
        values = sorted(latencies) or [0.0]
        latencies.clear()
        pipe.send(Beats(values[len(values) * 99 // 100] * 1000, values[-1] * 1000))

    while not has_ended:
        while began + sent * gap <= loop.time():
            members[sent % MEMBERS].beat()
            sent += 1
            if sent == _SETTLED_CYCLES * MEMBERS:
                latencies.clear()
                loop.add_reader(pipe.fileno(), on_request)
        await asyncio.sleep(began + sent * gap - loop.time())
    loop.remove_reader(pipe.fileno())
    for member in members:
        member.close()


def _new_member(number: int, latencies: list[float]) -> Callable[[], _Member]:
    return lambda: _Member(f"heart-{number % GROUPS}", f"member-{number}", latencies)


class _Member(asyncio.Protocol):
    """One member. Its topic does not exist, so it never gets partitions."""

    def __init__(self, group_id: str, member_id: str, latencies: list[float]) -> None:
        self._group_id = group_id
        self._member_id = member_id
        self._latencies = latencies
        self._epoch = 0
        self._sent: float | None = None
        self._frame = b""
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(_MOST_FRAME_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._encode()

    def beat(self) -> None:
        """Sends a heartbeat, unless the last one has no response yet: a pause of a second delays just this one."""
        if self._sent is None:
            assert self._transport is not None
            self._sent = time.perf_counter()
            self._transport.write(self._frame)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            assert self._sent is not None
            self._latencies.append(time.perf_counter() - self._sent)
            self._sent = None
            body = frame[decode_response_header(frame, _KEY, _VERSION)[1] :]
            response = ConsumerGroupHeartbeatResponse.decode(body, _VERSION)
            if response.error_code == 0 and response.member_epoch != self._epoch:
                self._epoch = response.member_epoch
                self._encode()

    def _encode(self) -> None:
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._group_id, member_id=self._member_id, member_epoch=self._epoch
        )
        if self._epoch == 0:
            request.rebalance_timeout_ms = 60_000
            request.subscribed_topic_names = ["heart"]
            request.topic_partitions = []
        self._frame = encode_request(_KEY, _VERSION, 0, "bench", request.encode(_VERSION))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()
