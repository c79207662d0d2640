# SPDX-License-Identifier: Apache-2.0
"""What workers of one broker process send each other, over Unix sockets that nobody else can reach: Kafka's length
before each frame, then a kind and what belongs to it.

Both ends are the same release, started by the same supervisor, so there are no versions. Requests and responses are
Kafka's own, in any order; batches of the metadata log flow to those who follow it, and they tell how far they are.
HOLD, HELD and RELEASE keep creation times in order (`kcoord.metadata.creation_order`); a follower that takes part sends
its latest creation time with FOLLOW.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

MAX_FRAME_BYTES: Final = 1 << 30


class FrameKind(IntEnum):
    REQUEST = 1
    RESPONSE = 2
    FOLLOW = 3
    BATCHES = 4
    APPLIED = 5
    HOLD = 6
    HELD = 7
    RELEASE = 8


_LENGTH: Final = Struct(">i")
_REQUEST: Final = Struct(">Bihhhh")
_RESPONSE: Final = Struct(">Bi")
_OFFSET: Final = Struct(">Bq")
_TIME: Final = Struct(">q")


@dataclass(slots=True)
class PeerRequest:
    """A request that a worker makes, or passes on for a client of its own."""

    correlation_id: int
    api_key: int
    version: int
    client_id: str
    client_host: str
    body: bytes

    def encode(self) -> bytes:
        client_id, client_host = self.client_id.encode(), self.client_host.encode()
        head = _REQUEST.pack(
            FrameKind.REQUEST, self.correlation_id, self.api_key, self.version, len(client_id), len(client_host)
        )
        return _framed(head + client_id + client_host + self.body)

    @classmethod
    def decode(cls, frame: bytes) -> PeerRequest:
        _, correlation_id, api_key, version, id_length, host_length = _REQUEST.unpack_from(frame)
        host_at = _REQUEST.size + id_length
        body_at = host_at + host_length
        client_id, client_host = frame[_REQUEST.size : host_at].decode(), frame[host_at:body_at].decode()
        return cls(correlation_id, api_key, version, client_id, client_host, frame[body_at:])


def encode_response(correlation_id: int, body: bytes) -> bytes:
    return _framed(_RESPONSE.pack(FrameKind.RESPONSE, correlation_id) + body)


def decode_response(frame: bytes) -> tuple[int, bytes]:
    """Correlation id and body."""
    _, correlation_id = _RESPONSE.unpack_from(frame)
    return correlation_id, frame[_RESPONSE.size :]


def encode_offset(kind: FrameKind, offset: int, data: bytes = b"") -> bytes:
    """FOLLOW: from where; APPLIED: up to where; BATCHES: where the log ends, and some batches of it."""
    return _framed(_OFFSET.pack(kind, offset) + data)


def encode_hold(kind: FrameKind, ticket: int, time_ms: int | None = None) -> bytes:
    """HOLD: asks for the latest creation time of groups, or says the limit; HELD: the answer; RELEASE: it is over."""
    return encode_offset(kind, ticket, b"" if time_ms is None else encode_time(time_ms))


def encode_time(time_ms: int) -> bytes:
    return _TIME.pack(time_ms)


def decode_time(data: bytes) -> int | None:
    """The creation time in a frame, None if there is none."""
    return int(_TIME.unpack(data)[0]) if data else None


def decode_offset(frame: bytes) -> tuple[int, bytes]:
    _, offset = _OFFSET.unpack_from(frame)
    return offset, frame[_OFFSET.size :]


def kind_of(frame: bytes) -> FrameKind:
    return FrameKind(frame[0])


def _framed(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body
