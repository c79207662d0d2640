# SPDX-License-Identifier: Apache-2.0
"""Kafka's record batches, format 2: the unit that is stored, sent and checksummed.

`walk_batches` goes from batch to batch; record_walk.py goes through the records of one batch. Every length, count and
size is checked against the bytes that exist before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, TypeAlias

from kcoord_protocol.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_OVERHEAD_BYTES,
    COMPRESSION_BITS,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER,
    LOG_APPEND_TIME_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MAGIC_POSITION,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    SMALLEST_BATCH_LENGTH,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    TimestampType,
    crc32c,
    decode_header,
    rewrite_header,
    unsupported_magic,
    verify_crc,
)
from kcoord_protocol.compression import Compression, compress, decompress
from kcoord_protocol.control_records import (
    ControlRecordType,
    control_key,
    decode_control_key,
    decode_end_txn_marker,
    end_txn_marker,
)
from kcoord_protocol.errors import BatchTooLargeError, CorruptBatchError, EncodeError, UnsupportedMagicError
from kcoord_protocol.primitives import encode_varint, encode_varlong
from kcoord_protocol.record_walk import SMALLEST_RECORD_BYTES, decode_headers, walk_records

__all__ = [
    "BATCH_OVERHEAD_BYTES",
    "MAGIC",
    "NO_PRODUCER_EPOCH",
    "NO_PRODUCER_ID",
    "NO_SEQUENCE",
    "NO_TIMESTAMP",
    "BatchHeader",
    "BatchTooLargeError",
    "Buffer",
    "Compression",
    "ControlRecordType",
    "CorruptBatchError",
    "Record",
    "TimestampType",
    "UnsupportedMagicError",
    "control_key",
    "crc32c",
    "decode_control_key",
    "decode_end_txn_marker",
    "decode_entries",
    "decode_header",
    "decode_records",
    "encode_batch",
    "encode_batch_from_parts",
    "encode_control_batch",
    "end_txn_marker",
    "iter_headers",
    "iter_records",
    "iter_times",
    "possible_batches",
    "rewrite_header",
    "verify_crc",
    "walk_batches",
]

HeaderFields: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
"""The fields of BatchHeader, in order."""

_PREFIX: Final = Struct(">qiibI")
"""The header up to the checksum."""
_CHECKED: Final = Struct(">hiqqqhii")
"""The header from the attributes on. The checksum covers it and the records."""
_NULL: Final = b"\x01"
_LENGTHS: Final = tuple(encode_varint(size) for size in range(512))
_RECORD_STARTS: Final = tuple(b"\0\0" + delta for delta in _LENGTHS)
"""Attributes 0, timestamp delta 0 and an offset delta."""


@dataclass(slots=True)
class Record:
    """A record. The encoder numbers a record with offset -1.

    Bytes of header keys that are not UTF-8 become surrogate escapes.
    """

    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    timestamp_ms: int = NO_TIMESTAMP
    offset: int = -1


def walk_batches(
    data: Buffer, position: int = 0, end: int | None = None, *, verify: bool = False
) -> Iterator[tuple[int, HeaderFields]]:
    """Yield (position, header fields) of each whole batch from `position` on.

    Raise CorruptBatchError for another format, an impossible length or a negative offset. End silently before a batch
    that is cut off, because fetch responses and files that are being written end like that.

    `end` may lie beyond the data. A batch then counts as whole if its header is in the data. `verify` also checks the
    checksums; the data must then hold each whole batch.
    """
    if end is None:
        end = len(data)
    last = len(data) - BATCH_OVERHEAD_BYTES
    unpack = HEADER.unpack_from
    view = memoryview(data) if verify else None
    while position <= last:
        fields = unpack(data, position)
        following = position + LOG_OVERHEAD_BYTES + fields[1]
        if fields[3] != MAGIC or fields[1] < SMALLEST_BATCH_LENGTH or fields[0] < 0 or fields[6] < 0:
            raise _impossible(fields, position)
        if following > end:
            return
        if view is not None and crc32c(view[position + ATTRIBUTES_POSITION : following]) != fields[4]:
            raise CorruptBatchError(
                "the CRC of the batch does not match its content", position=position, base_offset=fields[0]
            )
        yield position, fields
        position = following


def _impossible(fields: HeaderFields, position: int) -> CorruptBatchError:
    base_offset, length, _, magic, _, _, last_delta, *_ = fields
    if magic != MAGIC:
        return unsupported_magic(magic, position)
    if length < SMALLEST_BATCH_LENGTH:
        reason = f"a batch length of {length} is less than its header"
    else:
        reason = f"impossible batch header: base offset {base_offset}, last offset delta {last_delta}"
    return CorruptBatchError(reason, position=position, base_offset=base_offset)


def iter_headers(data: Buffer, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
    """Yield (position, header object) of each whole batch in `data`. Skip a last batch that is cut off."""
    for start, fields in walk_batches(data, position):
        yield start, BatchHeader(*fields)
        position = start + LOG_OVERHEAD_BYTES + fields[1]
    if len(data) - position > MAGIC_POSITION and data[position + MAGIC_POSITION] != MAGIC:
        raise unsupported_magic(data[position + MAGIC_POSITION], position)


def possible_batches(data: bytes, position: int, end: int, offset: int) -> Iterator[tuple[int, int, int]]:
    """Yield (position, bytes, base offset) of all bytes that look like a batch header with at least `offset`.

    A reader finds the next batch after corrupt bytes in this way. The batch must end at or before `end`, which may lie
    beyond the data. The caller must check the checksum.
    """
    magic_at = data.find(MAGIC, position + MAGIC_POSITION)
    while 0 <= magic_at <= len(data) - BATCH_OVERHEAD_BYTES + MAGIC_POSITION:
        start = magic_at - MAGIC_POSITION
        base_offset, length, _, _, _, _, last_delta, *_ = HEADER.unpack_from(data, start)
        size = LOG_OVERHEAD_BYTES + length
        if base_offset >= offset and last_delta >= 0 and size >= BATCH_OVERHEAD_BYTES and start + size <= end:
            yield start, size, base_offset
        magic_at = data.find(MAGIC, magic_at + 1)


def decode_records(data: Buffer, position: int = 0, *, max_bytes: int | None = None) -> list[Record]:
    """Return the records of the batch at `position`, with absolute offsets and timestamps.

    Does not check the checksum.
    """
    return list(iter_records(data, position, max_bytes=max_bytes))


def iter_records(data: Buffer, position: int = 0, *, max_bytes: int | None = None) -> Iterator[Record]:
    """Yield the records as `decode_records` returns them. An error in a record is raised when the record is reached."""
    header = decode_header(data, position)
    return _decoded(_checked_records(data, position, header, max_bytes), header)


def _decoded(data: bytes, header: BatchHeader) -> Iterator[Record]:
    base_offset, timestamp_ms = header.base_offset, header.base_timestamp
    is_append_time = header.timestamp_type is TimestampType.LOG_APPEND_TIME
    if is_append_time:
        timestamp_ms = header.max_timestamp
    number = 0
    try:
        for end, later, delta, key_at, key_end, value_at, headers_at in walk_records(
            data, header.records_count, last_offset_delta=header.last_offset_delta, check_headers=False
        ):
            yield Record(
                None if key_at < 0 else data[key_at:key_end],
                None if value_at < 0 else data[value_at:headers_at],
                [] if headers_at + 1 == end else decode_headers(data, headers_at, end),
                timestamp_ms if is_append_time else timestamp_ms + (later >> 1 ^ -(later & 1)),
                base_offset + (delta >> 1),
            )
            number += 1
    except CorruptBatchError as error:
        error.base_offset = base_offset
        if not error.path and number < header.records_count:
            # The walker names the record in its own errors. This error is from the headers of the record.
            error.path = f"records[{number}]"
        raise


def iter_times(data: Buffer, position: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (offset, timestamp) of each record in a stored batch, without objects for the rest.

    Records are read as leniently as when a producer sent them. A compressed batch may have millions.
    """
    header = decode_header(data, position)
    base_offset, timestamp_ms = header.base_offset, header.base_timestamp
    is_append_time = header.timestamp_type is TimestampType.LOG_APPEND_TIME
    if is_append_time:
        timestamp_ms = header.max_timestamp
    records = _checked_records(data, position, header, None)
    for _, later, delta, *_ in walk_records(records, header.records_count, check_headers=False, lenient=True):
        yield base_offset + (delta >> 1), timestamp_ms if is_append_time else timestamp_ms + (later >> 1 ^ -(later & 1))


