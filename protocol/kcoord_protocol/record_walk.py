# SPDX-License-Identifier: Apache-2.0
"""The walker over the records in a batch. It yields positions and numbers, never objects.

Theory of operation. `walk_batches` of record_batch.py goes from batch header to batch header. `walk_records` goes
through the uncompressed records of one batch. It checks that the lengths of the fields add up to the record, and the
records to the batch. A record is length, attributes (without meaning), timestamp delta, offset delta, key, value and
headers. Numbers of one or two bytes are decoded in place, because a call for each number would double the time.

Errors are CorruptBatchError. `position` is the byte where the corrupt batch or record begins, in the data that was
given. `base_offset` is the base offset of the corrupt batch, if the walker knows it.

All other readers of batches and records call these two functions. A few readers need another form for speed and say so
in their text; tests/unit/test_record_walk.py compares them with the two: the vectorized readers of the data pipeline
(kcoord/pipeline/batch_table.py, record_split.py, numba_kernels.py), the runs of equal records in the cleaner
(kcoord/storage/record_filter.py) and in the loader of committed offsets (kcoord/coordinator/group/offsets/records.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, TypeAlias

from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.primitives import decode_uvarint, decode_uvarlong

SMALLEST_RECORD_BYTES: Final = 7

RecordPlace: TypeAlias = tuple[int, int, int, int, int, int, int]
"""(end of the record, timestamp delta, offset delta, key start, key end, value start, value end).

