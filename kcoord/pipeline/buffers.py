# SPDX-License-Identifier: Apache-2.0
"""Reads numbers at arbitrary positions of a byte buffer, a whole column at once.

PADDING_BYTES zeros follow the content of each buffer, so a word may be read at every position of the content.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Flags: TypeAlias = npt.NDArray[np.bool_]

PADDING_BYTES: Final = 32


def padded(size_bytes: int) -> Bytes:
    """Allocates a buffer for `size_bytes` of content."""
    data = np.empty(size_bytes + PADDING_BYTES, np.uint8)
    data[size_bytes:] = 0
    return data


def padded_copy(*parts: bytes | Bytes) -> Bytes:
    """Copies the parts into one new buffer."""
    arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else part for part in parts]
    data = padded(sum(len(array) for array in arrays))
    at = 0
    for array in arrays:
        data[at : at + len(array)] = array
        at += len(array)
    return data


def content_bytes(data: Bytes) -> int:
    return len(data) - PADDING_BYTES


def overlapping_words(data: Bytes) -> Words:
    """Returns the 8 bytes that begin at every position of the content, as little-endian words.

    It has some more words, which begin in the padding.
    """
    return np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))


class Gather:
    """Reads big-endian numbers and byte words at an array of positions.

    A position lies in the content of the buffer or at its end.
    """

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self._little = self._overlapping("<u8", 8)
        self._int64 = self._overlapping(">i8", 8)
        self._int32 = self._overlapping(">i4", 4)
        self._int16 = self._overlapping(">i2", 2)
        self._uuid = self._overlapping("V16", 16)

    def _overlapping(self, dtype: str, size_bytes: int) -> npt.NDArray[np.generic]:
        return np.ndarray((len(self.data) - size_bytes + 1,), dtype, self.data, strides=(1,))

    def words(self, at: Ints) -> Words:
        """Reads 8 bytes each, as little-endian words."""
        words: Words = self._little[at].astype(np.uint64, copy=False)
        return words

    def int64(self, at: Ints) -> Ints:
        return self._int64[at].astype(np.int64)

    def int32(self, at: Ints) -> Ints:
        return self._int32[at].astype(np.int64)

    def int16(self, at: Ints) -> Ints:
        return self._int16[at].astype(np.int64)

    def int8(self, at: Ints) -> Ints:
        return self.data[at].view(np.int8).astype(np.int64)

    def uint8(self, at: Ints) -> Ints:
        return self.data[at].astype(np.int64)

    def uuids(self, at: Ints) -> npt.NDArray[np.void]:
        """Reads 16 bytes each."""
        uuids: npt.NDArray[np.void] = self._uuid[at]  # type: ignore[assignment]
        return uuids


_STOP_BITS: Final = np.uint64(0x8080808080808080)
_FIRST: Final = np.uint64(0x7F)
_MORE: Final = np.uint64(0x80)
_ONE: Final = np.uint64(1)
_GROUPS: Final = tuple((np.uint64(number), np.uint64(0x7F << (7 * number))) for number in range(1, 8))


def uvarints(words: Words) -> tuple[Words, Ints]:
    """Returns the unsigned varint at the beginning of each word, and its size in bytes.

    The size is 9 if the varint does not end within the word.
    """
    if not (words & _MORE).any():
        return words & _FIRST, np.ones(len(words), np.int64)
    stop = ~words & _STOP_BITS
    lowest = stop & (~stop + _ONE)
    mask = lowest | (lowest - _ONE)
    size = np.bitwise_count(mask).astype(np.int64) >> 3
    bits = words & mask & ~_STOP_BITS
    value = bits & _FIRST
    for shift, group in _GROUPS[: int(size.max(initial=1)) - 1]:
        value |= (bits >> shift) & group
    return value, np.where(stop == 0, 9, size)


def unzigzag(values: Words) -> Ints:
    return (values >> _ONE).view(np.int64) ^ -(values & _ONE).view(np.int64)
