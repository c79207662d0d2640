# SPDX-License-Identifier: Apache-2.0
"""Numbers keys with a hash table compiled by numba."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numba import njit

from kcoord.pipeline.buffers import Bytes, Ints, Words, overlapping_words

_FIRST_KEYS: Final = 1 << 12
_WORDS_PER_KEY: Final = 8
_WORD_BYTES = 8
_ONE = np.uint64(1)
_BITS = np.uint64(3)
_FOLD = np.uint64(32)
_PRIME = np.uint64(0x9E37_79B9_7F4A_7C15)
_SEED = np.uint64(0x2545_F491_4F6C_DD1D)


@njit(cache=True, nogil=True)
def _last_word(words: Words, at: int, rest: int) -> np.uint64:
    """Returns the next `rest` bytes (1 to 7) as a word."""
    return words[at] & ((_ONE << (np.uint64(rest) << _BITS)) - _ONE)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _hash(words: Words, at: int, size: int) -> np.uint64:
    code = _SEED ^ np.uint64(size)
    end = at + size
    while at + _WORD_BYTES <= end:
        code = (code ^ words[at]) * _PRIME
        code ^= code >> _FOLD
        at += _WORD_BYTES
    if at < end:
        code = (code ^ _last_word(words, at, end - at)) * _PRIME
    return code ^ (code >> _FOLD)


@njit(cache=True, nogil=True)
def _is_equal(words: Words, at: int, size: int, arena: Words, start: int) -> bool:
    end = at + size
    while at + _WORD_BYTES <= end:
        if words[at] != arena[start]:
            return False
        at += _WORD_BYTES
        start += 1
    return at == end or _last_word(words, at, end - at) == arena[start]


@njit(cache=True, nogil=True)
def _keep(words: Words, at: int, size: int, arena: Words, start: int) -> None:
    end = at + size
    while at + _WORD_BYTES <= end:
        arena[start] = words[at]
        at += _WORD_BYTES
        start += 1
    if at < end:
        arena[start] = _last_word(words, at, end - at)


@njit(cache=True, nogil=True)
def _find(
    words: Words,
    at: Ints,
    size: Ints,
    row: int,
    numbers: Ints,
    arena: Words,
    starts: Ints,
    sizes: Ints,
    hashes: Words,
    slots: Ints,
    count: int,
) -> tuple[int, int]:
    """Writes the numbers of the keys from `row` on. Returns (next row, number of keys in the table).

    Stops before a row with a new key for which the table has no room.
    """
    mask = np.uint64(len(slots) - 1)
    while row < len(at):
        length = size[row]
        if length < 0:
            numbers[row] = -1
            row += 1
            continue
        begin = at[row]
        code = _hash(words, begin, length)
        slot = np.int64(code & mask)
        number = slots[slot]
        while number >= 0 and not (
            hashes[number] == code
            and sizes[number] == length
            and _is_equal(words, begin, length, arena, starts[number])
        ):
            slot = (slot + 1) & (len(slots) - 1)
            number = slots[slot]
        if number < 0:
            start = starts[count]
            behind = start + (length + _WORD_BYTES - 1) // _WORD_BYTES
            if 2 * count >= len(slots) - 1 or count >= len(sizes) or behind > len(arena):
                return row, count
            _keep(words, begin, length, arena, start)
            starts[count + 1] = behind
            sizes[count] = length
            hashes[count] = code
            slots[slot] = count
            number = count
            count += 1
        numbers[row] = number
        row += 1
    return row, count


@njit(cache=True, nogil=True)
def _place(hashes: Words, count: int, slots: Ints) -> None:
    mask = np.uint64(len(slots) - 1)
    for number in range(count):
        slot = np.int64(hashes[number] & mask)
        while slots[slot] >= 0:
            slot = (slot + 1) & (len(slots) - 1)
        slots[slot] = number


class HashKeyIndex:
    """A hash table with open addressing. One array holds all keys; each key begins at a word boundary."""

    def __init__(self) -> None:
        self._count = 0
        self._arena = np.zeros(_FIRST_KEYS * _WORDS_PER_KEY, np.uint64)
        self._starts = np.zeros(_FIRST_KEYS + 1, np.int64)
        self._sizes = np.zeros(_FIRST_KEYS, np.int64)
        self._hashes = np.zeros(_FIRST_KEYS, np.uint64)
        self._slots = np.full(2 * _FIRST_KEYS, -1, np.int64)

    def find(self, data: Bytes, at: Ints, size: Ints) -> tuple[Ints, list[bytes]]:
        """Does what `KeyIndex.find` describes."""
        numbers = np.empty(len(at), np.int64)
        words = overlapping_words(data)
        first, row = self._count, 0
        while True:
            tables = self._arena, self._starts, self._sizes, self._hashes, self._slots
            row, self._count = _find(words, at, size, row, numbers, *tables, self._count)
            if row == len(at):
                break
            self._grow(int(size[row]))
        kept = self._arena.view(np.uint8)
        starts = (self._starts[first : self._count] * _WORD_BYTES).tolist()
        sizes = self._sizes[first : self._count].tolist()
        return numbers, [kept[start : start + size].tobytes() for start, size in zip(starts, sizes, strict=True)]

    def _grow(self, size_bytes: int) -> None:
        """Doubles the table, and makes room for a key of `size_bytes`."""
        self._arena = np.concatenate([self._arena, np.zeros(len(self._arena) + size_bytes, np.uint64)])
        self._sizes, self._hashes = _twice(self._sizes), _twice(self._hashes)
        self._starts = np.concatenate([self._starts, np.zeros(len(self._sizes) // 2, np.int64)])
        self._slots = np.full(2 * len(self._slots), -1, np.int64)
        _place(self._hashes, self._count, self._slots)


_Column = TypeVar("_Column", Ints, Words)


def _twice(values: _Column) -> _Column:
    return np.concatenate([values, np.zeros_like(values)])
