# SPDX-License-Identifier: Apache-2.0
"""Numbers keys with a hash table that numba compiled."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
from numba import njit

from kcoord.pipeline.buffers import Bytes, Ints

_FIRST_KEYS: Final = 1 << 12
_BYTES_PER_KEY: Final = 64
_PRIME = 1_099_511_628_211
_SEED = 1_469_598_103_934_665_603


@njit(cache=True, nogil=True)
def _byte(data: Bytes, at: int) -> int:
    return np.int64(data[at])  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def _hash(data: Bytes, at: int, size: int) -> int:
    """Four FNV hashes side by side, which a processor does at once."""
    one, two, three, four = _SEED, _SEED + 1, _SEED + 2, _SEED + 3
    end = at + size
    while at + 4 <= end:
        one = (one ^ _byte(data, at)) * _PRIME
        two = (two ^ _byte(data, at + 1)) * _PRIME
        three = (three ^ _byte(data, at + 2)) * _PRIME
        four = (four ^ _byte(data, at + 3)) * _PRIME
        at += 4
    while at < end:
        one = (one ^ _byte(data, at)) * _PRIME
        at += 1
    mixed = ((one * 31 ^ two) * 31 ^ three) * 31 ^ four
    return mixed ^ (mixed >> 29) ^ size


@njit(cache=True, nogil=True)
def _is_equal(data: Bytes, at: int, arena: Bytes, start: int, size: int) -> bool:
    for place in range(size):  # noqa: SIM110, numba has no generators here
        if data[at + place] != arena[start + place]:
            return False
    return True


@njit(cache=True, nogil=True)
def _find(
    data: Bytes,
    at: Ints,
    size: Ints,
    row: int,
    found: Ints,
    arena: Bytes,
    starts: Ints,
    hashes: Ints,
    slots: npt.NDArray[np.int64],
    count: int,
) -> tuple[int, int]:
    """(row that it came to, number of keys). It stops before a row for which there is no room."""
    mask = len(slots) - 1
    while row < len(at):
        length = int(size[row])
        if length < 0:
            found[row] = -1
            row += 1
            continue
        begin = int(at[row])
        code = _hash(data, begin, length)
        slot = code & mask
        number = slots[slot]
        while number >= 0 and not (
            hashes[number] == code
            and starts[number + 1] - starts[number] == length
            and _is_equal(data, begin, arena, int(starts[number]), length)
        ):
            slot = (slot + 1) & mask
            number = slots[slot]
        if number < 0:
            start = int(starts[count])
            if 2 * count >= mask or count + 1 >= len(starts) or start + length > len(arena):
                return row, count
            arena[start : start + length] = data[begin : begin + length]
            starts[count + 1] = start + length
            hashes[count] = code
            slots[slot] = count
            number = count
            count += 1
        found[row] = number
        row += 1
    return row, count


@njit(cache=True, nogil=True)
def _place(hashes: Ints, count: int, slots: npt.NDArray[np.int64]) -> None:
    mask = len(slots) - 1
    for number in range(count):
        slot = hashes[number] & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = number


class HashKeyIndex:
    """A table with open addressing over the bytes of all keys, one behind the other."""

    def __init__(self) -> None:
        self._count = 0
        self._arena = np.zeros(_FIRST_KEYS * _BYTES_PER_KEY, np.uint8)
        self._starts = np.zeros(_FIRST_KEYS + 1, np.int64)
        self._hashes = np.zeros(_FIRST_KEYS, np.int64)
        self._slots = np.full(2 * _FIRST_KEYS, -1, np.int64)

    def find(self, data: Bytes, at: Ints, size: Ints) -> tuple[Ints, list[bytes]]:
        """As `KeyIndex.find`."""
        found = np.empty(len(at), np.int64)
        first, row = self._count, 0
        while True:
            tables = self._arena, self._starts, self._hashes, self._slots
            row, self._count = _find(data, at, size, row, found, *tables, self._count)
            if row == len(at):
                break
            self._grow(int(size[row]))
        starts = self._starts[first : self._count + 1].tolist()
        return found, [self._arena[start:end].tobytes() for start, end in pairwise(starts)]

    def _grow(self, size_bytes: int) -> None:
        """Twice as large as it is, and as the next key needs it."""
        self._arena = np.concatenate([self._arena, np.zeros(len(self._arena) + size_bytes, np.uint8)])
        self._starts = np.concatenate([self._starts, np.zeros(len(self._starts), np.int64)])
        self._hashes = np.concatenate([self._hashes, np.zeros(len(self._starts), np.int64)])
        self._slots = np.full(2 * len(self._slots), -1, np.int64)
        _place(self._hashes, self._count, self._slots)