def decode_entries(
    data: Buffer, position: int = 0, *, max_bytes: int | None = None
) -> list[tuple[int, bytes | None, bytes | None]]:
    """Return (offset, key, value) of each record, as the loaders of coordinator and metadata logs need it."""
    header = decode_header(data, position)
    records = _checked_records(data, position, header, max_bytes)
    base_offset = header.base_offset
    try:
        return [
            (
                base_offset + (delta >> 1),
                None if key_at < 0 else records[key_at:key_end],
                None if value_at < 0 else records[value_at:value_end],
            )
            for _, _, delta, key_at, key_end, value_at, value_end in walk_records(
                records, header.records_count, last_offset_delta=header.last_offset_delta
            )
        ]
    except CorruptBatchError as error:
        error.base_offset = base_offset
        raise


def records_of(data: Buffer, position: int, header: BatchHeader, max_bytes: int | None = None) -> bytes:
    """Return the uncompressed records of the whole batch at `position`."""
    records = bytes(data[position + BATCH_OVERHEAD_BYTES : position + LOG_OVERHEAD_BYTES + header.batch_length])
    if not header.attributes & COMPRESSION_BITS or not records:
        return records
    return decompress(header.compression, records, max_bytes)


def _checked_records(data: Buffer, position: int, header: BatchHeader, max_bytes: int | None) -> bytes:
    reason = None
    if position + header.size_bytes > len(data):
        reason = f"the batch needs {header.size_bytes} bytes, only {len(data) - position} are left"
    else:
        records = records_of(data, position, header, max_bytes)
        count = header.records_count
        if not 0 <= count * SMALLEST_RECORD_BYTES <= len(records):
            reason = f"{count} records do not fit in {len(records)} bytes"
        elif header.last_offset_delta < count - 1:
            reason = f"last offset delta {header.last_offset_delta} with {count} records"
    if reason is not None:
        raise CorruptBatchError(reason, position=position, base_offset=header.base_offset)
    return records


