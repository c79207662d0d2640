# SPDX-License-Identifier: Apache-2.0
"""A small blocking client on kcoord's codec, for tests that need exact requests."""

from __future__ import annotations

import socket
from typing import TypeVar

from kcoord_protocol.api_keys import response_class
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import Message

R = TypeVar("R", bound=Message)

_MAX_RESPONSE_BYTES = 1 << 26


class ConnectionClosed(Exception):
    """The broker closed the connection."""


class WireClient:
    """A new connection, or the one that is `connected`.

    `call` sends a request and returns its response; `send` and `receive` are its two steps.
    """

    def __init__(self, port: int, timeout_seconds: float = 10.0, connected: socket.socket | None = None) -> None:
        self.socket = connected or socket.create_connection(("127.0.0.1", port), timeout_seconds)
        self._reader = FrameReader(_MAX_RESPONSE_BYTES)
        self._frames: list[bytes] = []
        self._correlation_id = 0

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def call(self, request: Message, version: int, answer: type[R]) -> R:
        correlation_id = self.send(request, version)
        return self.receive(correlation_id, request.api_key, version, answer)

    def send(self, request: Message, version: int) -> int:
        self._correlation_id += 1
        body = request.encode(version)
        self.socket.sendall(encode_request(request.api_key, version, self._correlation_id, "wire", body))
        return self._correlation_id

    def receive(self, correlation_id: int, api_key: int, version: int, answer: type[R]) -> R:
        assert answer is response_class(api_key)
        frame = self.receive_frame()
        got, start = decode_response_header(frame, api_key, version)
        assert got == correlation_id
        return answer.decode(frame[start:], version)

    def receive_frame(self) -> bytes:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                raise ConnectionClosed
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)
