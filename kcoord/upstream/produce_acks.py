# SPDX-License-Identifier: Apache-2.0
"""The field acks of a Produce request, read without decoding the request. With acks=0 there is no response."""

from __future__ import annotations

import struct
from typing import Final

from kcoord_protocol.primitives import decode_uvarint

_SHORT: Final = struct.Struct(">h")
_FIRST_VERSION_WITH_TRANSACTIONS: Final = 3
_FIRST_FLEXIBLE_VERSION: Final = 9


def produce_acks(data: bytes, position: int, version: int) -> tuple[int, int] | None:
    """Returns the acks of a Produce request whose client id is at `position`, and the position after them.

    Returns None if their bytes have not arrived. Raises ValueError if the request is malformed.
    """
    try:
        position = _after_text(data, position)
        if version >= _FIRST_FLEXIBLE_VERSION:
            count, position = decode_uvarint(data, position)
            for _ in range(count):
                _, position = decode_uvarint(data, position)
                size, position = decode_uvarint(data, position)
                position += size
            size, position = decode_uvarint(data, position)
            position += max(size - 1, 0)
        elif version >= _FIRST_VERSION_WITH_TRANSACTIONS:
            position = _after_text(data, position)
        (acks,) = _SHORT.unpack_from(data, position)
    except (struct.error, IndexError):
        return None
    return int(acks), position + _SHORT.size


def _after_text(data: bytes, position: int) -> int:
    """Returns the position after a nullable text with a length of two bytes."""
    (size,) = _SHORT.unpack_from(data, position)
    return position + _SHORT.size + max(int(size), 0)
