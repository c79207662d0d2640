# SPDX-License-Identifier: Apache-2.0
"""The inner loops of the decoder compiled by numba.

They are several times faster than those of record_split.py and offset_values.py.

They take the same arguments and give the same results, for sound and for damaged bytes.
tests/unit/pipeline/test_columnar_walk.py compares both with the walker of the protocol. Everything else is shared with
the numpy decoder: the columns, the layout of values, values with unusual fields, and the checks of whole batches.
numba keeps the compiled code on disk if it can.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

from kcoord.pipeline.buffers import PADDING_BYTES, Bytes, Gather, Ints, Words, overlapping_words
from kcoord.pipeline.columns import validity
from kcoord.pipeline.offset_values import NUMBERS, OffsetValues, finish_slowly
from kcoord.pipeline.record_split import Split, sane_counts
from kcoord_protocol.batch_header import BATCH_OVERHEAD_BYTES, LOG_OVERHEAD_BYTES, MAGIC
from kcoord_protocol.messages import OffsetCommitValue

_INT32 = 0
_INT64 = 1
_TEXT: Final = 2
_COMPACT_TEXT: Final = 3
_TAGS: Final = 4
_WORD_BYTES = 8
_MOST_BYTES: Final = 2**31 - 1
_ODD_BYTES = np.uint64(0x00FF_00FF_00FF_00FF)
_ODD_PAIRS = np.uint64(0x0000_FFFF_0000_FFFF)


@njit(cache=True, nogil=True)
def _byte(data: Bytes, at: int) -> int:
    """Reads a byte as a signed number, since numba makes a float of an unsigned and a signed operand."""
    return np.int64(data[at])  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def _big_endian(word: np.uint64) -> int:
    """Returns the big-endian number in 8 bytes that were read as a little-endian word."""
    word = ((word & _ODD_BYTES) << np.uint64(8)) | ((word >> np.uint64(8)) & _ODD_BYTES)
    word = ((word & _ODD_PAIRS) << np.uint64(16)) | ((word >> np.uint64(16)) & _ODD_PAIRS)
    return np.int64((word << np.uint64(32)) | (word >> np.uint64(32)))  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def _walk(data: Bytes, position: int, end: int, out: Ints) -> tuple[int, int]:
    """Writes the positions of whole batches to `out`. Returns their number and the position after the last batch."""
    count = 0
    while end - position >= BATCH_OVERHEAD_BYTES and count < len(out):
        length = 0
        for place in range(position + 8, position + 12):
            length = length << 8 | _byte(data, place)
        if length >= 1 << 31 or data[position + 16] != MAGIC or length + LOG_OVERHEAD_BYTES < BATCH_OVERHEAD_BYTES:
            break
        if position + length + LOG_OVERHEAD_BYTES > end:
            break
        out[count] = position
        count += 1
        position += length + LOG_OVERHEAD_BYTES
    return count, position


def walk(data: Bytes, position: int, end: int) -> tuple[Ints, int]:
    """Does the same as `batch_table.walk`."""
    out = np.empty(max(end - position, 0) // BATCH_OVERHEAD_BYTES + 1, np.int64)
    count, stop = _walk(data, position, end, out)
    return out[:count].copy(), int(stop)


@njit(cache=True, nogil=True)
def _varint(data: Bytes, position: int, end: int, most: int) -> tuple[int, int]:
    """Reads a zigzag varint of up to `most` bytes. Returns (number, position after it).

    The position is -1 if the number does not end before `end`, or does not fit in 32 bits (`most` 5) or 64 (`most` 10).
    """
    value = 0
    shift = 0
    for at in range(position, min(end, position + most)):
        byte = _byte(data, at)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if (shift == 28 and most == 5 and byte > 15) or (shift == 63 and byte > 1):
                return 0, -1
            return (value >> 1 & 0x7FFF_FFFF_FFFF_FFFF) ^ -(value & 1), at + 1
        shift += 7
    return 0, -1


@njit(cache=True, nogil=True)
def _split(
    data: Bytes, at: Ints, end: Ints, counts: Ints, rows: npt.NDArray[np.int64], ok: npt.NDArray[np.bool_]
) -> None:
    row = 0
    for batch in range(len(at)):
        position = int(at[batch])
        limit = int(end[batch])
        first = row
        row += counts[batch]
        for record in range(first, first + counts[batch]):
            size, position = _varint(data, position, limit, 5)
            if position < 0 or size < 0 or position + size > limit:
                ok[batch] = False
                break
            following = position + size
            later, position = _varint(data, position + 1, following, 10)
            delta, position = _varint(data, position, following, 5) if position >= 0 else (-1, -1)
            key_size, position = _varint(data, position, following, 5) if position >= 0 else (-2, -1)
            if position < 0 or delta < 0 or key_size < -1:
                ok[batch] = False
                break
            key_at = position
            value_size, position = _varint(data, position + max(key_size, 0), following, 5)
            if position < 0 or value_size < -1:
                ok[batch] = False
                break
            value_end = position + max(value_size, 0)
            if value_end >= following or (data[value_end] != 0) != (value_end + 1 < following):
                ok[batch] = False
                break
            rows[0, record] = delta
            rows[1, record] = later
            rows[2, record] = key_at
            rows[3, record] = key_size
            rows[4, record] = position
            rows[5, record] = value_size
            rows[6, record] = following
            position = following
        if position != limit:
            ok[batch] = False


def split_records(data: Bytes, at: Ints, end: Ints, count: Ints) -> Split:
    """Does the same as `record_split.split_records`."""
    counts = sane_counts(at, end, count)
    rows = np.zeros((7, int(counts.sum())), np.int64)
    ok = counts == count
    _split(data, at, end, counts, rows, ok)
    return Split.of(rows, ok)


@cache
def _layouts() -> tuple[npt.NDArray[np.int64], Ints]:
    """Returns, per version of OffsetCommitValue, its fields in order as (kind, column), and their number."""
    versions = OffsetCommitValue.valid_versions
    fields = OffsetCommitValue.message_schema.root.fields
    layouts = np.zeros((len(versions), len(fields) + 1, 2), np.int64)
    sizes = np.zeros(len(versions), np.int64)
    for version in versions:
        steps: list[tuple[int, int]] = []
        for field in fields:
            if version not in field.versions or field.is_tagged(version):
                continue
            if field.element_type == "string":
                steps.append((_COMPACT_TEXT if OffsetCommitValue.is_flexible(version) else _TEXT, 0))
            else:
                steps.append((_INT64 if field.element_type == "int64" else _INT32, NUMBERS.index(field.attribute)))
        if OffsetCommitValue.is_flexible(version):
            steps.append((_TAGS, 0))
        layouts[version, : len(steps)] = steps
        sizes[version] = len(steps)
    return layouts, sizes


@njit(cache=True, nogil=True)
def _read(
    data: Bytes,
    words: Words,
    at: Ints,
    size: Ints,
    layouts: npt.NDArray[np.int64],
    steps: Ints,
    numbers: npt.NDArray[np.int64],
    texts: npt.NDArray[np.int64],
    state: npt.NDArray[np.int8],
    uuids: npt.NDArray[np.uint64],
) -> None:
    """Reads values of offset commits into the output columns.

    `state` becomes 0 for an unknown version, 1 if the value was read, 2 if it was read with a topic id, and 3 if the
    broker's decoder has to read it.
    """
    for row in range(len(at)):
        position = int(at[row])
        end = position + int(size[row])
        if size[row] < 2:
            continue
        version = _byte(data, position) << 8 | _byte(data, position + 1)
        texts[2, row] = version - 65536 if version >= 32768 else version
        if version >= len(steps):
            continue
        position += 2
        outcome = 1
        for step in range(steps[version]):
            kind, column = layouts[version, step]
            if kind in (_INT64, _INT32):
                width = 8 if kind == _INT64 else 4
                if position + width > end:
                    outcome = 3
                    break
                numbers[column, row] = _big_endian(words[position]) >> (64 - 8 * width)
                position += width
            elif kind == _TAGS:
                if position < end and data[position] == 0:
                    position += 1
                elif (
                    position + 19 <= end
                    and data[position] == 1
                    and data[position + 1] == 0
                    and data[position + 2] == 16
                ):
                    uuids[row, 0] = words[position + 3]
                    uuids[row, 1] = words[position + 11]
                    position += 19
                    outcome = 2
                else:
                    outcome = 3
                    break
            else:
                if kind == _TEXT:
                    length = _big_endian(words[position]) >> 48 if position + 2 <= end else -1
                    position += 2
                else:
                    length, position = _uvarint_size(data, position, end)
                if position < 0 or length < 0 or position + length > end:
                    outcome = 3
                    break
                texts[0, row] = position
                texts[1, row] = length
                position += length
        state[row] = outcome if outcome == 3 or position == end else 3


@njit(cache=True, nogil=True)
def _uvarint_size(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Reads a compact length. Returns (length, position after it); both are -1 if it does not end."""
    value = 0
    for number in range(min(5, end - position)):
        byte = _byte(data, position + number)
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value - 1, position + number + 1
    return -1, -1


