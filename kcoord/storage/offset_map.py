# SPDX-License-Identifier: Apache-2.0
"""The last offset of each key in the part of a log that is not clean yet, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ENTRY_BYTES: Final = 180
"""What an entry costs besides its key: two objects, and its share of a hash table that has just grown."""


class OffsetMap:
    """Keys are compared as they are: no two of them are ever taken for one."""

    __slots__ = ("_max_bytes", "_offsets", "latest_offset", "size_bytes")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._offsets: dict[bytes, int] = {}
        self.size_bytes = 0
        self.latest_offset = -1
        """Everything up to here has been looked at."""

    def __len__(self) -> int:
        return len(self._offsets)

    def put(self, key: bytes, offset: int) -> bool:
        """False where a new key does not fit any more. One key always fits."""
        if key not in self._offsets:
            size = self.size_bytes + ENTRY_BYTES + len(key)
            if size > self._max_bytes and self._offsets:
                return False
            self.size_bytes = size
        self._offsets[key] = offset
        self.latest_offset = offset
        return True

    def put_all(self, keys: Sequence[bytes], offsets: Sequence[int]) -> bool:
        """Keys of one length; False, and nothing is done, where they might not all fit."""
        entry_bytes = ENTRY_BYTES + len(keys[0])
        if self.size_bytes + entry_bytes * len(keys) > self._max_bytes:
            return False
        known = len(self._offsets)
        self._offsets.update(zip(keys, offsets, strict=True))
        self.size_bytes += (len(self._offsets) - known) * entry_bytes
        self.latest_offset = offsets[-1]
        return True

    def last_offsets(self, keys: Sequence[bytes]) -> list[int]:
        """As `get`, for many keys."""
        return [self._offsets.get(key, -1) for key in keys]

    def get(self, key: bytes) -> int:
        """-1 for a key that does not occur."""
        return self._offsets.get(key, -1)