def encode_batch(
    records: Sequence[Record],
    *,
    base_offset: int = 0,
    last_offset: int | None = None,
    partition_leader_epoch: int = 0,
    compression: Compression = Compression.NONE,
    compression_level: int | None = None,
    timestamp_type: TimestampType = TimestampType.CREATE_TIME,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
    is_control: bool = False,
    delete_horizon_ms: int | None = None,
) -> bytes:
    """Return a batch. A record with offset -1 gets the offset after the record before it.

    `last_offset` keeps the offsets of removed records at the end. With LOG_APPEND_TIME, every record has the largest
    timestamp. A batch without records is not compressed; the cleaner keeps such batches for producer state.
    """
    base_timestamp = records[0].timestamp_ms if records else NO_TIMESTAMP
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
    parts: list[bytes] = []
    delta = -1
    for record in records:
        expected, delta = delta + 1, record.offset - base_offset if record.offset >= 0 else delta + 1
        if delta < expected:
            raise EncodeError(f"offset {record.offset} is out of order in the batch at offset {base_offset}")
        content = _encode_record(record, record.timestamp_ms - base_timestamp, delta)
        parts += encode_varint(len(content)), content
    last_delta = delta if last_offset is None else last_offset - base_offset
    if last_delta < delta:
        raise EncodeError(f"last offset {last_offset} is before the last record, at {base_offset + delta}")
    body = compress(compression, b"".join(parts), compression_level) if records else b""
    attributes = (
        (compression if records else Compression.NONE)
        | timestamp_type * LOG_APPEND_TIME_BIT
        | is_transactional * TRANSACTIONAL_BIT
        | is_control * CONTROL_BIT
        | (delete_horizon_ms is not None) * DELETE_HORIZON_BIT
    )
    max_timestamp = max((record.timestamp_ms for record in records), default=NO_TIMESTAMP)
    times_and_producer = (base_timestamp, max_timestamp, producer_id, producer_epoch, base_sequence)
    checked = _CHECKED.pack(attributes, last_delta, *times_and_producer, len(records))
    return frame_batch(base_offset, partition_leader_epoch, checked + body)


