# SPDX-License-Identifier: Apache-2.0
"""Takes records out of a batch. What stays keeps its bytes, offset and timestamp; the batch keeps its offsets.

Records are looked at as far as the cleaner needs it: offset, key, and whether there is a value. Neither values nor
headers are decoded, so it does not matter what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from protocol.batch_header import (
    BATCH_OVERHEAD_BYTES,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    TimestampType,
    frame_batch,
)
from protocol.compression import Compression, compress, decompress
from protocol.errors import CorruptBatchError
from protocol.primitives import decode_uvarint, decode_uvarlong, encode_varint, encode_varlong

_CHECKED: Final = Struct(">hiqqqhii")
"""attributes, last offset delta, base and max timestamp, producer id, epoch and sequence, count: before the records."""
_EMPTY_BATCH_BITS: Final = LOG_APPEND_TIME_BIT | TRANSACTIONAL_BIT | CONTROL_BIT


class RawRecord(NamedTuple):
    """One record within the uncompressed bytes of its batch, length included."""

    start: int
    end: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def records_of(header: BatchHeader, batch: bytes) -> bytes:
    """The uncompressed bytes of a batch's records."""
    data = batch[BATCH_OVERHEAD_BYTES:]
    codec = header.compression
    return decompress(codec, data) if codec is not Compression.NONE and data else data


def iter_raw(data: bytes, count: int) -> Iterator[RawRecord]:
    """The `count` records that must fill `data`; CorruptBatchError where they do not."""
    position = 0
    try:
        for _ in range(count):
            start = position
            size = data[position]
            position += 1
            if size & 0x80:
                size, position = decode_uvarint(data, start)
            end = position + (size >> 1)
            position += 2  # attributes, and most often all of the timestamp delta
            if data[position - 1] & 0x80:
                _, position = decode_uvarlong(data, position - 1)
            delta = data[position]
            position += 1
            if delta & 0x80:
                delta, position = decode_uvarint(data, position - 1)
            key_size = data[position]
            position += 1
            if key_size & 0x80:
                key_size, position = decode_uvarint(data, position - 1)
            if key_size == 1:
                key = None
            else:
                key = data[position : position + (key_size >> 1)]
                position += key_size >> 1
            has_value = data[position] != 1
            if position >= end or (size | delta) & 1 or (key_size & 1 and key_size != 1):
                raise CorruptBatchError("the lengths within a record do not add up")
            yield RawRecord(start, end, delta >> 1, key, has_value)
            position = end
    except IndexError:
        raise CorruptBatchError("a record is cut short") from None
    if position != len(data):
        raise CorruptBatchError(f"{len(data) - position} bytes follow the last record")


def filter_batch(header: BatchHeader, data: bytes, kept: Sequence[RawRecord], delete_horizon_ms: int | None) -> bytes:
    """The batch with `kept` alone, of its uncompressed records `data`.

    `delete_horizon_ms` is when its tombstones may go, if that was not said in the batch before: it becomes the base
    timestamp, so all timestamp deltas change (as Kafka's format has it).
    """
    attributes, base_timestamp = header.attributes, header.base_timestamp
    parts = [data[record.start : record.end] for record in kept]
    if delete_horizon_ms is not None:
        shift = base_timestamp - delete_horizon_ms
        parts = [_shifted(part, shift) for part in parts]
        attributes |= DELETE_HORIZON_BIT
        base_timestamp = delete_horizon_ms
    max_timestamp = header.max_timestamp
    if header.timestamp_type is TimestampType.CREATE_TIME:
        deltas = [_timestamp_delta(part)[0] for part in parts]
        max_timestamp = base_timestamp + max(deltas) if deltas else NO_TIMESTAMP
    return _frame(
        header, attributes, base_timestamp, max_timestamp, len(parts), compress(header.compression, b"".join(parts))
    )


def empty_batch(header: BatchHeader) -> bytes:
    """What keeps offsets, sequence number and epoch of a batch that has no records any more."""
    return _frame(header, header.attributes & _EMPTY_BATCH_BITS, NO_TIMESTAMP, header.max_timestamp, 0, b"")


def _frame(
    header: BatchHeader, attributes: int, base_timestamp: int, max_timestamp: int, count: int, body: bytes
) -> bytes:
    checked = _CHECKED.pack(
        attributes,
        header.last_offset_delta,
        base_timestamp,
        max_timestamp,
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        count,
    )
    return frame_batch(header.base_offset, header.partition_leader_epoch, checked + body)


def _timestamp_delta(record: bytes) -> tuple[int, int, int]:
    """(timestamp delta, where it starts, where it ends) of a record with its length."""
    _, start = decode_uvarint(record, 0)
    delta, end = decode_uvarlong(record, start + 1)
    return delta >> 1 ^ -(delta & 1), start + 1, end


def _shifted(record: bytes, shift_ms: int) -> bytes:
    delta, start, end = _timestamp_delta(record)
    content = record[start - 1 : start] + encode_varlong(delta + shift_ms) + record[end:]
    return encode_varint(len(content)) + content
