# SPDX-License-Identifier: Apache-2.0
"""Responses with parts of files arrive whole and in order, by the kernel and by the transport."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeAlias, cast

import pytest
import uvloop

from kcoord.server.api.api_table import Api, BoundApi
from kcoord.server.api.pieces import Pieces, encode_in_pieces, read_pieces
from kcoord.server.net.piece_sender import TURN_BYTES, PieceSender
from kcoord.storage.file_system import File, FileSlice, RealFileSystem
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import FetchRequest, FetchResponse

CONTENT = random.Random(3).randbytes(8 << 20)
Scenario: TypeAlias = "Callable[[Link], Awaitable[None]]"


class UnreadableFile:
    """A file that only the kernel may read."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.descriptor = file.descriptor

    def read_at(self, position: int, size: int) -> bytes:
        raise AssertionError("the kernel could send this")


class MemoryFile:
    """A file that the kernel cannot send."""

    descriptor = None

    def read_at(self, position: int, size: int) -> bytes:
        return CONTENT[position : position + size]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    path = tmp_path_factory.mktemp("log") / "00000000000000000000.log"
    path.write_bytes(CONTENT)
    opened = RealFileSystem().open_read(str(path))
    yield opened
    opened.close()


def part(file: object, position: int, size: int) -> FileSlice:
    return FileSlice(cast(File, file), position, size)


class Link(asyncio.Protocol):
    """A transport with a sender, and the socket of its client. `has_tls`: the kernel must not send."""

    def __init__(self, has_tls: bool) -> None:
        self.has_tls = has_tls
        self.sender: PieceSender | None = None
        self.is_paused = False
        self.failures: list[str | None] = []
        self.done = 0
        self.client: socket.socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def pause_writing(self) -> None:
        self.is_paused = True
        if self.sender is not None:
            self.sender.pause()

    def resume_writing(self) -> None:
        self.is_paused = False
        if self.sender is not None:
            self.sender.resume()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self if name == "ssl_object" and self.has_tls else self.transport.get_extra_info(name, default)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def get_write_buffer_size(self) -> int:
        return self.transport.get_write_buffer_size()

    def send(self, data: bytes | Pieces) -> bool:
        if self.sender is None:
            self.sender = PieceSender(
                cast(asyncio.Transport, self), self._on_done, self.failures.append, is_paused=self.is_paused
            )
        if not self.sender.send(data):
            return False
        self.sender = None
        return True

    def _on_done(self) -> None:
        self.sender = None
        self.done += 1

    async def read(self, size: int, step: int = 1 << 20, pause_seconds: float = 0.0) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size and (more := await loop.sock_recv(self.client, step)):
            data += more
            await asyncio.sleep(pause_seconds)
        return data


