# SPDX-License-Identifier: Apache-2.0
"""Damage on two levels: changed bytes of a valid request, and odd field values in a message that follows its schema.

All choices come from a seeded `random.Random`, so that a finding is reproducible.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

from kcoord_protocol.message import Message, Struct
from kcoord_protocol.schema import INT_RANGES, FieldSchema, StructSchema

_BYTES: Final = (0x00, 0x01, 0x02, 0x7F, 0x80, 0xFE, 0xFF)
_LENGTHS: Final = tuple(
    length.to_bytes(size, "big", signed=True)
    for size in (2, 4)
    for length in (-(1 << size * 8 - 1), -2, -1, 0, 1, 2, 255, 1 << 14, (1 << size * 8 - 1) - 1)
)
_VARINTS: Final = (b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\x80\x80\x80\x80\x80\x01", b"\x80\x00", b"\x80")
_PIECES: Final = _LENGTHS + _VARINTS
_LONGEST_CUT: Final = 8

TOPICS: Final = ("orders", "new", "t", "", ".", "no/topic", "x" * 250, "__cluster_metadata", "é\u65e5\x00")
GROUPS: Final = ("confluent-range", "own", "python", "g1", "g2", "", "x" * 5000, "\x00")
MEMBERS: Final = ("", "m1", "m2", "static", "x" * 300)
_TEXTS: Final = {"group": GROUPS, "member": MEMBERS, "instance": MEMBERS, "regex": ("o.*", "(((a*)*)*)*b", "[", "\\C")}


def damaged(data: bytes, chance: Random) -> bytes:
    """Returns `data` with one to three changes: bits, bytes, lengths, varints, or cut, doubled or inserted pieces."""
    result = bytearray(data)
    bits = chance.getrandbits(64)
    for _ in range(1 + bits % 3):
        if not result:
            break
        bits >>= 8
        position = (bits >> 8) % len(result)
        choice = bits & 7
        if choice < 2:
            result[position] ^= 1 << (bits >> 24 & 7)
        elif choice == 2:
            result[position] = _BYTES[(bits >> 24) % len(_BYTES)]
        elif choice < 5:
            piece = _PIECES[(bits >> 24) % len(_PIECES)]
            result[position : position + len(piece) * (choice & 1)] = piece
        elif choice == 5:
            del result[position : position + 1 + (bits >> 24) % _LONGEST_CUT]
        elif choice == 6:
            result[position:position] = result[position : position + 1 + (bits >> 24) % _LONGEST_CUT]
        else:
            del result[position:]
        bits = chance.getrandbits(64)
    return bytes(result)


def plausible(cls: type[Message], version: int, chance: Random) -> Message:
    """Returns a message whose names may exist. Most of its numbers are small."""
    message = cls()
    _fill(message, cls.message_schema.root, cls, version, chance)
    return message


def _fill(target: Struct, schema: StructSchema, cls: type[Message], version: int, chance: Random) -> None:
    for field in schema.fields:
        if version not in field.versions or chance.random() < 0.1:
            continue
        if version in field.nullable_versions and chance.random() < 0.2:
            value: Any = None
        elif field.is_array:
            value = [_item(field, cls, version, chance) for _ in range(chance.choice((0, 1, 1, 2, 3)))]
        else:
            value = _item(field, cls, version, chance)
        setattr(target, field.attribute, value)
    if version in cls.flexible_versions and chance.random() < 0.05:
        target.unknown_tagged_fields = ((chance.choice((50, 2**31, 2**32 - 1)), chance.randbytes(3)),)


def _item(field: FieldSchema, cls: type[Message], version: int, chance: Random) -> Any:
    if field.struct is not None:
        item = getattr(cls, field.element_type)()
        _fill(item, field.struct, cls, version, chance)
        return item
    kind = field.element_type
    if kind in INT_RANGES:
        low, high = INT_RANGES[kind]
        small = (-2, -1, 0, 0, 1, 2, 3, 10, 1000)
        number = chance.choice(small) if chance.random() < 0.9 else chance.choice((low, high, high // 2))
        return min(max(low, number), high)
    if kind == "string":
        pool = next((texts for word, texts in _TEXTS.items() if word in field.attribute), TOPICS)
        return chance.choice(pool)
    if kind in ("bytes", "records"):
        return chance.randbytes(chance.choice((0, 1, 12, 61, 100)))
    if kind == "uuid":
        return bytes(16) if chance.random() < 0.5 else chance.randbytes(16)
    if kind == "bool":
        return chance.random() < 0.5
    return chance.choice((0.0, -1.0, 1e308, float("inf"), float("nan")))
