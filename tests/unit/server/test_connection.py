# SPDX-License-Identifier: Apache-2.0
"""A connection answers in request order.

It mutes clients that send too much or read too slowly, and closes on bytes that are no request.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.api.api_table import Api, ApiTable
from kcoord.server.net import request_path
from kcoord.server.net.connection import Connections, KafkaConnection
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.foreign_protocol import guess_protocol
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import (
    FRAMES_PER_TURN,
    LONGEST_TURN_MS,
    MANY_REQUESTS,
    MAX_IN_FLIGHT_REQUESTS,
    RequestPath,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import ListGroupsRequest, ListGroupsResponse


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.socket: socket.socket | None = None
        self.writes: list[bytes] = []
        self.closed = False
        self.aborted = False
        self.reading = True
        self.buffered = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("192.0.2.7", 4711), "socket": self.socket}.get(name, default)

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def get_write_buffer_size(self) -> int:
        return self.buffered


class Owner(Connections):
    """Stands for the listener's connections. `handle` answers ListGroups. Admits every connection unless `refuse`."""

    def __init__(self, handle: Callable[[ListGroupsRequest], object]) -> None:
        self.handled = self.now_ms = 0

        def handler(broker: object, context: object, request: Any) -> object:
            self.handled += 1
            return handle(request)

        def error_response(request: Any, error: KafkaError, version: int) -> Any:
            return ListGroupsResponse(error_code=error.error)

        versions = {ApiKey.LIST_GROUPS: range(3, 6), ApiKey.API_VERSIONS: range(0, 5)}
        table = ApiTable(Api(key, served, handler, error_response) for key, served in versions.items())
        broker = cast(
            "Any",
            SimpleNamespace(
                apis=table,
                now_ms=lambda: self.now_ms,
                groups=None,
                topics=SimpleNamespace(topic_name=None),
                authorizer=None,
                request_quota=None,
                audit=None,
            ),
        )
        self.settings = PathSettings(
            broker,
            "PLAINTEXT",
            max_frame_bytes=1000,
            max_request_bytes=900,
            has_fast_paths=True,
            metadata_responses=None,
        )
        limits = ConnectionLimits(BrokerConfig.from_properties({}))
        super().__init__(limits, partial(RequestPath, self.settings), max_unread_bytes=1000, login_timeout_seconds=30)
        self.reports: list[str] = []
        self.refuse = False

    def admit(self, connection: KafkaConnection, host: str, descriptor: int) -> bool:
        return not self.refuse

    def forget(self, connection: KafkaConnection) -> None:
        pass

    def report(self, text: str) -> None:
        self.reports.append(text)


class Peer:
    """A connection with its transport, and the responses that it wrote."""

    def __init__(self, handle: Callable[[ListGroupsRequest], object] = lambda request: ListGroupsResponse()) -> None:
        self.owner = Owner(handle)
        self.transport = FakeTransport()
        self.connection = KafkaConnection(self.owner)
        self.connection.connection_made(self.transport)

    def answers(self) -> list[tuple[int, ListGroupsResponse]]:
        reader = FrameReader(1 << 20)
        answers = []
        for frame in reader.feed(b"".join(self.transport.writes)):
            correlation_id, start = decode_response_header(frame, ApiKey.LIST_GROUPS, 3)
            answers.append((correlation_id, ListGroupsResponse.decode(frame[start:], 3)))
        return answers

    def errors(self) -> list[tuple[int, int]]:
        return [(correlation_id, answer.error_code) for correlation_id, answer in self.answers()]


def request(correlation_id: int, version: int = 3) -> bytes:
    body = ListGroupsRequest().encode(version if version in range(3, 6) else 3)
    return encode_request(ApiKey.LIST_GROUPS, version, correlation_id, "test", body)


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_responses_to_a_read_leave_in_one_write_before_the_next_read() -> None:
    peer = Peer()
    data = b"".join(request(number) for number in range(5))
    cut = len(request(0)) * 3 + 10
    peer.connection.data_received(data[:cut])
    assert [number for number, _ in peer.answers()] == [0, 1, 2]
    assert len(peer.transport.writes) == 1
    peer.connection.data_received(data[cut:])
    assert [number for number, _ in peer.answers()] == [0, 1, 2, 3, 4]
    await turns()
    assert len(peer.transport.writes) == 2