def play(new_loop: Callable[[], asyncio.AbstractEventLoop], has_tls: bool, scenario: Scenario) -> None:
    """Plays a scenario on one of the event loops. No descriptor may be left open."""

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            right = socket.create_connection(server.getsockname())
            left, _ = server.accept()
        right.setblocking(False)
        loop = asyncio.get_running_loop()
        _, link = await loop.connect_accepted_socket(lambda: Link(has_tls), left)
        link.client = right
        open_files = os.listdir("/proc/self/fd")
        try:
            async with asyncio.timeout(30):
                await scenario(link)
        finally:
            if link.sender is not None:
                link.sender.close()
            open_at_end = os.listdir("/proc/self/fd")
            link.transport.abort()
            right.close()
        assert len(open_at_end) <= len(open_files)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.fixture(params=[uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def loops(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    return cast("Callable[[], asyncio.AbstractEventLoop]", request.param)


@pytest.fixture(params=[False, True], ids=["kernel", "transport"])
def has_tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_pieces_arrive_whole_and_in_order(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        sent = file if has_tls else UnreadableFile(file)
        first: Pieces = [b"head", part(sent, 5, 3_000_000), b"", b"between", part(sent, 9, 1)]
        assert not link.send([*first, part(MemoryFile(), 7, 200_000)])
        # What follows waits for the files, also if nothing is in the buffer of the transport.
        assert not link.send(b"behind")
        assert not link.send([part(sent, 0, 100_000), b"tail"])
        expected = b"head" + CONTENT[5:3_000_005] + b"between" + CONTENT[9:10] + CONTENT[7:200_007]
        expected += b"behind" + CONTENT[:100_000] + b"tail"
        assert link.sender is not None
        assert link.sender.unsent_bytes > 2_000_000
        assert link.sender.memory_bytes < 100
        assert await link.read(len(expected), step=70_000) == expected
        assert (link.done, link.failures) == (1, [])

    play(loops, has_tls, scenario)


def test_what_the_socket_takes_at_once_is_sent_at_once(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        assert link.send([b"head", part(file, 3, 20_000)])
        assert await link.read(20_004) == b"head" + CONTENT[3:20_003]
        assert link.done == 0

    play(loops, has_tls, scenario)


def test_bytes_in_the_buffer_of_the_transport_leave_first(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        before = bytes(range(250)) * 60_000
        link.transport.write(before)
        assert link.is_paused
        assert not link.send([part(file, 0, 500_000)])
        assert await link.read(len(before) + 500_000) == before + CONTENT[:500_000]

    play(loops, has_tls, scenario)


def test_a_slow_reader_gets_everything(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        link.send([part(file, 0, 1_500_000)])
        assert await link.read(1_500_000, step=30_000, pause_seconds=0.0005) == CONTENT[:1_500_000]

    play(loops, has_tls, scenario)


def test_others_get_their_turn_while_a_fast_reader_gets_much(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        turns, unsent_bytes, most_bytes = 0, len(CONTENT), 0

        def count() -> None:
            nonlocal turns, unsent_bytes, most_bytes
            turns += 1
            if link.sender is not None:
                most_bytes = max(most_bytes, unsent_bytes - link.sender.unsent_bytes)
                unsent_bytes = link.sender.unsent_bytes
                asyncio.get_running_loop().call_soon(count)

        reader = asyncio.create_task(link.read(len(CONTENT)))
        link.send([part(file, 0, len(CONTENT))])
        count()
        assert await reader == CONTENT
        assert turns >= len(CONTENT) // TURN_BYTES
        # A transport that takes bytes again and the next turn of the sender may fall into the same turn.
        assert 0 < most_bytes <= (2 if has_tls else 1) * (128 << 10)

    play(loops, has_tls, scenario)


def test_a_file_that_ends_too_early_ends_the_connection(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        assert not link.send([b"head", part(file, len(CONTENT) - 10, 20)])
        assert link.failures == ["a part of a file was not sent: the file ends too early"]

    play(loops, has_tls, scenario)


@pytest.mark.parametrize("missing", ["sendfile", "dup"])
def test_files_are_read_if_the_kernel_cannot_send_them(
    loops: Any, file: File, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EINVAL if missing == "sendfile" else errno.EMFILE, "as in this test")

    async def scenario(link: Link) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, missing, fail)
            link.send([b"head", part(file, 0, 2_000_000), b"tail"])
            assert await link.read(2_000_008) == b"head" + CONTENT[:2_000_000] + b"tail"

    play(loops, False, scenario)


def test_a_client_that_is_gone_ends_the_connection_without_a_report(loops: Any, file: File) -> None:
    async def scenario(link: Link) -> None:
        assert not link.send([part(file, 0, len(CONTENT))])
        link.client.close()
        while not link.failures:
            await asyncio.sleep(0.001)
        assert link.failures == [None]

    play(loops, False, scenario)


def test_a_sender_is_closed_while_it_waits(loops: Any, has_tls: bool, file: File) -> None:
    async def scenario(link: Link) -> None:
        assert not link.send([part(file, 0, len(CONTENT))])
        assert link.sender is not None
        link.sender.close()
        link.sender.close()
        assert link.sender.unsent_bytes == 0

    play(loops, has_tls, scenario)


@pytest.mark.parametrize("version", [4, 11, 12, 18])
def test_pieces_of_a_response_are_its_bytes(version: int, file: File) -> None:
    def response(*records: object) -> FetchResponse:
        parts = [
            FetchResponse.PartitionData(
                partition_index=index, high_watermark=7, aborted_transactions=None, records=cast("bytes", data)
            )
            for index, data in enumerate(records)
        ]
        topics = [FetchResponse.FetchableTopicResponse(topic="t" if version < 13 else "", partitions=parts)]
        return FetchResponse(responses=topics)

    bound = BoundApi(Api(ApiKey.FETCH, range(4, 19)), version)
    places = [(0, 200), (77, 130), (1_000, 70_000)]
    read = response(b"", *(CONTENT[at : at + size] for at, size in places), b"last")
    unread = response(b"", *(part(file, at, size) for at, size in places), b"last")
    expected = bound.encode(5, read, FetchRequest())
    pieces = encode_in_pieces(5, version, unread)
    assert pieces is not None
    assert [type(piece) for piece in pieces] == [bytes, FileSlice] * 3 + [bytes]
    assert read_pieces(pieces) == expected
    assert encode_in_pieces(5, version, read) is None
