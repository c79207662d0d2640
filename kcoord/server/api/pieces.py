# SPDX-License-Identifier: Apache-2.0
"""Framed responses to Fetch as pieces: bytes, and parts of files that only the connection reads or sends."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, cast

from kcoord.storage.file_system import FileSlice
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_response_start

if TYPE_CHECKING:
    from kcoord_protocol.messages import FetchResponse

Pieces: TypeAlias = list[bytes | FileSlice]


def encode_in_pieces(correlation_id: int, version: int, response: object) -> Pieces | None:
    """Returns a framed response to Fetch. None if no parts of files are among its records."""
    fetched = cast("FetchResponse", response)
    if not any(isinstance(part.records, FileSlice) for topic in fetched.responses for part in topic.partitions):
        return None
    encoded: list[bytes | FileSlice] = [*fetched.encode_pieces(version)]
    pieces: Pieces = []
    joined = [encode_response_start(correlation_id, ApiKey.FETCH, version, sum(map(len, encoded)))]
    for piece in encoded:
        if isinstance(piece, FileSlice):
            pieces += (b"".join(joined), piece)
            joined.clear()
        else:
            joined.append(piece)
    if joined:
        pieces.append(b"".join(joined))
    return pieces


def read_pieces(pieces: Pieces) -> bytes:
    """Returns the pieces as bytes, and reads the parts of files."""
    return b"".join([piece if isinstance(piece, bytes) else piece.read() for piece in pieces])
