# SPDX-License-Identifier: Apache-2.0
"""Large responses: a thread makes, encodes and frees them, and none of these steps keeps the GIL for long."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final

from kcoord_protocol.message import Message, Struct
from kcoord_protocol.primitives import encode_uvarint

_INT32: Final = struct.Struct(">i")

_FREED_AT_ONCE: Final = 500
_ENCODED_AT_ONCE: Final = 2_000


class EncodedResponse:
    """A response that a thread has encoded already, since it is large.

    If its version has ThrottleTimeMs, that is the first field.
    """

    __slots__ = ("_body", "_has_throttle_time", "throttle_time_ms")

    def __init__(self, body: bytes, *, has_throttle_time: bool = True) -> None:
        self._body = body
        self._has_throttle_time = has_throttle_time
        self.throttle_time_ms = 0

    def encode(self, version: int) -> bytes:
        """Returns the body. It has the version in which the thread has encoded it."""
        if not self._has_throttle_time:
            return self._body
        return b"".join((_INT32.pack(self.throttle_time_ms), memoryview(self._body)[_INT32.size :]))

    def copy(self) -> EncodedResponse:
        """Returns the same response for another client."""
        return EncodedResponse(self._body, has_throttle_time=self._has_throttle_time)


def make_encoded(make: Callable[[], Message], version: int) -> EncodedResponse:
    """Makes a response, encodes it and frees it."""
    response = make()
    first = response.schema.fields[0]
    has_throttle_time = first.attribute == "throttle_time_ms" and version in first.versions
    encoded = EncodedResponse(encode_in_parts(response, version), has_throttle_time=has_throttle_time)
    encoded.throttle_time_ms = getattr(response, "throttle_time_ms", 0)
    free(response)
    return encoded


def encode_in_parts(message: Message, version: int) -> bytes:
    """Encodes a message part by part if it has a long list of structs.

    Joining the fields of 100,000 structs at once would keep the GIL for 30 ms. So a thread would block the event loop.
    """
    fields: Sequence[str] = message.__slots__
    lists = {field: items for field in fields if type(items := getattr(message, field)) is list}
    name = max(lists, key=lambda name: len(lists[name]))
    items = lists[name]
    at_once = max(_ENCODED_AT_ONCE // _size_of(items), 1)
    if len(items) <= at_once:
        return message.encode(version)

    def encode(part: list[object]) -> bytes:
        setattr(message, name, part)
        return message.encode(version)

    is_flexible = version in message.flexible_versions
    empty, single = encode([]), encode(items[:1])
    # Both are equal up to the last byte of the count: the only or the fourth one.
    at = next(at for at, (left, right) in enumerate(zip(empty, single, strict=False)) if left != right)
    at -= 0 if is_flexible else _INT32.size - 1

    def count(number: int) -> bytes:
        return encode_uvarint(number + 1) if is_flexible else _INT32.pack(number)

    tail = empty[at + len(count(0)) :]
    parts = [empty[:at], count(len(items))]
    for start in range(0, len(items), at_once):
        part = items[start : start + at_once]
        encoded = encode(part)
        parts.append(encoded[at + len(count(len(part))) : len(encoded) - len(tail)])
    setattr(message, name, items)
    return b"".join([*parts, tail])


def _size_of(items: list[object]) -> int:
    """Returns about how many structs an item has in its own lists, at least 1. All items have about as many."""
    first = items[0] if items else None
    fields = [getattr(first, name) for name in first.__slots__] if isinstance(first, Struct) else []
    return max([len(field) for field in fields if type(field) is list], default=0) or 1


def free(message: Struct) -> None:
    """Empties the lists of messages in a message, a few items at a time. Other lists may belong to other objects.

    Freeing a large list at once would keep the GIL for up to 30 ms. So a thread would block the event loop.
    """
    for name in message.__slots__:
        items = getattr(message, name)
        if type(items) is list and items and isinstance(items[0], Struct):
            if len(items) <= _FREED_AT_ONCE:
                for item in items:
                    free(item)
            while items:
                del items[-_FREED_AT_ONCE:]
