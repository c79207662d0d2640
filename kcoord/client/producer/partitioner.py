# SPDX-License-Identifier: Apache-2.0
"""Which partition a record goes to: by murmur2 of its key as Java's client does it, else one that sticks for a batch.

Pure; the random numbers come from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import Final

_MULTIPLIER: Final = 0x5BD1E995
_SEED: Final = 0x9747B28C
_MASK: Final = 0xFFFF_FFFF
_WORDS: Final = Struct("<I")


def murmur2(data: bytes) -> int:
    """The 32-bit hash, as a signed number, of Java's `Utils.murmur2`."""
    length = len(data)
    value = _SEED ^ length
    whole = length & ~3
    for (word,) in _WORDS.iter_unpack(data[:whole]):
        chunk = word * _MULTIPLIER & _MASK
        chunk = (chunk ^ chunk >> 24) * _MULTIPLIER & _MASK
        value = value * _MULTIPLIER & _MASK ^ chunk
    if whole < length:
        value = (value ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    value = (value ^ value >> 13) * _MULTIPLIER & _MASK
    value ^= value >> 15
    return value - (1 << 32) if value >> 31 else value


def partition_for_key(key: bytes, partition_count: int) -> int:
    """The partition of a key; it changes when the topic grows."""
    return (murmur2(key) & 0x7FFF_FFFF) % partition_count


class StickyPartitions:
    """Records without a key share a partition until its batch is closed (KIP-480): fewer, fuller batches."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._current: dict[str, int] = {}

    def partition(self, topic: str, available: Sequence[int]) -> int:
        """The topic's present choice among the partitions that have a leader."""
        current = self._current.get(topic)
        if current is None or current not in available:
            current = self._current[topic] = self._choose(available, None)
        return current

    def batch_closed(self, topic: str, partition: int, available: Sequence[int]) -> None:
        """Choose another partition, if this one was the choice."""
        if self._current.get(topic) == partition and available:
            self._current[topic] = self._choose(available, partition)

    def _choose(self, available: Sequence[int], other_than: int | None) -> int:
        choices = [each for each in available if each != other_than] or list(available)
        return choices[int(self._random() * len(choices))]
