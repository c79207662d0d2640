# SPDX-License-Identifier: Apache-2.0
"""Checks the batches that a producer sends, as long as they are without any fault. This module exists in two forms.

Theory of operation. `check_records` reads each record of a batch once and makes no objects. It accepts a batch only if
the simple reader (`walk_records` with `lenient`) reads it without an error, and if it follows the rules of its topic.
Any other batch is DOUBTFUL: the caller then uses the simple reader, which decides and names the fault. So the property
that matters is that nothing is accepted here which the simple reader refuses. A sound batch that is called doubtful
only takes longer. `stamp_sound_batch` does the same for a whole batch, header and checksum included.

The pure form is this file. `hatch_build.py` compiles it with mypyc into the extension module `compiled_record_check`,
which takes a thirtieth of the time. `compiled.py` selects the form. Both forms must return the same: integers of the
compiled form have 64 bits, so each number is bounded before it is shifted or added.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from kcoord_protocol.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_OVERHEAD_BYTES,
    COMPRESSION_BITS,
    CONTROL_BIT,
    HEADER,
    LOG_APPEND_TIME_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    crc32c,
)

if TYPE_CHECKING:
    from mypy_extensions import i64

DOUBTFUL: Final = -2
"""Returned if the simple reader must decide. It is below all timestamps that are returned."""
_NO_TIMESTAMP: Final = -1
_LARGEST_INT64: Final = 0x7FFF_FFFF_FFFF_FFFF
_LARGEST_BASE: Final = 1 << 62
_MAX_UINT32: Final = 0xFFFF_FFFF
_VARINT_BYTES: Final = 5
_VARLONG_BYTES: Final = 8
"""Timestamp deltas of 9 and 10 bytes are left to the simple reader, since their sums may not fit in 64 bits."""


_START: Final = Struct(">qii")
"""The base offset, the length and the leader epoch."""
_UNUSUAL_BITS: Final = COMPRESSION_BITS | LOG_APPEND_TIME_BIT | CONTROL_BIT


def stamp_sound_batch(
    data: Buffer,
    base_offset: int,
    leader_epoch: int,
    most_bytes: int,
    needs_key: bool,
    earliest_ms: int,
    latest_ms: int,
) -> tuple[bytes, BatchHeader] | None:
    """Return a sent batch as it is stored at `base_offset`, and its header, or None if the caller must look at it.

    A batch is returned only if its header, checksum and records have no fault, it is not compressed, and its largest
    timestamp is right, so that only these two fields change.
    """
    size = len(data)
    if not BATCH_OVERHEAD_BYTES <= size <= most_bytes:
        return None
    (
        sent_offset, length, _, magic, crc, attributes, last_delta, base_timestamp, max_timestamp, producer_id,
        producer_epoch, base_sequence, count,
    ) = HEADER.unpack_from(data)  # fmt: skip
    if sent_offset or length != size - LOG_OVERHEAD_BYTES or magic != MAGIC or attributes & _UNUSUAL_BITS:
        return None
    if not 0 <= last_delta == count - 1:
        return None
    if base_sequence < 0 if producer_id >= 0 else producer_id != NO_PRODUCER_ID or attributes & TRANSACTIONAL_BIT:
        return None
    # The checksum does not cover the first fields, so it is computed from the copy, which is in a cache.
    stored = b"".join((_START.pack(base_offset, length, leader_epoch), memoryview(data)[_START.size :]))
    if crc32c(memoryview(stored)[ATTRIBUTES_POSITION:]) != crc:
        return None
    largest = check_records(stored, BATCH_OVERHEAD_BYTES, count, needs_key, base_timestamp, earliest_ms, latest_ms)
    if largest == DOUBTFUL or largest != max_timestamp:
        return None
    return stored, BatchHeader(
        base_offset, length, leader_epoch, magic, crc, attributes, last_delta, base_timestamp, max_timestamp,
        producer_id, producer_epoch, base_sequence, count,
    )  # fmt: skip


def check_records(
    data: bytes, start: int, count: int, needs_key: bool, base_timestamp: int, earliest_ms: int, latest_ms: int
) -> int:
    """Return the largest timestamp of the `count` uncompressed records in `data[start:]`, or DOUBTFUL.

    All timestamps must be within the bounds. `needs_key`: no key may be null.
    """
    if not -_LARGEST_BASE <= base_timestamp <= _LARGEST_BASE:
        return DOUBTFUL
    base: i64 = base_timestamp
    earliest: i64 = max(earliest_ms, -_LARGEST_INT64)
    latest: i64 = min(latest_ms, _LARGEST_INT64)
    position: i64 = start
    expected: i64 = 0  # the offset delta, zigzag-encoded
    last: i64 = 2 * count
    largest: i64 = _NO_TIMESTAMP
    try:
        while expected < last:
            size: i64 = data[position]
            position += 1
            if size > 0x7F:
                high: i64 = data[position]
                if high < 0x80:
                    size += (high << 7) - 0x80
                    position += 1
                else:
                    size, position = _varint(data, position - 1, _VARINT_BYTES)
            end: i64 = position + (size >> 1)
            position += 4  # The first of these four bytes are attributes without a meaning.
            later: i64 = data[position - 3]
            delta: i64 = data[position - 2]
            key_size: i64 = data[position - 1]
            if later | delta | key_size > 0x7F:
                position -= 2
                if later > 0x7F:
                    if delta < 0x80:
                        later += (delta << 7) - 0x80
                        position += 1
                    else:
                        later, position = _varint(data, position - 1, _VARLONG_BYTES)
                    delta = data[position]
                position += 1
                if delta > 0x7F:
                    high = data[position]
                    if high < 0x80:
                        delta += (high << 7) - 0x80
                        position += 1
                    else:
                        delta, position = _varint(data, position - 1, _VARINT_BYTES)
                key_size = data[position]
                position += 1
                if key_size > 0x7F:
                    key_size, position = _varint(data, position - 1, _VARINT_BYTES)
            if not key_size & 1:
                position += key_size >> 1
            elif needs_key:
                return DOUBTFUL
            value_size: i64 = data[position]
            position += 1
            if value_size > 0x7F:
                high = data[position]
                if high < 0x80:
                    value_size += (high << 7) - 0x80
                    position += 1
                else:
                    value_size, position = _varint(data, position - 1, _VARINT_BYTES)
            if not value_size & 1:
                position += value_size >> 1
            if (data[position] or position + 1 != end) and not _are_headers(data, position, end):
                return DOUBTFUL
            timestamp: i64 = base + (later >> 1 ^ -(later & 1))
            if size & 1 or delta != expected or timestamp < earliest or timestamp > latest:
                return DOUBTFUL
            if timestamp > largest:
                largest = timestamp
            position = end
            expected += 2
    except (IndexError, ValueError):
        return DOUBTFUL
    return largest if position == len(data) else DOUBTFUL


def _varint(data: bytes, position: i64, most_bytes: i64) -> tuple[i64, i64]:
    """Return an unsigned varint and the position after it. Raise ValueError if it is longer than it may be."""
    value: i64 = data[position]
    position += 1
    if value < 0x80:
        return value, position
    value &= 0x7F
    shift: i64 = 7
    while shift < 7 * most_bytes:
        byte: i64 = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if most_bytes == _VARINT_BYTES and value > _MAX_UINT32:
                raise ValueError
            return value, position
        shift += 7
    raise ValueError


def _are_headers(data: bytes, position: i64, end: i64) -> bool:
    """Return whether the headers of a record reach from their number at `position` exactly to `end`."""
    count, position = _varint(data, position, _VARINT_BYTES)  # in zigzag, twice the number of headers
    if count & 1:
        return False
    while count > 0:
        size, position = _varint(data, position, _VARINT_BYTES)
        if size & 1:
            return False
        position += size >> 1
        size, position = _varint(data, position, _VARINT_BYTES)
        if not size & 1:
            position += size >> 1
        count -= 2
    return position == end
