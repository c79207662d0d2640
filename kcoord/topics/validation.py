# SPDX-License-Identifier: Apache-2.0
"""Checks a client's record batch against the rules of its topic, and gives it offset, leader epoch and timestamps in
place.

The bytes stay as sent, compression included, unless `compression.type` asks for another codec. Every record is
walked once, without making objects of them: keys of compacted topics, timestamps and the framing of the records are
what a broker must know before it stores a batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from kcoord.config import TopicConfig
from kcoord.topics.producer_state import NO_PRODUCER_ID, BatchFacts
from kcoord.topics.record_scan import ScanRules, largest_record_bytes, scan_records
from kcoord_protocol.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_OVERHEAD_BYTES,
    LOG_APPEND_TIME_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MAGIC_POSITION,
    NO_TIMESTAMP,
    BatchHeader,
    TimestampType,
    crc32c,
    decode_header,
)
from kcoord_protocol.compression import Compression, decompress
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.record_batch import decode_records, encode_batch

MAX_EXPANSION: Final = 64
ALWAYS_ALLOWED_BYTES: Final = 16 * 1024 * 1024
"""A batch may expand to this, or to so many times max.message.bytes: a small message must not be able to take all
memory (Kafka has no such limit).
"""

_SMALLEST_RECORD_SET_BYTES = 14
_CODEC_MASK = 0x07
_ZSTD_SINCE_PRODUCE_VERSION = 7
_SHOWN_RECORD_ERRORS = 3

_LENGTH = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
_CRC_POSITION = 17
_MAX_TIMESTAMP_POSITION = 35
_CRC_AND_ATTRIBUTES = struct.Struct(">Ih")


class RecordsRejectedError(KafkaError):
    """The batch is refused because of single records: `record_errors` has (index in the batch, reason)."""

    def __init__(self, error: Errors, message: str, record_errors: list[tuple[int, str]]) -> None:
        super().__init__(error, message)
        self.record_errors = record_errors


CODECS: Final = {
    "producer": None,
    "uncompressed": Compression.NONE,
    "gzip": Compression.GZIP,
    "snappy": Compression.SNAPPY,
    "lz4": Compression.LZ4,
    "zstd": Compression.ZSTD,
}
"""By the value of `compression.type`; None keeps what the producer chose."""


@dataclass(slots=True)
class BatchRules:
    """What a topic's configuration asks of a batch."""

    max_message_bytes: int
    segment_bytes: int
    compacted: bool = False
    log_append_time: bool = False
    timestamp_before_max_ms: int = 2**63 - 1
    timestamp_after_max_ms: int = 2**63 - 1
    max_record_bytes: int = 2**31 - 1
    """Of a single record in a compressed batch, decompressed."""
    compression: Compression | None = None
    """The codec to store in; None keeps the producer's."""
    compression_level: int | None = None
    """Of that codec; None is its default."""

    @property
    def max_decompressed_bytes(self) -> int:
        return max(MAX_EXPANSION * self.max_message_bytes, ALWAYS_ALLOWED_BYTES)


def batch_rules(config: TopicConfig) -> BatchRules:
    """A topic's configuration as the validation of batches needs it."""
    codec = CODECS[config.compression_type]
    levels = {
        Compression.GZIP: config.compression_gzip_level,
        Compression.LZ4: config.compression_lz4_level,
        Compression.ZSTD: config.compression_zstd_level,
    }
    return BatchRules(
        max_message_bytes=config.max_message_bytes,
        max_record_bytes=config.max_decompressed_message_bytes,
        segment_bytes=config.effective_segment_bytes,
        compacted=config.is_compacted,
        log_append_time=config.message_timestamp_type == "LogAppendTime",
        timestamp_before_max_ms=config.message_timestamp_before_max_ms,
        timestamp_after_max_ms=config.message_timestamp_after_max_ms,
        compression=codec,
        compression_level=None if codec is None else levels.get(codec),
    )


@dataclass(slots=True)
class StampedBatch:
    """A batch as it goes into the log."""

    data: bytes
    facts: BatchFacts
    records_count: int
    max_timestamp: int
    log_append_time_ms: int


