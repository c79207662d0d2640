# SPDX-License-Identifier: Apache-2.0
"""The frames that workers of one broker process send each other.

Theory of operation
-------------------
Each worker listens on a Unix socket in a folder that only the user of the broker can open. A worker opens one
connection to each worker that it asks for something (`kcoord.server.workers.peer_link`). A worker that is not the
controller opens one more connection to the controller, to follow the metadata log
(`kcoord.server.workers.metadata_follower`). `kcoord.server.workers.peer_listener` serves both.

A frame is its length in 4 bytes, as in Kafka, then one byte for the kind, then the content:

    REQUEST    asker to server           a request of Kafka's protocol, with id, host and principal of the client
    RESPONSE   server to asker           the response, by correlation id
    FOLLOW     follower to controller    offset to send from, broker id, process id, latest creation time of its groups
    BATCHES    controller to follower    the end offset of the metadata log, and some batches
    APPLIED    follower to controller    the offset up to which the follower has published the log
    HOLD       controller to follower    a ticket: asks for the latest creation time; with a time: states the limit
    HELD       follower to controller    the ticket and the latest creation time of its groups
    RELEASE    controller to follower    the operation of the ticket is over

What orders what: frames of one connection arrive in the order in which they were sent. Responses may overtake each
other. BATCHES come in the order of the log, and RELEASE comes after the batches of its operation. HOLD, HELD and
RELEASE keep creation times in order (`kcoord.metadata.creation_order`).

If a worker ends, its connections break. Requests in flight fail and are never sent again by the link: only the sender
knows whether that is safe. A follower connects again and continues at its own offset.

Both ends are the same release, started by the same supervisor, so the frames have no versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

MAX_FRAME_BYTES: Final = 1 << 30


class FrameKind(IntEnum):
    """The first byte of a frame. The module text describes the content of each kind."""

    REQUEST = 1
    RESPONSE = 2
    FOLLOW = 3
    BATCHES = 4
    APPLIED = 5
    HOLD = 6
    HELD = 7
    RELEASE = 8


_LENGTH: Final = Struct(">i")
_REQUEST: Final = Struct(">Bihhhhi")
_RESPONSE: Final = Struct(">Bi")
_OFFSET: Final = Struct(">Bq")
_TIME: Final = Struct(">q")
_FOLLOWER: Final = Struct(">iiq")


@dataclass(slots=True)
class PeerRequest:
    """A request that a worker makes itself, or passes on for one of its clients."""

    correlation_id: int
    api_key: int
    version: int
    client_id: str
    client_host: str
    principal: str
    """The principal of the client; empty if the worker makes the request itself."""
    body: bytes

    def encode(self) -> bytes:
        """Returns the frame with its length."""
        names = [name.encode() for name in (self.client_id, self.client_host, self.principal)]
        head = _REQUEST.pack(
            FrameKind.REQUEST, self.correlation_id, self.api_key, self.version, *(len(name) for name in names)
        )
        return _framed(b"".join((head, *names, self.body)))

    @classmethod
    def decode(cls, frame: bytes) -> PeerRequest:
        """Reads a frame without its length."""
        _, correlation_id, api_key, version, *lengths = _REQUEST.unpack_from(frame)
        names = []
        position = _REQUEST.size
        for length in lengths:
            names.append(frame[position : position + length].decode())
            position += length
        client_id, client_host, principal = names
        return cls(correlation_id, api_key, version, client_id, client_host, principal, frame[position:])


def encode_response(correlation_id: int, body: bytes) -> bytes:
    """Returns a RESPONSE frame."""
    return _framed(_RESPONSE.pack(FrameKind.RESPONSE, correlation_id) + body)


def decode_response(frame: bytes) -> tuple[int, bytes]:
    """Returns the correlation id and the body of a RESPONSE frame."""
    _, correlation_id = _RESPONSE.unpack_from(frame)
    return correlation_id, frame[_RESPONSE.size :]


def encode_offset(kind: FrameKind, offset: int, data: bytes = b"") -> bytes:
    """Returns a frame with an offset (FOLLOW, APPLIED, BATCHES) or a ticket, and more bytes."""
    return _framed(_OFFSET.pack(kind, offset) + data)


def encode_follow(offset: int, broker_id: int, process_id: int, newest_ms: int) -> bytes:
    """Returns a FOLLOW frame."""
    return encode_offset(FrameKind.FOLLOW, offset, _FOLLOWER.pack(broker_id, process_id, newest_ms))


def decode_follower(data: bytes) -> tuple[int, int, int]:
    """Returns the broker id, the process id and the creation time in the last part of a FOLLOW frame."""
    broker_id, process_id, newest_ms = _FOLLOWER.unpack(data)
    return broker_id, process_id, newest_ms


def encode_hold(kind: FrameKind, ticket: int, time_ms: int | None = None) -> bytes:
    """Returns a frame with a ticket, and a time if there is one (HOLD, HELD, RELEASE)."""
    return encode_offset(kind, ticket, b"" if time_ms is None else _TIME.pack(time_ms))


def decode_time(data: bytes) -> int | None:
    """Returns the creation time in the last part of a frame, or None if the part is empty."""
    return int(_TIME.unpack(data)[0]) if data else None


def decode_offset(frame: bytes) -> tuple[int, bytes]:
    """Returns the offset or ticket of a frame, and the bytes after it."""
    _, offset = _OFFSET.unpack_from(frame)
    return offset, frame[_OFFSET.size :]


def kind_of(frame: bytes) -> FrameKind:
    """Returns the kind of a frame without its length."""
    return FrameKind(frame[0])


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body