The next record begins at the end, and the headers at the end of the value. Both deltas are zigzag-encoded. A null key
or value starts at -1. A record without headers ends one byte after its value.
"""


def walk_records(
    data: bytes,
    count: int,
    *,
    last_offset_delta: int | None = None,
    check_headers: bool = True,
    check_deltas: bool = True,
    lenient: bool = False,
) -> Iterator[RecordPlace]:
    """Yield the place of each of the `count` records, which must fill `data`.

    * `last_offset_delta`: if given, the offset deltas must rise, and may not exceed it.
    * `check_headers`: False for readers that decode the headers themselves, or never read them.
    * `check_deltas`: False for a caller that checks the offset deltas itself. Otherwise none may be negative.
    * `lenient`: read as Kafka's broker does. Any negative length is null (for consumers only -1 is). The check of
      produced records is lenient, so every reader of stored records in the broker has to be.
    """
    position, index, start, previous = 0, 0, 0, -1
    rises = last_offset_delta is not None
    is_delta_checked = rises or check_deltas
    try:
        for index in range(count):  # noqa: B007, the error below names the record
            start = position
            size = data[position]
            if size < 0x80:
                position += 1
            elif (high := data[position + 1]) < 0x80:
                size = size & 0x7F | high << 7
                position += 2
            else:
                size, position = decode_uvarint(data, position)
            end = position + (size >> 1)
            later, delta, key_size = data[position + 1], data[position + 2], data[position + 3]
            if (later | delta | key_size) < 0x80:
                position += 4
            elif (later | key_size | (following := data[position + 4])) < 0x80:  # from the 65th record on
                delta = delta & 0x7F | key_size << 7
                key_size = following
                position += 5
            else:
                later, delta, key_size, position = _decode_record_start(data, position + 1)
            if key_size & 1 and (key_size == 1 or lenient):
                key_at = key_end = -1
            else:
                size |= key_size
                key_at = position
                key_end = position = position + (key_size >> 1)
            value_size = data[position]
            if value_size < 0x80:
                position += 1
            elif (high := data[position + 1]) < 0x80:
                value_size = value_size & 0x7F | high << 7
                position += 2
            else:
                value_size, position = decode_uvarint(data, position)
            if value_size & 1 and (value_size == 1 or lenient):
                value_at = -1
            else:
                size |= value_size
                value_at = position
                position += value_size >> 1
            if position + 1 != end or data[position]:
                _check_end(data, position, end)
                if check_headers:
                    _check_headers(data, position, end, lenient=lenient)
            if size & 1 or (is_delta_checked and (delta & 1 or (rises and delta <= previous))):  # odd: negative
                raise _refused(size, delta, previous)
            previous = delta
            yield end, later, delta, key_at, key_end, value_at, position
            position = end
    except (IndexError, ValueError) as error:
        reason = "the record is cut short" if isinstance(error, IndexError) else str(error)
        raise CorruptBatchError(reason, f"records[{index}]", position=start) from error
    if position != len(data):
        raise CorruptBatchError(f"{len(data) - position} bytes follow the last record", position=position)
    if last_offset_delta is not None and previous >> 1 > last_offset_delta:
        reason = f"offset delta {previous >> 1} exceeds the batch's last, {last_offset_delta}"
        raise CorruptBatchError(reason, position=start)


def _refused(size: int, delta: int, previous: int) -> CorruptBatchError:
    if (size | delta) & 1:
        return CorruptBatchError(_WRONG_LENGTH)
    return CorruptBatchError(f"offset delta {delta >> 1} follows {previous >> 1}")


_WRONG_LENGTH: Final = "the record's length, or one inside it, is wrong"


def _decode_record_start(data: bytes, position: int) -> tuple[int, int, int, int]:
    """Return (timestamp delta, offset delta, key length, position of the key); the first three are zigzag-encoded.

    Two bytes per number are the common case here.
    """
    later = data[position]
    position += 1
    if later & 0x80:
        if (high := data[position]) < 0x80:
            later = later & 0x7F | high << 7
            position += 1
        else:
            later, position = decode_uvarlong(data, position - 1)
    delta = data[position]
    position += 1
    if delta & 0x80:
        if (high := data[position]) < 0x80:
            delta = delta & 0x7F | high << 7
            position += 1
        else:
            delta, position = decode_uvarint(data, position - 1)
    key_size = data[position]
    if key_size < 0x80:
        return later, delta, key_size, position + 1
    key_size, position = decode_uvarint(data, position)
    return later, delta, key_size, position


def _check_end(data: bytes, position: int, end: int) -> None:
    """Raises an error unless the record has headers, which begin at `position` and may reach to `end`."""
    has_headers = data[position] != 0
    if position >= end or not has_headers:
        raise CorruptBatchError(_WRONG_LENGTH)
    if end > len(data):
        raise IndexError
    if position + 1 == end:
        raise _impossible_count(decode_uvarint(data, position)[0])


def _check_headers(data: bytes, position: int, end: int, *, lenient: bool) -> None:
    for _ in walk_headers(data, position, end, lenient=lenient):
        pass


def walk_headers(data: bytes, position: int, end: int, *, lenient: bool = False) -> Iterator[tuple[int, int, int, int]]:
    """Yield (name start, name end, value start, value end) of each header of a record; a null value starts at -1.

    The headers begin with their number at `position` and must reach to `end`. Raise CorruptBatchError, or IndexError if
    the data ends before.
    """
    count = data[position]
    position += 1
    if count & 0x80:
        count, position = decode_uvarint(data, position - 1)
    # In zigzag, `count` is twice the number of headers, and a header has at least two bytes.
    if count & 1 or count > end - position:
        raise _impossible_count(count)
    for _ in range(count >> 1):
        size = data[position]
        name_at = position + 1
        if size & 0x80:
            size, name_at = decode_uvarint(data, position)
        name_end = name_at + (size >> 1)
        if size & 1 or name_end > end:
            raise CorruptBatchError("impossible length of a header key")
        size = data[name_end]
        position = name_end + 1
        if size & 0x80:
            size, position = decode_uvarint(data, name_end)
        if size & 1 and (size == 1 or lenient):
            yield name_at, name_end, -1, -1
            continue
        value_at, position = position, position + (size >> 1)
        if size & 1 or position > end:
            raise CorruptBatchError("impossible length of a header value")
        yield name_at, name_end, value_at, position
    if position != end:
        raise CorruptBatchError(_WRONG_LENGTH)


def _impossible_count(count: int) -> CorruptBatchError:
    return CorruptBatchError(f"impossible number of headers {count >> 1 ^ -(count & 1)}")


def decode_headers(data: bytes, position: int, end: int) -> list[tuple[str, bytes | None]]:
    """Return the headers of one record in `data[position:end]`, from their number to the end of the record.

    Bytes of names that are not UTF-8 become surrogate escapes.
    """
    try:
        return [
            (
                data[name_at:name_end].decode("utf-8", "surrogateescape"),
                None if value_at < 0 else data[value_at:value_end],
            )
            for name_at, name_end, value_at, value_end in walk_headers(data, position, end)
        ]
    except CorruptBatchError:
        raise
    except (IndexError, ValueError) as error:
        raise CorruptBatchError("the headers of a record are cut short") from error