async def test_requests_that_wait_are_processed_if_a_response_leaves_in_the_turn_of_their_read() -> None:
    futures: list[asyncio.Future[object]] = []

    def handle(_: ListGroupsRequest) -> object:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    peer = Peer(handle)
    peer.connection.data_received(b"".join(map(request, range(MAX_IN_FLIGHT_REQUESTS - 1))))
    futures[0].set_result(ListGroupsResponse())
    while not peer.connection._flush_scheduled:
        await asyncio.sleep(0)
    peer.connection.data_received(b"".join(map(request, range(100, 102))))
    await turns()
    assert len(futures) == MAX_IN_FLIGHT_REQUESTS + 1
    assert [number for number, _ in peer.answers()] == [0]


async def test_responses_leave_in_request_order() -> None:
    futures: list[asyncio.Future[object]] = []

    def handle(_: ListGroupsRequest) -> object:
        if len(futures) == 2:
            return ListGroupsResponse(error_code=3)
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    peer = Peer(handle)
    peer.connection.data_received(request(1) + request(2) + request(3))
    futures[1].set_result(ListGroupsResponse(error_code=2))
    await turns()
    assert peer.errors() == []
    futures[0].set_result(ListGroupsResponse(error_code=1))
    await turns()
    assert peer.errors() == [(1, 1), (2, 2), (3, 3)]
    assert len(peer.transport.writes) == 1


async def test_the_response_to_an_unknown_version_of_api_versions_keeps_the_order() -> None:
    """Clients match responses to requests by their order."""
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    peer = Peer(lambda _: future)
    unknown = encode_request(ApiKey.API_VERSIONS, 99, 2, "test", b"")
    peer.connection.data_received(request(1) + unknown)
    await turns()
    assert peer.transport.writes == []
    future.set_result(ListGroupsResponse())
    await turns()
    frames = FrameReader(1 << 20).feed(b"".join(peer.transport.writes))
    assert [int.from_bytes(frame[:4], "big") for frame in frames] == [1, 2]


async def test_expected_and_unexpected_failures_of_handlers_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    def handle(_: ListGroupsRequest) -> object:
        raise failures.pop(0)

    failures: list[Exception] = [KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS), ZeroDivisionError("oops")]
    peer = Peer(handle)
    peer.connection.data_received(request(1) + request(2))
    await turns(1)
    assert peer.errors() == [(1, 14), (2, -1)]
    assert [record.getMessage() for record in caplog.records] == ["LIST_GROUPS v3 from /192.0.2.7 failed"]
    assert not peer.transport.closed


async def test_failures_of_futures_are_answers(caplog: pytest.LogCaptureFixture) -> None:
    futures = [asyncio.get_running_loop().create_future() for _ in range(3)]
    waiting = list(futures)
    peer = Peer(lambda _: waiting.pop(0))
    peer.connection.data_received(request(1) + request(2) + request(3))
    futures[0].set_exception(KafkaError(Errors.NOT_COORDINATOR))
    futures[1].set_exception(ZeroDivisionError("oops"))
    futures[2].set_result(None)
    await turns()
    assert peer.errors() == [(1, 16), (2, -1)]
    assert "LIST_GROUPS v3 failed" in caplog.text


async def test_a_handler_may_return_no_response() -> None:
    answers: list[object] = [None, ListGroupsResponse()]
    peer = Peer(lambda _: answers.pop(0))
    peer.connection.data_received(request(1) + request(2))
    await turns(1)
    assert peer.errors() == [(2, 0)]


async def test_a_connection_with_too_many_requests_in_flight_is_muted_until_responses_leave() -> None:
    futures: list[asyncio.Future[object]] = []

    def handle(_: ListGroupsRequest) -> object:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    peer = Peer(handle)
    peer.connection.data_received(b"".join(request(number) for number in range(MAX_IN_FLIGHT_REQUESTS + 10)))
    assert len(futures) == MAX_IN_FLIGHT_REQUESTS
    assert not peer.transport.reading
    futures[0].set_result(ListGroupsResponse())
    await turns()
    assert len(futures) == MAX_IN_FLIGHT_REQUESTS + 1
    for future in list(futures):
        if not future.done():
            future.set_result(ListGroupsResponse())
    await turns()
    assert len(futures) == MAX_IN_FLIGHT_REQUESTS + 10
    assert peer.transport.reading


async def test_a_connection_whose_client_reads_too_slowly_is_muted() -> None:
    peer = Peer()
    peer.connection.pause_writing()
    assert not peer.transport.reading
    peer.connection.data_received(request(1))
    assert peer.answers() == []
    peer.connection.resume_writing()
    assert [number for number, _ in peer.answers()] == [1]
    assert peer.transport.reading


