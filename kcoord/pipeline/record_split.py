# SPDX-License-Identifier: Apache-2.0
"""Cuts batches into records with numpy, in lockstep: each step cuts one record from every batch.

The records are the same as those of `walk_records` of the protocol, which finishes the last few batches of each call.
Steps over thousands of batches take a fifth of its time. tests/unit/pipeline/test_columnar_walk.py compares both.
A malformed record makes its whole batch bad. Nothing is read outside of the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kcoord.pipeline.buffers import Bytes, Flags, Gather, Ints, Words, content_bytes, unzigzag, uvarints
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.primitives import decode_uvarlong
from kcoord_protocol.record_walk import SMALLEST_RECORD_BYTES, walk_records

_FEW: Final = 24
"""At most this many batches are finished one by one, since a numpy step costs as much as about 25 records in Python."""
_EIGHT: Final = np.uint64(8)
_NOT_SHORT: Final = np.uint64(0x808000)
_BYTE: Final = np.uint64(0x7F)
_MOST_UINT32: Final = np.uint64(0xFFFF_FFFF)
_BEYOND_ALL: Final = 1 << 40


@dataclass(slots=True)
class Split:
    """One row per record, in the order of the log.

    Positions are those in the buffer. A size of -1 means null. The number of headers and the headers are between the
    value and `end`; without headers `end` is one byte after the value. `ok` has a row per batch. The rows of records in
    a bad batch are undefined.
    """

    offset_delta: Ints
    timestamp_delta: Ints
    key_at: Ints
    key_size: Ints
    value_at: Ints
    value_size: Ints
    end: Ints
    ok: Flags

    @classmethod
    def of(cls, columns: npt.NDArray[np.int64], ok: Flags) -> Self:
        """Makes a Split of `columns`, which has a row per field in the order of the fields."""
        return cls(columns[0], columns[1], columns[2], columns[3], columns[4], columns[5], columns[6], ok)

    @classmethod
    def empty(cls, records: int, batches: int) -> Self:
        return cls.of(np.zeros((7, records), np.int64), np.ones(batches, np.bool_))


def sane_counts(at: Ints, end: Ints, count: Ints) -> Ints:
    """Returns the number of records that each batch claims to hold, or 0 if that number is impossible."""
    return np.where((count < 0) | (count * SMALLEST_RECORD_BYTES > end - at), 0, count)


def split_records(data: Bytes, at: Ints, end: Ints, count: Ints) -> Split:
    """Cuts the batch bodies `data[at:end]`, which claim to have `count` records each."""
    counts = sane_counts(at, end, count)
    result = Split.empty(int(counts.sum()), len(at))
    result.ok &= counts == count
    first_row = np.cumsum(counts) - counts
    position = at.copy()
    gather = Gather(data)
    active = np.flatnonzero(counts > 0)
    step = 0
    while len(active) > _FEW:
        following, good = _step(gather, result, position[active], end[active], first_row[active] + step)
        position[active] = following
        result.ok[active[~good]] = False
        step += 1
        active = active[good & (counts[active] > step)]
    for batch in active.tolist():
        rows = slice(int(first_row[batch]) + step, int(first_row[batch] + counts[batch]))
        result.ok[batch] &= _rest(data, result, int(position[batch]), int(end[batch]), rows)
        position[batch] = end[batch]
    result.ok &= position == end
    return result


def _step(gather: Gather, result: Split, position: Ints, end: Ints, row: Ints) -> tuple[Ints, Flags]:
    """Cuts one record of each batch. Returns the position of the next record, and which records are sound."""
    last = content_bytes(gather.data)
    size, later, delta, key_size, key_at = _record_start(gather, np.minimum(position, last))
    following = position + size
    good = (key_size >= -1) & (delta >= 0) & (following <= end)
    value_size_at = np.clip(key_at + np.maximum(key_size, 0), 0, last)
    raw, used = uvarints(gather.words(value_size_at))
    value_size = unzigzag(raw)
    value_at = value_size_at + used
    value_end = np.clip(value_at + np.maximum(value_size, 0), 0, last)
    has_headers = gather.data[value_end] != 0
    good &= (value_size >= -1) & (used <= 5) & (value_at + np.maximum(value_size, 0) + 1 <= following)
    good &= has_headers == (value_end + 1 < following)
    result.offset_delta[row] = delta
    result.timestamp_delta[row] = later
    result.key_at[row] = key_at
    result.key_size[row] = key_size
    result.value_at[row] = value_at
    result.value_size[row] = value_size
    result.end[row] = following
    return following, good


def _record_start(gather: Gather, position: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Returns (size including the size field, timestamp delta, offset delta, key size, position of the key).

    An offset delta or key size that is not a 32-bit varint is -2. If the deltas take one byte each, as they nearly
    always do, one word holds everything.
    """
    word = gather.words(position)
    raw_size, used = uvarints(word)
    rest = word >> (used.astype(np.uint64) * _EIGHT)
    size = np.where((raw_size & np.uint64(1)) == 0, (raw_size >> np.uint64(1)).view(np.int64), -(1 << 40)) + used
    if not (rest & _NOT_SHORT).any() and (used <= 2).all():
        raw_key, key_used = uvarints(rest >> np.uint64(24))
        if (key_used <= 3).all():
            later, delta = unzigzag(rest >> _EIGHT & _BYTE), unzigzag(rest >> np.uint64(16) & _BYTE)
            return size, later, delta, unzigzag(raw_key), position + used + 3 + key_used
    last = content_bytes(gather.data)
    at = np.minimum(position + used + 1, last)
    raw_later, used = _uvarlongs(gather, at)
    at = np.minimum(at + used, last)
    raw_delta, used = uvarints(gather.words(at))
    at = np.minimum(at + used, last)
    raw_key, key_used = uvarints(gather.words(at))
    return size, unzigzag(raw_later), _sizes(raw_delta, used), _sizes(raw_key, key_used), at + key_used


