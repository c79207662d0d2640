# SPDX-License-Identifier: Apache-2.0
"""Which shard of the coordinator owns a group.

Kafka's clients ask any broker and every broker has to answer alike, so the hash is Java's hash of the group id.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_UINT32: Final = 0xFFFF_FFFF
_SIGN_BIT: Final = 0x8000_0000
_INT32_MIN: Final = -0x8000_0000


def java_string_hash(text: str) -> int:
    """The signed 32-bit hash that Java gives a string: base 31 over its UTF-16 code units."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (value * 31 + unit) & _UINT32
    else:
        data = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(data[::2], data[1::2], strict=True):
            value = (value * 31 + (high << 8 | low)) & _UINT32
    return value - (value & _SIGN_BIT) * 2


@lru_cache(maxsize=8192)
def partition_for(group_id: str, partitions: int) -> int:
    """The partition of `__consumer_offsets` that holds a group: the absolute value of the hash, modulo the number of
    partitions.

    The smallest int32 has no absolute value in Java; Kafka takes 0 for it (observed in Kafka 4.3.1's folders).
    """
    value = java_string_hash(group_id)
    return 0 if value == _INT32_MIN else abs(value) % partitions
