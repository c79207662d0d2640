# SPDX-License-Identifier: Apache-2.0
"""Frames in a byte stream, and the headers of the requests and responses in them.

A frame is an int32 length, then that many bytes. No memory is allocated for a length whose bytes have not arrived. The
bytes of a frame are copied once, and those of its first piece twice. Most requests have a lower limit than the few APIs
that carry records (`bulk_api_keys`), because a decoded request takes many times its bytes.

The version of a header follows from the version of the API: flexible versions have a header with tagged fields. The
response header of ApiVersions never has them, because its reader may not know the version of the response (KIP-511).
"""

from __future__ import annotations

from collections.abc import Container
from struct import Struct
from typing import Final

from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.errors import DecodeError, FramingError, ProtocolError
from kcoord_protocol.message import decode_unknown_tags
from kcoord_protocol.messages import RequestHeader

LENGTH_BYTES: Final = 4
_API_KEY_BYTES: Final = 2
_SMALL_PIECE_BYTES: Final = 4096
_length_at: Final = Struct(">i").unpack_from
_api_key_at: Final = Struct(">h").unpack_from


class FrameReader:
    """Collects received bytes and returns whole frames.

    If `max_request_bytes` is given, frames are requests. It is the limit for all API keys except `bulk_api_keys`, and
    is checked as soon as the API key of a frame has arrived.
    """

    __slots__ = (
        "_bulk_api_keys",
        "_head",
        "_max_frame_bytes",
        "_max_request_bytes",
        "_missing_bytes",
        "_pieces",
        "has_unfinished_frame",
    )

    def __init__(
        self, max_frame_bytes: int, max_request_bytes: int | None = None, bulk_api_keys: Container[int] = ()
    ) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._max_request_bytes = max_frame_bytes if max_request_bytes is None else max_request_bytes
        self._bulk_api_keys = bulk_api_keys
        self._head = b""
        """The bytes of a frame whose length cannot be checked yet."""
        self._pieces: list[bytes | bytearray] = []
        self._missing_bytes = 0
        """The number of bytes after `_pieces` that complete a frame; 0 if the length is not known."""
        self.has_unfinished_frame = False
        """True if the bytes that were received end within a frame."""

    def allow(self, max_frame_bytes: int, max_request_bytes: int, bulk_api_keys: Container[int]) -> None:
        """Replaces the limits for frames whose length has not been checked yet."""
        self._max_frame_bytes = max_frame_bytes
        self._max_request_bytes = max_request_bytes
        self._bulk_api_keys = bulk_api_keys

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Take received bytes and return the frames that are complete now, without their length prefix.

        After a FramingError the position in the stream is lost, and the connection must be closed.
        """
        if type(data) is not bytes:
            data = bytes(data)
        if self.has_unfinished_frame:
            return self._continue(data)
        if len(data) >= LENGTH_BYTES:
            # Fast path: a client that waits for each response sends one whole frame at a time.
            (length,) = _length_at(data)
            if length == len(data) - LENGTH_BYTES and length <= self._max_request_bytes:
                return [data[LENGTH_BYTES:]]
        return self._cut(data, 0, [])

    def _continue(self, data: bytes) -> list[bytes]:
        missing = self._missing_bytes
        if not missing:
            return self._cut(self._head + data, 0, [])
        if len(data) < missing:
            self._keep(data)
            return []
        pieces, self._pieces, self._missing_bytes = self._pieces, [], 0
        return self._cut(data, missing, [b"".join((*pieces, memoryview(data)[:missing]))])

    def _keep(self, data: bytes) -> None:
        """Keeps a piece of a frame. Small pieces are joined, since each object takes memory of its own."""
        self.has_unfinished_frame = True
        self._missing_bytes -= len(data)
        pieces = self._pieces
        if len(data) >= _SMALL_PIECE_BYTES:
            pieces.append(data)
        elif pieces and type(pieces[-1]) is bytearray:
            pieces[-1] += data
        else:
            pieces.append(bytearray(data))

    def _cut(self, data: bytes, position: int, frames: list[bytes]) -> list[bytes]:
        """Adds the whole frames from `position` on to `frames`, keeps the rest, and returns `frames`."""
        end = len(data)
        while end - position >= LENGTH_BYTES:
            (length,) = _length_at(data, position)
            if not 0 <= length <= self._max_frame_bytes:
                raise FramingError(f"frame of {length} bytes, allowed are 0 to {self._max_frame_bytes}", frames)
            body = position + LENGTH_BYTES
            if length > self._max_request_bytes:
                if end - body < _API_KEY_BYTES:
                    break
                self._check_request(data, body, length, frames)
            if end - body < length:
                self._missing_bytes = length
                self._keep(data[body:])
                return frames
            position = body + length
            frames.append(data[body:position])
        self._head = data[position:]
        self.has_unfinished_frame = position < end
        return frames

    def _check_request(self, data: bytes, body: int, length: int, frames: list[bytes]) -> None:
        (api_key,) = _api_key_at(data, body)
        if api_key not in self._bulk_api_keys:
            raise FramingError(
                f"request of {length} bytes with api key {api_key}, allowed are {self._max_request_bytes}", frames
            )


_NO_TAGS: Final = b"\x00"
_request_start: Final = Struct(">hhih")
_response_start: Final = Struct(">ii")
_REQUEST_START_BYTES: Final = _request_start.size
_new: Final = object.__new__

# First flexible version by API key, filled on first use.
_flexible_requests: Final[dict[int, int]] = {}
_flexible_responses: Final[dict[int, int]] = {}


def request_header_version(api_key: int, api_version: int) -> int:
    """Return 1 or 2; raise UnsupportedVersionError if the API has no schema."""
    first = _flexible_requests.get(api_key)
    if first is None:
        versions = request_class(api_key).flexible_versions
        first = _flexible_requests[api_key] = versions.start if versions else 0x8000
    return 2 if api_version >= first else 1


def response_header_version(api_key: int, api_version: int) -> int:
    """Return 0 or 1; raise UnsupportedVersionError if the API has no schema."""
    first = _flexible_responses.get(api_key)
    if first is None:
        versions = response_class(api_key).flexible_versions
        first = versions.start if versions and api_key != ApiKey.API_VERSIONS else 0x8000
        _flexible_responses[api_key] = first
    return 1 if api_version >= first else 0


def decode_request_header(frame: bytes) -> tuple[RequestHeader, int]:
    """Return the header of a request frame and the position of the body.

    Raise DecodeError for an API without schema, since the end of its header is unknown. The API's version may be
    one that does not exist.
    """
    if len(frame) < _REQUEST_START_BYTES:
        raise DecodeError(f"request of {len(frame)} bytes, the header alone has {_REQUEST_START_BYTES}")
    header = _new(RequestHeader)
    api_key, header.request_api_version, header.correlation_id, size = _request_start.unpack_from(frame)
    header.request_api_key = api_key
    header.unknown_tagged_fields = ()
    header.client_id, position = _client_id(frame, size)
    try:
        version = request_header_version(api_key, header.request_api_version)
    except ProtocolError as e:
        raise DecodeError(e.reason, "request_api_key") from e
    if version == 1:
        return header, position
    try:
        if frame[position]:
            return header, decode_unknown_tags(frame, position, header)
    except (IndexError, ValueError) as e:
        raise DecodeError(f"invalid tagged section of the header: {e}", "<tags>") from e
    return header, position + 1


def _client_id(frame: bytes, size: int) -> tuple[str | None, int]:
    if size < 0:
        if size == -1:
            return None, _REQUEST_START_BYTES
        raise DecodeError(f"length {size}", "client_id")
    end = _REQUEST_START_BYTES + size
    if end > len(frame):
        raise DecodeError(f"{size} bytes announced, {len(frame) - _REQUEST_START_BYTES} left", "client_id")
    try:
        return frame[_REQUEST_START_BYTES:end].decode(), end
    except UnicodeDecodeError as e:
        raise DecodeError(f"invalid UTF-8: {e.reason}", "client_id") from e


def encode_request(api_key: int, api_version: int, correlation_id: int, client_id: str | None, body: bytes) -> bytes:
    """Return a whole request frame with its length prefix."""
    header = RequestHeader(
        request_api_key=api_key, request_api_version=api_version, correlation_id=correlation_id, client_id=client_id
    ).encode(request_header_version(api_key, api_version))
    return b"".join(((len(header) + len(body)).to_bytes(4, "big"), header, body))


def decode_response_header(frame: bytes, api_key: int, api_version: int) -> tuple[int, int]:
    """Return the correlation id of a response frame and the position of the body."""
    if len(frame) < 4:
        raise DecodeError(f"response of {len(frame)} bytes, the header alone has 4")
    correlation_id = int.from_bytes(frame[:4], "big", signed=True)
    if response_header_version(api_key, api_version) == 0:
        return correlation_id, 4
    from kcoord_protocol.messages import ResponseHeader

    _, position = ResponseHeader.decode_prefix(frame, 0, 1)
    return correlation_id, position


def encode_response(correlation_id: int, api_key: int, api_version: int, body: bytes) -> bytes:
    """Return a whole response frame with its length prefix."""
    return encode_response_start(correlation_id, api_key, api_version, len(body)) + body


def encode_response_start(correlation_id: int, api_key: int, api_version: int, body_bytes: int) -> bytes:
    """Return what precedes the body in a response frame: length prefix and header."""
    if response_header_version(api_key, api_version) == 0:
        return _response_start.pack(4 + body_bytes, correlation_id)
    return _response_start.pack(5 + body_bytes, correlation_id) + _NO_TAGS