async def test_a_client_that_leaves_too_many_bytes_unread_is_disconnected() -> None:
    future = asyncio.get_running_loop().create_future()
    peer = Peer(lambda _: future)
    peer.connection.data_received(request(1))
    peer.connection.pause_writing()
    peer.transport.buffered = 1 << 40
    future.set_result(ListGroupsResponse())
    await turns()
    assert peer.transport.aborted
    assert "are not read" in peer.owner.reports[0]


@pytest.mark.parametrize(
    ("data", "report"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "looks like a TLS handshake"),
        (b"GET / HTTP/1.1\r\n\r\n", "looks like HTTP"),
        (b"\xff\xff\xff\xff", "frame of -1 bytes"),
        (b"\x00\x00\x03\xe9", "frame of 1001 bytes"),
        (b"\x00\x00\x00\x02\x00\x10", "too short for a header"),
        (request(1, version=77), "LIST_GROUPS v77 is not served"),
        (encode_request(ApiKey.METADATA, 0, 1, None, b""), "METADATA v0 is not served"),
        (b"\x00\x00\x00\x0a\x03\xe7\x00\x00\x00\x00\x00\x01\xff\xff", "api key 999 v0 is not served"),
        (b"\x00\x00\x00\x0b\x00\x10\x00\x03\x00\x00\x00\x01\xff\xff\x00", "malformed LIST_GROUPS v3 request"),
    ],
)
async def test_bytes_that_are_no_request_close_the_connection(data: bytes, report: str) -> None:
    peer = Peer()
    is_first = report.startswith("looks like")
    peer.connection.data_received(data if is_first else request(7) + data)
    assert peer.transport.closed
    assert len(peer.owner.reports) == 1
    assert peer.owner.reports[0].startswith("192.0.2.7:4711: closing, ")
    assert report in peer.owner.reports[0]
    assert [number for number, _ in peer.answers()] == ([] if is_first else [7])


async def test_a_lost_connection_ends_its_long_polls_but_not_its_tasks() -> None:
    async def work() -> ListGroupsResponse:
        await turns()
        done.append(True)
        return ListGroupsResponse()

    done: list[bool] = []
    poll = asyncio.get_running_loop().create_future()
    task = asyncio.get_running_loop().create_task(work())
    waiting: list[object] = [poll, task]
    peer = Peer(lambda _: waiting.pop(0))
    peer.connection.data_received(request(1) + request(2))
    peer.connection.connection_lost(None)
    await turns(6)
    assert poll.cancelled()
    assert done == [True]
    assert peer.transport.writes == []


async def test_a_refused_connection_is_aborted() -> None:
    owner = Owner(lambda _: ListGroupsResponse())
    owner.refuse = True
    transport = FakeTransport()
    KafkaConnection(owner).connection_made(transport)
    assert transport.aborted


async def test_idle_and_stalled_connections_are_closed_but_not_those_that_wait_for_the_broker() -> None:
    now = asyncio.get_running_loop().time()
    idle, stalled, waiting = Peer(), Peer(), Peer(lambda _: asyncio.get_running_loop().create_future())
    stalled.connection.data_received(request(1) + request(2)[:10])
    waiting.connection.data_received(request(1))
    stalled.connection.last_active = now + 100
    assert not idle.connection.close_if_idle(now + 5, 10)
    assert idle.connection.close_if_idle(now + 11, 10)
    assert stalled.connection.close_if_idle(now + 11, 10)
    assert not waiting.connection.close_if_idle(now + 11, 10)


async def test_a_throttle_does_not_keep_a_connection_whose_client_is_gone() -> None:
    """The broker does not read meanwhile, so it cannot see that the client is gone."""
    peer = Peer()
    peer.connection.path.client.throttle(10**8)
    peer.connection.data_received(request(1) * 3)
    assert (peer.connection.in_flight, peer.transport.reading) == (3, False)
    now = peer.connection.last_active
    assert not peer.connection.close_if_idle(now + 9, 10)
    assert peer.connection.close_if_idle(now + 11, 10)
    assert peer.transport.closed
    peer.connection.connection_lost(None)


