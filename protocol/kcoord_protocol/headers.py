# SPDX-License-Identifier: Apache-2.0
"""Request and response headers, and whole frames.

The header's version follows from the API's version: flexible versions have a header with tagged fields. The response
header of ApiVersions never has them, because its reader may not know which version was answered (KIP-511).
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.decoder_source import decode_unknown_tags
from kcoord_protocol.errors import DecodeError, ProtocolError
from kcoord_protocol.messages import RequestHeader

_NO_TAGS: Final = b"\x00"
_request_start: Final = Struct(">hhih")
_response_start: Final = Struct(">ii")
_REQUEST_START_BYTES: Final = _request_start.size
_new: Final = object.__new__

# First flexible version by API key, filled on first use.
_flexible_requests: Final[dict[int, int]] = {}
_flexible_responses: Final[dict[int, int]] = {}


def request_header_version(api_key: int, api_version: int) -> int:
    """1 or 2; UnsupportedVersionError for an API that has no schema."""
    first = _flexible_requests.get(api_key)
    if first is None:
        versions = request_class(api_key).flexible_versions
        first = _flexible_requests[api_key] = versions.start if versions else 0x8000
    return 2 if api_version >= first else 1


def response_header_version(api_key: int, api_version: int) -> int:
    """0 or 1; UnsupportedVersionError for an API that has no schema."""
    first = _flexible_responses.get(api_key)
    if first is None:
        versions = response_class(api_key).flexible_versions
        first = versions.start if versions and api_key != ApiKey.API_VERSIONS else 0x8000
        _flexible_responses[api_key] = first
    return 1 if api_version >= first else 0


def decode_request_header(frame: bytes) -> tuple[RequestHeader, int]:
    """The header of a request frame, and where the body starts.

    An API without schema is a DecodeError: nobody can tell where its header ends. The version may be
    one that does not exist.
    """
    if len(frame) < _REQUEST_START_BYTES:
        raise DecodeError(f"request of {len(frame)} bytes")
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
    """A whole request frame, with its length."""
    header = RequestHeader(
        request_api_key=api_key, request_api_version=api_version, correlation_id=correlation_id, client_id=client_id
    ).encode(request_header_version(api_key, api_version))
    return b"".join(((len(header) + len(body)).to_bytes(4, "big"), header, body))


def decode_response_header(frame: bytes, api_key: int, api_version: int) -> tuple[int, int]:
    """The correlation id of a response frame, and where the body starts."""
    if len(frame) < 4:
        raise DecodeError(f"response of {len(frame)} bytes")
    correlation_id = int.from_bytes(frame[:4], "big", signed=True)
    if response_header_version(api_key, api_version) == 0:
        return correlation_id, 4
    from kcoord_protocol.messages import ResponseHeader

    _, position = ResponseHeader.decode_prefix(frame, 0, 1)
    return correlation_id, position


def encode_response(correlation_id: int, api_key: int, api_version: int, body: bytes) -> bytes:
    """A whole response frame, with its length."""
    if response_header_version(api_key, api_version) == 0:
        return _response_start.pack(4 + len(body), correlation_id) + body
    return _response_start.pack(5 + len(body), correlation_id) + _NO_TAGS + body