def read_offset_values(gather: Gather, at: Ints, size: Ints) -> OffsetValues:
    """Does the same as `offset_values.read_offset_values`."""
    count = len(at)
    numbers = np.full((len(NUMBERS), count), -1, np.int64)
    texts = np.zeros((3, count), np.int64)
    texts[2] = -1
    state = np.zeros(count, np.int8)
    uuids = np.zeros((count, 2), np.uint64)
    _read(gather.data, overlapping_words(gather.data), at, size, *_layouts(), numbers, texts, state, uuids)
    values = OffsetValues(
        texts[2],
        dict(zip(NUMBERS, numbers, strict=True)),
        texts[0],
        texts[1],
        uuids.view("V16")[:, 0],
        state == 2,
        (state == 1) | (state == 2),
    )
    for row in np.flatnonzero(size < 2).tolist():
        values.errors[row] = f"the value has {size[row]} bytes"
    for row in np.flatnonzero(state == 3).tolist():
        finish_slowly(gather, values, row, int(at[row]), int(size[row]), int(texts[2, row]))
    return values


@njit(cache=True, nogil=True)
def _copy(words: Words, at: Ints, offsets: npt.NDArray[np.int32], out: Words) -> None:
    """Copies whole words. The next piece overwrites the excess bytes."""
    for row in range(len(at)):
        position = at[row]
        for place in range(offsets[row], offsets[row + 1], _WORD_BYTES):
            out[place] = words[position]
            position += _WORD_BYTES


def pieces(data: Bytes, at: Ints, size: Ints) -> pa.Array:
    """Does the same as `columns.pieces`. Raises ValueError if the pieces have more than 2^31-1 bytes together."""
    offsets = np.zeros(len(at) + 1, np.int64)
    np.cumsum(np.maximum(size, 0), out=offsets[1:])
    if offsets[-1] > _MOST_BYTES:
        raise ValueError(f"{offsets[-1]} bytes do not fit in one column; at most {_MOST_BYTES} do")
    copied = np.empty(int(offsets[-1]) + PADDING_BYTES, np.uint8)
    short = offsets.astype(np.int32)
    _copy(overlapping_words(data), at, short, overlapping_words(copied))
    buffers = [validity(size >= 0), pa.py_buffer(short), pa.py_buffer(copied)]
    return pa.Array.from_buffers(pa.binary(), len(at), buffers)