def encode_batch_from_parts(
    pairs: Sequence[tuple[bytes | None, bytes | None]],
    timestamp_ms: int,
    base_offset: int = 0,
    *,
    partition_leader_epoch: int = 0,
    compression: Compression = Compression.NONE,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_sequence: int = NO_SEQUENCE,
    is_transactional: bool = False,
) -> bytes:
    """Return a batch of (key, value) pairs at consecutive offsets, all with one timestamp.

    The logs of coordinators and metadata are written in this way.
    """
    count = len(pairs)
    attributes = compression | TRANSACTIONAL_BIT if is_transactional else compression
    producer = (producer_id, producer_epoch, base_sequence)
    checked = _CHECKED.pack(attributes, count - 1, timestamp_ms, timestamp_ms, *producer, count)
    body = encode_records(pairs)
    if compression:
        body = compress(compression, body)
    return frame_batch(base_offset, partition_leader_epoch, checked + body)


def encode_batch_around(
    body: bytes, count: int, *, timestamp_ms: int, base_offset: int, compression: Compression = Compression.NONE
) -> bytes:
    """Return the batch around `body`, the `count` records that `encode_records` has encoded."""
    no_producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH, NO_SEQUENCE)
    checked = _CHECKED.pack(compression, count - 1, timestamp_ms, timestamp_ms, *no_producer, count)
    if compression:
        body = compress(compression, body)
    return frame_batch(base_offset, 0, checked + body)


def frame_batch(base_offset: int, partition_leader_epoch: int, checked: bytes) -> bytes:
    """Return a batch: base offset, length, leader epoch, format and checksum, then the checked bytes."""
    size = len(checked) + ATTRIBUTES_POSITION - LOG_OVERHEAD_BYTES
    return _PREFIX.pack(base_offset, size, partition_leader_epoch, MAGIC, crc32c(checked)) + checked


def encode_records(pairs: Sequence[tuple[bytes | None, bytes | None]], first_delta: int = 0) -> bytes:
    """Return the records section of a batch, for (key, value) pairs at consecutive offsets with one timestamp.

    `first_delta` is the offset delta of the first record.
    """
    end_delta = first_delta + len(pairs)
    starts = _RECORD_STARTS
    if first_delta or end_delta > len(starts):
        starts = tuple(b"\0\0" + encode_varint(delta) for delta in range(first_delta, end_delta))
    lengths = _LENGTHS
    join = b"".join
    parts: list[bytes] = []
    for start, (key, value) in zip(starts, pairs, strict=False):
        try:
            if key is None:
                content = join((start, b"\1", lengths[len(value)], value, b"\0"))  # type: ignore[arg-type]
            elif value is None:
                content = join((start, lengths[len(key)], key, b"\1\0"))
            else:
                content = join((start, lengths[len(key)], key, lengths[len(value)], value, b"\0"))
            parts += lengths[len(content)], content
        except (IndexError, TypeError):
            # A length exceeds the table, or both key and value are null.
            content = join((start, *_encode_nullable(key), *_encode_nullable(value), b"\0"))
            parts += encode_varint(len(content)), content
    return join(parts)


def _encode_record(record: Record, timestamp_delta: int, delta: int) -> bytes:
    parts = [b"\0", encode_varlong(timestamp_delta), encode_varint(delta)]
    parts += _encode_nullable(record.key)
    parts += _encode_nullable(record.value)
    parts.append(encode_varint(len(record.headers)))
    for name, value in record.headers:
        parts += _encode_nullable(name.encode("utf-8", "surrogateescape"))
        parts += _encode_nullable(value)
    return b"".join(parts)


def _encode_nullable(data: bytes | None) -> tuple[bytes, bytes]:
    return (_NULL, b"") if data is None else (encode_varint(len(data)), data)


def encode_control_batch(
    control_type: ControlRecordType,
    value: bytes,
    *,
    timestamp_ms: int,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = NO_PRODUCER_EPOCH,
    base_offset: int = 0,
    partition_leader_epoch: int = 0,
) -> bytes:
    """Return a batch with one control record. The batch is transactional if the record ends a transaction."""
    record = Record(control_key(control_type), value, timestamp_ms=timestamp_ms)
    return encode_batch(
        [record],
        base_offset=base_offset,
        partition_leader_epoch=partition_leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_transactional=control_type in (ControlRecordType.ABORT, ControlRecordType.COMMIT),
        is_control=True,
    )
