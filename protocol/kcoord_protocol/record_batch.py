# SPDX-License-Identifier: Apache-2.0
"""Kafka's record batches, format 2: the unit that is stored, sent and checksummed.

Nothing read from a batch is believed: lengths, counts and sizes are checked against the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, TypeAlias

from kcoord_protocol.batch_header import (
    BATCH_OVERHEAD_BYTES,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    MAGIC,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    TimestampType,
    crc32c,
    decode_header,
    frame_batch,
    iter_headers,
    rewrite_header,
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
from kcoord_protocol.primitives import decode_uvarint, decode_uvarlong, encode_varint, encode_varlong

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
    "rewrite_header",
    "verify_crc",
]

_CHECKED: Final = Struct(">hiqqqhii")  # what the checksum covers, before the records
_MIN_RECORD_BYTES: Final = 7
_NULL: Final = b"\x01"
_LENGTHS: Final = tuple(encode_varint(size) for size in range(512))
_RECORD_STARTS: Final = tuple(b"\0\0" + delta for delta in _LENGTHS)  # attributes, timestamp delta 0, offset delta

_Fields: TypeAlias = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]], int]


@dataclass(slots=True)
class Record:
    """Offset -1: numbered by the encoder. Bytes of header keys that are not UTF-8 become surrogate escapes."""

    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    timestamp_ms: int = NO_TIMESTAMP
    offset: int = -1


def decode_records(data: Buffer, position: int = 0, *, max_bytes: int | None = None) -> list[Record]:
    """All records of the batch at `position`, with absolute offsets and timestamps. Does not check the checksum."""
    return list(iter_records(data, position, max_bytes=max_bytes))


def iter_records(data: Buffer, position: int = 0, *, max_bytes: int | None = None) -> Iterator[Record]:
    """As `decode_records`, one by one: an error in a later record is raised when it is reached."""
    header = decode_header(data, position)
    fields = _iter_fields(_records_of(data, position, header, max_bytes), header)
    first = header.base_offset
    if header.timestamp_type is TimestampType.LOG_APPEND_TIME:
        timestamp_ms = header.max_timestamp
        return (Record(key, value, headers, timestamp_ms, first + delta) for delta, key, value, headers, _ in fields)
    base_ms = header.base_timestamp
    return (Record(key, value, headers, base_ms + later, first + delta) for delta, key, value, headers, later in fields)


def decode_entries(
    data: Buffer, position: int = 0, *, max_bytes: int | None = None
) -> list[tuple[int, bytes | None, bytes | None]]:
    """(offset, key, value) of each record: what the loaders of coordinator and metadata logs need."""
    header = decode_header(data, position)
    base_offset = header.base_offset
    fields = _iter_fields(_records_of(data, position, header, max_bytes), header)
    return [(base_offset + delta, key, value) for delta, key, value, _, _ in fields]


def _records_of(data: Buffer, position: int, header: BatchHeader, max_bytes: int | None) -> bytes:
    end = position + header.size_bytes
    if end > len(data):
        raise CorruptBatchError(f"the batch needs {header.size_bytes} bytes, {len(data) - position} are there")
    records = bytes(memoryview(data)[position + BATCH_OVERHEAD_BYTES : end])
    codec = header.compression
    if codec is not Compression.NONE and records:
        records = decompress(codec, records, max_bytes)
    if not 0 <= header.records_count * _MIN_RECORD_BYTES <= len(records):
        raise CorruptBatchError(f"{header.records_count} records do not fit in {len(records)} bytes")
    if header.last_offset_delta < header.records_count - 1:
        raise CorruptBatchError(f"last offset delta {header.last_offset_delta} with {header.records_count} records")
    return records


def _iter_fields(data: bytes, header: BatchHeader) -> Iterator[_Fields]:
    """(offset delta, key, value, headers, timestamp delta) of each record; every length has to add up.

    A record starts with length, attributes (without meaning), timestamp delta, offset delta and key length. The common
    sizes of these are taken in one step: a call for each would double the time.
    """
    position = index = 0
    previous = -1
    try:
        for index in range(header.records_count):  # noqa: B007, the error below names the record
            first, second, third, fourth, fifth, sixth, seventh = data[position : position + _MIN_RECORD_BYTES]
            if (first | third | fourth | fifth) < 0x80:
                size, later, delta, size_or_null = first, third, fourth, fifth
                end = position + 1 + (size >> 1)
                position += 5
            elif first >= 0x80 and (second | fourth | fifth | sixth) < 0x80:
                size, later, delta, size_or_null = first & 0x7F | second << 7, fourth, fifth, sixth
                end = position + 2 + (size >> 1)
                position += 6
            elif first >= 0x80 and (second | fourth | sixth | seventh) < 0x80:  # from the 65th record on
                size, later, size_or_null = first & 0x7F | second << 7, fourth, seventh
                delta = fifth & 0x7F | sixth << 7
                end = position + 2 + (size >> 1)
                position += 7
            else:
                size, later, delta, size_or_null, end, position = _decode_record_start(data, position)
            invalid = size | delta  # odd: negative, in zigzag
            if size_or_null == 1:
                key = None
            else:
                start = position
                position += size_or_null >> 1
                invalid |= size_or_null
                key = data[start:position]
            size_or_null = data[position]
            position += 1
            if size_or_null & 0x80:
                size_or_null, position = decode_uvarint(data, position - 1)
            if size_or_null == 1:
                value = None
            else:
                start = position
                position += size_or_null >> 1
                invalid |= size_or_null
                value = data[start:position]
            headers: list[tuple[str, bytes | None]] = []
            if data[position]:
                position = _decode_headers(data, position, end, headers)
            else:
                position += 1
            if position != end or invalid & 1:
                raise CorruptBatchError("the record's length, or one inside it, is wrong")
            delta >>= 1
            if delta <= previous:
                raise CorruptBatchError(f"offset delta {delta} follows {previous}")
            previous = delta
            yield delta, key, value, headers, later >> 1 ^ -(later & 1)
    except (IndexError, ValueError) as e:
        cut = isinstance(e, IndexError) or (type(e) is ValueError and len(data) - position < _MIN_RECORD_BYTES)
        raise CorruptBatchError("the record is cut short" if cut else str(e), f"records[{index}]") from e
    if position != len(data):
        raise CorruptBatchError(f"{len(data) - position} bytes follow the last record")
    if previous > header.last_offset_delta:
        raise CorruptBatchError(f"offset delta {previous} exceeds the batch's last, {header.last_offset_delta}")


def _decode_record_start(data: bytes, position: int) -> tuple[int, int, int, int, int, int]:
    """(length, timestamp delta, offset delta, key length: all zigzag; end of the record, position of the key)."""
    size, position = decode_uvarint(data, position)
    end = position + (size >> 1)
    later, position = decode_uvarlong(data, position + 1)
    delta, position = decode_uvarint(data, position)
    size_or_null, position = decode_uvarint(data, position)
    return size, later, delta, size_or_null, end, position


def decode_record_headers(data: bytes) -> list[tuple[str, bytes | None]]:
    """The headers of one record, given the bytes from their number to the record's end."""
    headers: list[tuple[str, bytes | None]] = []
    try:
        end = _decode_headers(data, 0, len(data), headers)
    except (IndexError, ValueError) as e:
        raise CorruptBatchError("the headers of a record are cut short") from e
    if end != len(data):
        raise CorruptBatchError(f"{len(data) - end} bytes follow the headers of a record")
    return headers


