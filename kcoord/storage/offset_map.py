# SPDX-License-Identifier: Apache-2.0
"""A map from keys to their last offsets in the dirty part of a log, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ENTRY_BYTES: Final = 180
"""The memory of an entry without its key: two objects, and a share of a hash table that has just grown."""


class OffsetMap:
    """Last offsets by key. The keys themselves are stored, not hashes, so two keys are never confused."""

    __slots__ = ("_max_bytes", "_offsets", "latest_offset", "size_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._offsets: dict[bytes, int] = {}
        self.size_bytes = 0
        self.latest_offset = -1
        """The map has every key of the dirty part up to this offset."""

    def __len__(self) -> int:
        return len(self._offsets)

    def put(self, key: bytes, offset: int) -> bool:
        """Sets the last offset of a key. Returns False if a new key does not fit. The first key always fits."""
        if key not in self._offsets:
            size = self.size_bytes + ENTRY_BYTES + len(key)
            if size > self._max_bytes and self._offsets:
                return False
            self.size_bytes = size
        self._offsets[key] = offset
        self.latest_offset = offset
        return True

    def put_all(self, keys: Sequence[bytes], offsets: Sequence[int]) -> bool:
        """Sets the last offsets of keys of equal length. Returns False, without any change, if they may not all fit."""
        entry_bytes = ENTRY_BYTES + len(keys[0])
        if self.size_bytes + entry_bytes * len(keys) > self._max_bytes:
            return False
        earlier = len(self._offsets)
        self._offsets.update(zip(keys, offsets, strict=True))
        self.size_bytes += (len(self._offsets) - earlier) * entry_bytes
        self.latest_offset = offsets[-1]
        return True

    def last_offsets(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the last offset of every key, as `get` does."""
        return [self._offsets.get(key, -1) for key in keys]

    def get(self, key: bytes) -> int:
        """Returns the last offset of a key, or -1 if the map does not have the key."""
        return self._offsets.get(key, -1)