def single_batch(records: bytes | None, api_version: int) -> bytes:
    """The one batch of a produce request's partition, without trailing bytes that are no batch (Kafka cuts those off
    too).
    """
    if records is None:
        raise KafkaError(Errors.INVALID_RECORD, "The partition has no records.")
    size = _whole_batch_bytes(records, 0)
    if size is None:
        raise KafkaError(
            Errors.INVALID_RECORD, "A produce request must have one record batch per partition; this one has none."
        )
    if records[MAGIC_POSITION] != MAGIC:
        raise KafkaError(
            Errors.INVALID_RECORD, f"Record batches must have magic 2; this one has {records[MAGIC_POSITION]}."
        )
    if (
        api_version < _ZSTD_SINCE_PRODUCE_VERSION
        and size > ATTRIBUTES_POSITION + 1
        and records[ATTRIBUTES_POSITION + 1] & _CODEC_MASK == Compression.ZSTD
    ):
        raise KafkaError(
            Errors.UNSUPPORTED_COMPRESSION_TYPE,
            f"Produce version {api_version} does not allow zstd; it came with version 7.",
        )
    if _whole_batch_bytes(records, size) is not None:
        raise KafkaError(Errors.INVALID_RECORD, "A produce request may have only one record batch per partition.")
    return records if size == len(records) else records[:size]


def _whole_batch_bytes(records: bytes, position: int) -> int | None:
    """The size of the batch at `position`, None where no whole batch is there."""
    if len(records) - position < LOG_OVERHEAD_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(records, position + 8)
    if length < _SMALLEST_RECORD_SET_BYTES:
        raise KafkaError(Errors.CORRUPT_MESSAGE, f"A record batch of length {length} is shorter than any batch.")
    if len(records) - position <= MAGIC_POSITION:
        return None
    if records[position + MAGIC_POSITION] > MAGIC:
        raise KafkaError(
            Errors.CORRUPT_MESSAGE, f"There is no record batch of magic {records[position + MAGIC_POSITION]}."
        )
    size = int(length) + LOG_OVERHEAD_BYTES
    return size if len(records) - position >= size else None


def check_batch(data: bytes, rules: BatchRules) -> BatchHeader:
    """The checks on the header and the checksum, in Kafka's order."""
    if len(data) < BATCH_OVERHEAD_BYTES:
        raise KafkaError(Errors.CORRUPT_MESSAGE, f"A record batch of {len(data)} bytes has no room for its header.")
    header = decode_header(data)
    if header.base_offset != 0:
        raise KafkaError(Errors.INVALID_RECORD, f"The base offset of a sent batch must be 0, not {header.base_offset}.")
    _check_size(len(data), rules)
    if len(data) < header.size_bytes or crc32c(memoryview(data)[ATTRIBUTES_POSITION : header.size_bytes]) != header.crc:
        raise KafkaError(Errors.CORRUPT_MESSAGE, "The checksum of the record batch does not match its bytes.")
    _check_counts(header)
    if header.is_control:
        raise KafkaError(Errors.INVALID_RECORD, "Clients must not write control records.")
    if header.producer_id != NO_PRODUCER_ID and header.base_sequence < 0:
        raise KafkaError(
            Errors.INVALID_RECORD, f"Sequence number {header.base_sequence} is not valid in a batch with a producer id."
        )
    return header


def _check_size(size: int, rules: BatchRules) -> None:
    if size > rules.max_message_bytes:
        raise KafkaError(
            Errors.MESSAGE_TOO_LARGE,
            f"The record batch has {size} bytes; the topic's max.message.bytes is {rules.max_message_bytes}.",
        )


def _check_counts(header: BatchHeader) -> None:
    offsets = header.last_offset_delta + 1
    if offsets <= 0:
        raise KafkaError(
            Errors.INVALID_RECORD, f"The record batch has an invalid last offset delta: {header.last_offset_delta}."
        )
    if header.records_count <= 0:
        raise KafkaError(Errors.INVALID_RECORD, f"The record batch announces {header.records_count} records.")
    if offsets != header.records_count:
        raise KafkaError(
            Errors.INVALID_RECORD,
            f"The record batch spans {offsets} offsets and announces {header.records_count} records.",
        )


def stamp_batch(data: bytes, rules: BatchRules, *, base_offset: int, leader_epoch: int, now_ms: int) -> StampedBatch:
    """Validates the batch and returns it as it is to be stored at `base_offset`."""
    header = check_batch(data, rules)
    max_timestamp = _check_records(data, header, rules, now_ms)
    if rules.log_append_time:
        max_timestamp = now_ms
    if rules.compression is None or rules.compression == header.compression:
        stored = _stamp_in_place(data, header, base_offset, leader_epoch, max_timestamp, rules)
    else:
        stored = _stamp_in_place(
            _recompress(data, header, rules), header, base_offset, leader_epoch, max_timestamp, rules
        )
        _check_size(len(stored), rules)
    if len(stored) > rules.segment_bytes:
        raise KafkaError(
            Errors.RECORD_LIST_TOO_LARGE,
            f"The record batch has {len(stored)} bytes; a segment has {rules.segment_bytes}.",
        )
    last_offset = base_offset + header.last_offset_delta
    facts = BatchFacts(
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.last_sequence,
        base_offset,
        last_offset,
        max_timestamp,
        header.is_transactional,
    )
    return StampedBatch(
        stored, facts, header.records_count, max_timestamp, now_ms if rules.log_append_time else NO_TIMESTAMP
    )