def _decode_headers(data: bytes, position: int, end: int, headers: list[tuple[str, bytes | None]]) -> int:
    count, position = decode_uvarint(data, position)
    if count & 1 or count > end - position:  # zigzag: twice the count, and a header has at least two bytes
        raise CorruptBatchError(f"impossible number of headers {count >> 1 ^ -(count & 1)}")
    for _ in range(count >> 1):
        size, position = decode_uvarint(data, position)
        start, position = position, position + (size >> 1)
        if size & 1 or position > end:
            raise CorruptBatchError("impossible length of a header key")
        name = data[start:position].decode("utf-8", "surrogateescape")
        size, position = decode_uvarint(data, position)
        if size == 1:
            headers.append((name, None))
            continue
        start, position = position, position + (size >> 1)
        if size & 1 or position > end:
            raise CorruptBatchError("impossible length of a header value")
        headers.append((name, data[start:position]))
    return position


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
    """Write one batch. A record with offset -1 follows the one before it.

    `last_offset` keeps offsets that compaction emptied at the end. With LOG_APPEND_TIME the largest timestamp is that
    of all. Without records nothing is compressed, as in the batches that the cleaner leaves for a producer's state.
    """
    base_timestamp = records[0].timestamp_ms if records else NO_TIMESTAMP
    if delete_horizon_ms is not None:
        base_timestamp = delete_horizon_ms
    parts: list[bytes] = []
    delta = -1
    for record in records:
        expected, delta = delta + 1, record.offset - base_offset if record.offset >= 0 else delta + 1
        if delta < expected:
            raise EncodeError(f"offset {record.offset} is out of order in a batch at {base_offset}")
        content = _encode_record(record, record.timestamp_ms - base_timestamp, delta)
        parts += encode_varint(len(content)), content
    last_delta = delta if last_offset is None else last_offset - base_offset
    if last_delta < delta:
        raise EncodeError(f"last offset {last_offset} is before the last record's")
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
    """Write (key, value) pairs at consecutive offsets with one timestamp, as coordinator and metadata logs need."""
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
    """The batch of what `encode_records` has made of `count` records."""
    no_producer = (NO_PRODUCER_ID, NO_PRODUCER_EPOCH, NO_SEQUENCE)
    checked = _CHECKED.pack(compression, count - 1, timestamp_ms, timestamp_ms, *no_producer, count)
    if compression:
        body = compress(compression, body)
    return frame_batch(base_offset, 0, checked + body)


def encode_records(pairs: Sequence[tuple[bytes | None, bytes | None]], first_delta: int = 0) -> bytes:
    """What a batch holds, for (key, value) pairs at consecutive offsets with its timestamp. The first is `first_delta`
    behind the base offset.
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
        except (IndexError, TypeError):  # longer than the table of lengths, or both null
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
    """Write a batch with one control record; it counts as transactional exactly when it ends a transaction."""
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