def _sizes(raw: Words, used: Ints) -> Ints:
    return np.where((used <= 5) & (raw <= _MOST_UINT32), unzigzag(raw), -2)


def _uvarlongs(gather: Gather, at: Ints) -> tuple[Words, Ints]:
    """Does the same as `uvarints`, for numbers of up to 10 bytes.

    The size of a number that does not end, or does not fit in 64 bits, is larger than any buffer.
    """
    value, used = uvarints(gather.words(at))
    for row in np.flatnonzero(used > 8).tolist():
        try:
            number, end = decode_uvarlong(gather.data[at[row] : at[row] + 10].tobytes(), 0)
        except (IndexError, ValueError):
            used[row] = _BEYOND_ALL
            continue
        value[row], used[row] = number & 0xFFFF_FFFF_FFFF_FFFF, end
    return value, used


def _rest(data: Bytes, result: Split, position: int, end: int, rows: slice) -> bool:
    """Cuts the remaining records of one batch with the protocol's walker. Returns False if they are malformed."""
    body = data[position:end].tobytes()
    try:
        places = [*walk_records(body, rows.stop - rows.start, check_headers=False)]
    except CorruptBatchError:
        return False
    ends, later, *positions = zip(*places, strict=True)
    delta, key_at, key_end, value_at, value_end = np.array(positions, np.int64)
    result.offset_delta[rows] = delta >> 1
    result.timestamp_delta[rows] = unzigzag(np.array(later, np.uint64))
    result.key_at[rows] = position + key_at
    result.key_size[rows] = np.where(key_at < 0, -1, key_end - key_at)
    result.value_at[rows] = position + np.where(value_at < 0, value_end, value_at)
    result.value_size[rows] = np.where(value_at < 0, -1, value_end - value_at)
    result.end[rows] = position + np.array(ends)
    return True
