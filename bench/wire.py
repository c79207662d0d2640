# SPDX-License-Identifier: Apache-2.0
"""A blocking connection, and a kcoord process with what the kernel says about its cost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from protocol.api_keys import ApiKey
from protocol.errors import Errors
from protocol.headers import decode_response_header, encode_request
from protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse, Message

R = TypeVar("R", bound=Message)
READY = re.compile(rb"kcoord is ready: .*?127\.0\.0\.1:(\d+)")


class Connection:
    """One request at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def call(self, api_key: ApiKey, version: int, request: Message, response_class: type[R]) -> R:
        self._correlation_id += 1
        self._socket.sendall(encode_request(api_key, version, self._correlation_id, "bench", request.encode(version)))
        frame = self.receive()
        _, body = decode_response_header(frame, api_key, version)
        return response_class.decode(frame[body:], version)

    def find_coordinator(self, group_id: str) -> None:
        """As every client does first: it makes the broker create the offsets topic. Asks until there is one."""
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
        size = int.from_bytes(self._exactly(4), "big")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            assert more, "the broker closed the connection"
            data += more
        return data

    def close(self) -> None:
        self._socket.close()


class Broker:
    """`kcoord serve` with its data under `folder`."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        command = [sys.executable, "-m", "kcoord", "serve"]
        for setting in ("listeners=PLAINTEXT://127.0.0.1:0", f"log.dirs={folder}", *overrides):
            command += ["--override", setting]
        self.started = time.perf_counter()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self._process.stdout is not None
        ready = READY.search(self._process.stdout.readline())
        assert ready is not None, "kcoord did not start"
        self.port = int(ready[1])

    def __enter__(self) -> Broker:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.end(signal.SIGTERM)

    def end(self, how: signal.Signals) -> None:
        """Sends the signal and waits for the end."""
        self._process.send_signal(how)
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def cpu_seconds(self) -> float:
        """User and system time of the process so far, all threads."""
        nanoseconds = 0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
        return nanoseconds / 1e9

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