async def test_a_client_that_reads_none_of_its_responses_is_aborted() -> None:
    """An orderly close would wait for the client as long as TCP retries. Its unanswered requests do not keep it."""
    gone, slow, refused = Peer(), Peer(), Peer()
    now = gone.connection.last_active
    refused.connection.data_received(b"\xff" * 8)
    for peer in (gone, slow, refused):
        peer.connection.pause_writing()
        peer.transport.buffered = 100_000
    gone.connection.data_received(request(1))
    for second in range(0, 30, 5):
        slow.transport.buffered -= 1
        assert not slow.connection.close_if_idle(now + second, 10)
        is_over = second > 10
        assert gone.connection.close_if_idle(now + second, 10) is is_over
        assert refused.connection.close_if_idle(now + second, 10) is is_over
        assert gone.transport.aborted is refused.transport.aborted is is_over
    assert not slow.transport.closed
    slow.transport.buffered = 0
    assert not slow.connection.close_if_idle(now + 30, 10)
    assert slow.connection.close_if_idle(now + 41, 10)
    assert not slow.transport.aborted


async def test_connections_use_tcp_keepalive() -> None:
    """As in Kafka: if idle connections stay open, those whose client is gone still end at some time."""
    near, far = socket.socketpair()
    with near, far:
        peer = Peer()
        peer.transport.socket = near
        peer.connection.connection_made(peer.transport)
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


async def test_a_stopped_connection_answers_requests_in_flight_and_accepts_no_other() -> None:
    future = asyncio.get_running_loop().create_future()
    peer = Peer(lambda _: future)
    peer.connection.data_received(request(1))
    peer.connection.stop_reading()
    peer.connection.data_received(request(2))
    assert peer.connection.path.in_flight == 1
    future.set_result(ListGroupsResponse())
    await turns()
    assert [number for number, _ in peer.answers()] == [1]


def test_a_kafka_request_is_not_mistaken_for_another_protocol() -> None:
    assert guess_protocol(b"\x00\x03\x00\x01abcd") == ""


async def test_many_requests_at_once_are_answered_turn_by_turn() -> None:
    """Other connections are served in between, and unread responses mute the connection in time."""
    peer = Peer()
    peer.connection.data_received(b"".join(request(number) for number in range(3 * FRAMES_PER_TURN)))
    assert peer.owner.handled == FRAMES_PER_TURN
    assert not peer.transport.reading
    await turns(2)
    assert len(peer.answers()) == 2 * FRAMES_PER_TURN
    peer.connection.pause_writing()
    await turns(3)
    assert len(peer.answers()) == 2 * FRAMES_PER_TURN
    peer.connection.resume_writing()
    await turns(3)
    assert [number for number, _ in peer.answers()] == list(range(3 * FRAMES_PER_TURN))
    assert peer.transport.reading


async def test_requests_that_arrive_during_a_long_turn_are_processed_before_the_next_one() -> None:
    """A heartbeat that arrives while members join over another connection waits for a part of the joins only."""
    loop = asyncio.get_running_loop()
    handled: list[int] = []
    joining_client, joining_socket = socket.socketpair()
    beating_client, beating_socket = socket.socketpair()

    def join(_: ListGroupsRequest) -> ListGroupsResponse:
        if not handled:
            beating_client.send(request(100))
        joining.now_ms += LONGEST_TURN_MS // 3
        handled.append(len(handled))
        return ListGroupsResponse()

    def beat(_: ListGroupsRequest) -> ListGroupsResponse:
        handled.append(100)
        return ListGroupsResponse()

    joining, beating = Owner(join), Owner(beat)
    with joining_client, beating_client:
        joining_client.send(b"".join(map(request, range(3 + MANY_REQUESTS))))
        transports = [
            (await loop.create_connection(owner.open, sock=own_socket))[0]
            for owner, own_socket in ((beating, beating_socket), (joining, joining_socket))
        ]
        for _ in range(100):
            await asyncio.sleep(0)
            if len(handled) == 4 + MANY_REQUESTS:
                break
        for transport in transports:
            transport.abort()
    assert handled == [0, 1, 2, 100, *range(4, 4 + MANY_REQUESTS)]


