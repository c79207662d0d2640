# SPDX-License-Identifier: Apache-2.0
"""A client of a request path: frames in, frames out, without a socket."""

from __future__ import annotations

from typing import Final

from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.api_keys import response_class
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from tests.transcripts.stage import Sent

MOST_BYTES: Final = 100_000_000


class PathClient:
    """One connection. The responses come in the order of the requests."""

    def __init__(self, settings: PathSettings, client_id: str) -> None:
        self._client_id = client_id
        self._path = RequestPath(settings, lambda: None, "127.0.0.1", 4711)
        self._frames = FrameReader(MOST_BYTES, MOST_BYTES)
        self._sent: list[Sent] = []
        self._count = 0

    def send(self, sent: Sent) -> None:
        request = sent.request
        self._count += 1
        self._sent.append(sent)
        body = request.message.encode(request.version)
        self._path.receive(encode_request(request.message.api_key, request.version, self._count, self._client_id, body))
        self.read()

    def read(self) -> None:
        """Reads the responses that are ready, and sets them in their requests."""
        output = self._path.take_output()
        assert self._path.close_reason is None, self._path.close_reason
        for frame in self._frames.feed(output):
            sent = self._sent.pop(0)
            key, version = sent.request.message.api_key, sent.request.version
            _, offset = decode_response_header(frame, key, version)
            sent.answer = response_class(key).decode(frame[offset:], version)

    def close(self) -> None:
        self._path.close()
