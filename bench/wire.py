# SPDX-License-Identifier: Apache-2.0
"""A blocking connection, and server processes with their CPU time and memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse, Message

R = TypeVar("R", bound=Message)
S = TypeVar("S", bound="Server")
READY = re.compile(rb"is ready: .*?127\.0\.0\.1:(\d+)")
READ_BYTES = 1 << 20
TIMEOUT_SECONDS = 120.0
QUIET_SECONDS = 0.5
SETTLE_SECONDS = 120.0


class Connection:
    """A blocking connection. `call` sends one request and waits for its response."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None, session: ssl.SSLSession | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self._socket = tls.wrap_socket(self._socket, session=session)
        self._correlation_id = 0
        self._read = b""
        self._position = 0

    @property
    def session(self) -> ssl.SSLSession | None:
        """The TLS session that another connection can resume, if the server has sent a ticket."""
        return self._socket.session if isinstance(self._socket, ssl.SSLSocket) else None

    @property
    def is_resumed(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and bool(self._socket.session_reused)

    def fileno(self) -> int:
        return self._socket.fileno()

    def call(self, api_key: ApiKey, version: int, request: Message, response_class: type[R]) -> R:
        self._correlation_id += 1
        self._socket.sendall(encode_request(api_key, version, self._correlation_id, "bench", request.encode(version)))
        frame = self.receive()
        _, body = decode_response_header(frame, api_key, version)
        return response_class.decode(frame[body:], version)

    def find_coordinator(self, group_id: str) -> None:
        """Sends FindCoordinator until the coordinator is available. The first request creates the offsets topic."""
        request = FindCoordinatorRequest(coordinator_keys=[group_id])
        while True:
            answer = self.call(ApiKey.FIND_COORDINATOR, 4, request, FindCoordinatorResponse)
            if answer.coordinators[0].error_code == Errors.NONE:
                return
            assert answer.coordinators[0].error_code == Errors.COORDINATOR_NOT_AVAILABLE, answer
            time.sleep(0.001)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        """Returns the next frame, without its length."""
        size = int.from_bytes(self._take(4), "big")
        return self._take(size)

    def skip(self, count: int) -> None:
        """Receives `count` frames and drops them."""
        for _ in range(count):
            self._take(int.from_bytes(self._take(4), "big"))

    def _take(self, size: int) -> bytes:
        while len(self._read) - self._position < size:
            more = self._socket.recv(READ_BYTES)
            assert more, "the broker closed the connection"
            self._read = self._read[self._position :] + more
            self._position = 0
        start = self._position
        self._position = start + size
        return self._read[start : self._position]

    def close(self) -> None:
        self._socket.close()


def cpu_seconds(pid: int) -> float:
    """Returns user and system time of all threads of a process so far."""
    nanoseconds = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # The thread has ended meanwhile.
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


class Server:
    """A server process that prints its address on standard output when it is ready.

    It has its own session, as a service has. Linux shares the processors between sessions, so a server in the session
    of a busy client would compete with each thread of that client.
    """

    tls: ssl.SSLContext | None = None
    """What clients need to connect, None for a server without TLS."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready = READY.search(self._process.stdout.readline())
        assert ready is not None, f"{arguments[0]} did not start"
        self.port = int(ready[1])

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end(signal.SIGTERM)

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self, how: signal.Signals) -> None:
        """Sends the signal and waits for the end of the process."""
        self._process.send_signal(how)
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._process.pid)

    def settle(self, quiet_cores: float) -> None:
        """Waits until the server uses no more than `quiet_cores`, at most SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            cpu = self.cpu_seconds()
            time.sleep(QUIET_SECONDS)
            if self.cpu_seconds() - cpu < quiet_cores * QUIET_SECONDS:
                return

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class Broker(Server):
    """`kcoord serve` with its data under `folder`.

    `module`: bench.pure for the pure form of a compiled checkout. `watch`: the file for the reports of bench.watched.
    """

    def __init__(self, folder: Path, *overrides: str, module: str = "kcoord", watch: Path | None = None) -> None:
        arguments = [module] if watch is None else ["bench.watched", str(watch)]
        arguments.append("serve")
        for setting in ("listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={folder}", *overrides):
            arguments += ["--override", setting]
        super().__init__(arguments)


class Echo(Server):
    """The echo server, which returns the frames that it gets."""

    def __init__(self) -> None:
        super().__init__(["bench.echo"])
