# SPDX-License-Identifier: Apache-2.0
"""Chooses the partition of a record: by murmur2 of its key, as Java's client does, or a sticky one without a key.

Pure: the caller supplies the random numbers.
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
    """Returns the 32-bit hash of Java's `Utils.murmur2`, as a signed number."""
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
    """Returns the partition of a key. It changes when partitions are added to the topic."""
    return (murmur2(key) & 0x7FFF_FFFF) % partition_count


class StickyPartitions:
    """Chooses one partition per topic for records without a key, until its batch is closed (KIP-480).

    This makes fewer and larger batches.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._current: dict[str, int] = {}

    def partition(self, topic: str, available: Sequence[int]) -> int:
        """Returns the topic's current partition. Chooses another one if it is not in `available`."""
        current = self._current.get(topic)
        if current is None or current not in available:
            current = self._current[topic] = self._choose(available, None)
        return current

    def batch_closed(self, topic: str, partition: int, available: Sequence[int]) -> None:
        """Chooses another partition for the topic if `partition` is the current one."""
        if self._current.get(topic) == partition and available:
            self._current[topic] = self._choose(available, partition)

    def _choose(self, available: Sequence[int], other_than: int | None) -> int:
        choices = [partition for partition in available if partition != other_than] or list(available)
        return choices[int(self._random() * len(choices))]
