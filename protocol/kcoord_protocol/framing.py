# SPDX-License-Identifier: Apache-2.0
"""Cuts a byte stream into frames: an int32 length, then that many bytes.

Nothing is allocated for a length that was only announced; a frame is at most one copy of what has arrived. Requests can
have a limit of their own below that of the few APIs which carry records: a decoded request takes many times its bytes.
"""

from __future__ import annotations

from collections.abc import Container
from struct import Struct
from typing import Final

from kcoord_protocol.errors import FramingError

LENGTH_BYTES: Final = 4
_API_KEY_BYTES: Final = 2
_length_at: Final = Struct(">i").unpack_from
_api_key_at: Final = Struct(">h").unpack_from


class FrameReader:
    """Collects bytes until whole frames are there.

    Frames are requests where `max_request_bytes` is given: it is the limit for all API keys but `bulk_api_keys`,
    checked as soon as the key of a frame has arrived.
    """

    __slots__ = ("_buffer", "_bulk_api_keys", "_max_frame_bytes", "_max_request_bytes", "_wanted_bytes")

    def __init__(
        self, max_frame_bytes: int, max_request_bytes: int | None = None, bulk_api_keys: Container[int] = ()
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._max_request_bytes = max_frame_bytes if max_request_bytes is None else max_request_bytes
        self._bulk_api_keys = bulk_api_keys
        self._buffer = bytearray()
        self._wanted_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        """How many bytes of an unfinished frame are held."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take received bytes and return the frames that are complete now, without their length.

        After a FramingError the stream is out of step, and the connection is of no more use.
        """
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._wanted_bytes:
                return []
            data = bytes(self._buffer)
            self._buffer.clear()
        elif type(data) is not bytes:
            data = bytes(data)
        elif len(data) >= LENGTH_BYTES:
            # What arrives from a client that waits for each answer: one whole frame.
            (length,) = _length_at(data)
            if length == len(data) - LENGTH_BYTES and length <= self._max_request_bytes:
                return [data[LENGTH_BYTES:]]
        return self._cut(data)

    def _cut(self, data: bytes) -> list[bytes]:
        frames: list[bytes] = []
        position, end = 0, len(data)
        wanted = LENGTH_BYTES
        while end - position >= LENGTH_BYTES:
            (length,) = _length_at(data, position)
            if not 0 <= length <= self._max_frame_bytes:
                raise FramingError(f"frame of {length} bytes, allowed are 0 to {self._max_frame_bytes}", frames)
            body = position + LENGTH_BYTES
            if length > self._max_request_bytes:
                if end - body < _API_KEY_BYTES:
                    wanted = LENGTH_BYTES + _API_KEY_BYTES
                    break
                self._check_request(data, body, length, frames)
            if end - body < length:
                wanted = LENGTH_BYTES + length
                break
            position = body + length
            frames.append(data[body:position])
        if position < end:
            self._buffer += data[position:] if position else data
            self._wanted_bytes = wanted
        return frames

    def _check_request(self, data: bytes, body: int, length: int, frames: list[bytes]) -> None:
        (api_key,) = _api_key_at(data, body)
        if api_key not in self._bulk_api_keys:
            raise FramingError(
                f"request of {length} bytes with api key {api_key}, allowed are {self._max_request_bytes}", frames
            )
