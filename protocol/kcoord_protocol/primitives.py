# SPDX-License-Identifier: Apache-2.0
"""Variable-length integers and the length-prefixed pieces that generated codecs share.

Decoders take (data, position) and return (value, next position). They raise IndexError or ValueError on malformed
input. The caller turns these into a DecodeError that names the field.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

MAX_STRING_BYTES: Final = 0x7FFF
MAX_LENGTH: Final = 0x7FFF_FFFF
MAX_ARRAY_ELEMENTS: Final = 1_000_000
"""The largest array that Kafka 4.4 decodes. Older releases limit arrays only by the size of the message."""
MAX_TAGGED_FIELDS: Final = 10_000
"""The limit per struct, as in Kafka 4.4. Messages have few; without it, unknown tagged fields could fill the memory."""
_MAX_UINT32: Final = 0xFFFF_FFFF
_MAX_UINT64: Final = 0xFFFF_FFFF_FFFF_FFFF
_MAX_CACHED_RUN: Final = 256


class RunStructs(dict[int, Struct]):
    """Maps `count` to the struct object of a run of `count` equal integers. Only short runs are cached."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def __missing__(self, count: int) -> Struct:
        run = Struct(f">{count}{self._code}")
        if count <= _MAX_CACHED_RUN:
            self[count] = run
        return run


def decode_uvarint(data: bytes, position: int) -> tuple[int, int]:
    """Read an unsigned 32-bit varint of at most five bytes."""
    byte = data[position]
    if byte < 0x80:
        return byte, position + 1
    value = byte & 0x7F
    for shift in (7, 14, 21, 28):
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _MAX_UINT32:
                raise ValueError("varint exceeds 32 bits")
            return value, position + 1
    raise ValueError("varint is longer than 5 bytes")


def decode_uvarlong(data: bytes, position: int) -> tuple[int, int]:
    """Read an unsigned 64-bit varint of at most ten bytes."""
    value = shift = 0
    while shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > _MAX_UINT64:
                raise ValueError("varlong exceeds 64 bits")
            return value, position
        shift += 7
    raise ValueError("varlong is longer than 10 bytes")


def decode_varlong(data: bytes, position: int) -> tuple[int, int]:
    """Read a zigzag 64-bit varint."""
    value, position = decode_uvarlong(data, position)
    return (value >> 1) ^ -(value & 1), position


def encode_uvarint(value: int) -> bytes:
    """Write an unsigned varint of any size (32-bit and 64-bit varints have the same form)."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    if value < 0:
        raise ValueError(f"unsigned varint of {value}")
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def encode_varint(value: int) -> bytes:
    """Write a zigzag 32-bit varint."""
    if not -0x8000_0000 <= value <= 0x7FFF_FFFF:
        raise ValueError(f"{value} does not fit in a 32-bit varint")
    return encode_uvarint((value << 1) ^ (value >> 31))


def encode_varlong(value: int) -> bytes:
    """Write a zigzag 64-bit varint."""
    if not -0x8000_0000_0000_0000 <= value <= 0x7FFF_FFFF_FFFF_FFFF:
        raise ValueError(f"{value} does not fit in a 64-bit varint")
    return encode_uvarint((value << 1) ^ (value >> 63))


_ONE_BYTE: Final = tuple(bytes((value,)) for value in range(0x80))


def decode_compact_string(data: bytes, position: int) -> tuple[str, int]:
    """Read a compact string of any legal length. Generated code reads one-byte lengths itself."""
    size, position = decode_uvarint(data, position)
    if size == 0:
        raise ValueError("null in a field that is not nullable")
    end = position + size - 1
    if size > MAX_STRING_BYTES + 1 or end > len(data):
        raise ValueError("invalid string length")
    return data[position:end].decode(), end


def decode_compact_bytes(data: bytes, position: int) -> tuple[bytes, int]:
    """Read compact bytes of any legal length."""
    size, position = decode_uvarint(data, position)
    if size == 0:
        raise ValueError("null in a field that is not nullable")
    end = position + size - 1
    if end > len(data):
        raise ValueError("invalid bytes length")
    return data[position:end], end


def decode_compact_nullable_string(data: bytes, position: int) -> tuple[str | None, int]:
    """Read a compact string or null. The length of null, zero, may be encoded in more bytes than it needs."""
    size, end = decode_uvarint(data, position)
    return (None, end) if size == 0 else decode_compact_string(data, position)


def decode_compact_nullable_bytes(data: bytes, position: int) -> tuple[bytes | None, int]:
    """Read compact bytes or null. The length of null, zero, may be encoded in more bytes than it needs."""
    size, position = decode_uvarint(data, position)
    if size == 0:
        return None, position
    end = position + size - 1
    if end > len(data):
        raise ValueError("invalid bytes length")
    return data[position:end], end