def _check_records(data: bytes, header: BatchHeader, rules: BatchRules, now_ms: int) -> int:
    """Walks the records; returns their largest timestamp."""
    scan_rules = ScanRules(
        needs_key=rules.compacted,
        checks_timestamps=not rules.log_append_time,
        earliest_ms=now_ms - rules.timestamp_before_max_ms,
        latest_ms=now_ms + rules.timestamp_after_max_ms,
        type_is_wrong=header.timestamp_type == TimestampType.LOG_APPEND_TIME and not rules.log_append_time,
    )
    try:
        compression = header.compression
        records = data[BATCH_OVERHEAD_BYTES:]
        if compression is not Compression.NONE:
            records = decompress(compression, records, rules.max_decompressed_bytes)
        scan = scan_records(records, header.records_count, header.base_timestamp, scan_rules)
    except (DecodeError, ValueError) as error:
        raise KafkaError(Errors.INVALID_RECORD, f"The records of the batch cannot be read: {error}") from error
    if len(records) > rules.max_record_bytes and compression is not Compression.NONE:
        largest = largest_record_bytes(records, header.records_count)
        if largest > rules.max_record_bytes:
            text = (
                f"A record of {largest} bytes is larger than max.decompressed.message.bytes={rules.max_record_bytes}."
            )
            raise KafkaError(Errors.INVALID_RECORD, text)
    if scan.errors:
        _reject(scan.errors)
    return scan.max_timestamp


def _reject(errors: list[tuple[int, Errors, str]]) -> None:
    record_errors = [(index, text) for index, _, text in errors]
    if any(error is Errors.INVALID_TIMESTAMP for _, error, _ in errors):
        raise RecordsRejectedError(
            Errors.INVALID_TIMESTAMP, "The timestamp of one or more records is not allowed.", record_errors
        )
    shown = "; ".join(text for _, text in record_errors[:_SHOWN_RECORD_ERRORS])
    raise RecordsRejectedError(
        Errors.INVALID_RECORD, f"{len(record_errors)} records are not valid, the first: {shown}", record_errors
    )


def _recompress(data: bytes, header: BatchHeader, rules: BatchRules) -> bytes:
    try:
        records = decode_records(data, max_bytes=rules.max_decompressed_bytes)
    except DecodeError as error:
        # The walk over the records leaves alone what is in their headers.
        raise KafkaError(Errors.INVALID_RECORD, f"The records of the batch cannot be read: {error}") from error
    return encode_batch(
        records,
        compression=rules.compression or Compression.NONE,
        compression_level=rules.compression_level,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
    )


def _stamp_in_place(
    data: bytes, header: BatchHeader, base_offset: int, leader_epoch: int, max_timestamp: int, rules: BatchRules
) -> bytes:
    """Writes what the broker owns. The checksum starts at the attributes, so offset and epoch do not touch it."""
    stored = bytearray(data)
    _OFFSET.pack_into(stored, 0, base_offset)
    _LENGTH.pack_into(stored, LOG_OVERHEAD_BYTES, leader_epoch)
    timestamp_changed = _OFFSET.unpack_from(stored, _MAX_TIMESTAMP_POSITION)[0] != max_timestamp
    type_changed = rules.log_append_time != (header.timestamp_type == TimestampType.LOG_APPEND_TIME)
    if timestamp_changed or type_changed or len(data) != header.size_bytes:
        _stamp_timestamp(stored, max_timestamp, log_append_time=rules.log_append_time)
    return bytes(stored)


def _stamp_timestamp(batch: bytearray, max_timestamp: int, *, log_append_time: bool) -> None:
    _OFFSET.pack_into(batch, _MAX_TIMESTAMP_POSITION, max_timestamp)
    _, attributes = _CRC_AND_ATTRIBUTES.unpack_from(batch, _CRC_POSITION)
    attributes = attributes | LOG_APPEND_TIME_BIT if log_append_time else attributes & ~LOG_APPEND_TIME_BIT
    _CRC_AND_ATTRIBUTES.pack_into(batch, _CRC_POSITION, 0, attributes)
    crc = crc32c(memoryview(batch)[ATTRIBUTES_POSITION:])
    _CRC_AND_ATTRIBUTES.pack_into(batch, _CRC_POSITION, crc, attributes)