class Timers:
    """The timers of the event loop, which the test lets expire."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set: list[tuple[float, Callable[[], None] | None]] = []
        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", self._call_later)

    def _call_later(self, seconds: float, callback: Callable[..., None], *arguments: object) -> SimpleNamespace:
        number = len(self.set)
        self.set.append((seconds, partial(callback, *arguments)))
        return SimpleNamespace(cancel=lambda: self.set.__setitem__(number, (seconds, None)))

    def active_seconds(self) -> list[float]:
        return [seconds for seconds, callback in self.set if callback is not None]

    def expire(self) -> None:
        """Lets the only active timer expire."""
        (callback,) = [callback for _, callback in self.set if callback is not None]
        callback()


async def test_a_connection_above_the_creation_rate_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    peer = Peer()
    peer.connection.hold(0.01)
    peer.connection.data_received(request(1))
    assert peer.answers() == []
    assert timers.active_seconds() == [0.01]
    timers.expire()
    assert [number for number, _ in peer.answers()] == [1]


async def test_a_connection_above_the_rate_of_its_address_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    peer = Peer()
    peer.connection.close_after(0.7)
    peer.connection.data_received(request(1))
    assert not peer.transport.reading
    assert timers.active_seconds() == [0.7]
    assert not peer.transport.is_closing()
    timers.expire()
    assert peer.transport.is_closing()
    assert peer.answers() == []


async def test_a_throttled_connection_reads_on_after_the_longest_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = Timers(monkeypatch)
    peer = Peer()
    for throttle_ms in (300, 100, 700):
        peer.connection.path.client.throttle(throttle_ms)
        peer.connection.data_received(b"")
        assert not peer.transport.reading
    peer.connection.data_received(request(1))
    assert (peer.transport.reading, peer.answers()) == (False, [])
    assert timers.active_seconds() == [0.7]
    timers.expire()
    assert (peer.transport.reading, [number for number, _ in peer.answers()]) == (True, [1])


async def test_no_timer_keeps_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A throttle may last for days, and a client that is throttled may connect again and again."""
    timers = Timers(monkeypatch)
    futures: list[asyncio.Future[object]] = []

    def handle(_: ListGroupsRequest) -> object:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    peer = Peer(handle)
    peer.connection.close_after(0.7)
    peer.connection.hold(0.1)
    peer.connection.path.client.throttle(10**9)
    peer.connection.data_received(b"")
    assert len(timers.active_seconds()) == 3
    peer.connection.connection_lost(None)
    assert timers.active_seconds() == []

    late = Peer(handle)
    late.connection.data_received(request(1))
    late.connection.path.client.throttle(10**9)
    late.connection.connection_lost(None)
    futures[0].cancel()
    await turns()
    assert timers.active_seconds() == []


async def test_a_late_response_may_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    futures: list[asyncio.Future[object]] = []

    def handle(_: ListGroupsRequest) -> object:
        futures.append(asyncio.get_running_loop().create_future())
        return futures[-1]

    peer = Peer(handle)
    peer.connection.data_received(request(1))
    peer.connection.path.client.throttle(1000)
    futures[0].set_result(ListGroupsResponse())
    Timers(monkeypatch)
    await turns()
    assert [number for number, _ in peer.answers()] == [1]
    assert not peer.transport.reading


async def test_a_lost_connection_is_freed_without_the_garbage_collector() -> None:
    """The garbage collector looks at old objects so rarely that thousands of connections would accumulate."""
    peer = Peer()
    peer.connection.data_received(request(1))
    await turns()
    assert len(peer.answers()) == 1
    peer.connection.connection_lost(None)
    gone = weakref.ref(peer.connection)
    gc.disable()
    try:
        del peer
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("most_ms", [0, 2])
@pytest.mark.parametrize("seed", range(40))
async def test_pipelined_requests_are_all_answered_whenever_their_responses_become_ready(
    seed: int, most_ms: int
) -> None:
    """A write may unmute the path when nothing else would process the requests that wait.

    With a turn as long as the queue that is rare: a turn then ends early only if it is long or responses are large.
    """
    random = Random(seed)
    at_once = random.random()

    def handle(_: ListGroupsRequest) -> object:
        peer.owner.now_ms += random.randint(0, most_ms)
        if random.random() < at_once:
            return ListGroupsResponse()
        return asyncio.ensure_future(respond_after(random.randrange(4)))

    async def respond_after(count: int) -> object:
        await turns(count)
        return ListGroupsResponse()

    peer = Peer(handle)
    frames_per_turn = FRAMES_PER_TURN if most_ms else MAX_IN_FLIGHT_REQUESTS // 4
    with mock.patch.object(request_path, "FRAMES_PER_TURN", frames_per_turn):
        peer.connection.data_received(b"".join(map(request, range(400))))
        await turns(400)
    assert [number for number, _ in peer.answers()] == list(range(400))
