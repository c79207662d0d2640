# SPDX-License-Identifier: Apache-2.0
"""Checks a client's record batch against the rules of its topic, and stamps offset, leader epoch and timestamps on it.

The bytes stay as sent, compression included, unless `compression.type` asks for another codec. The check reads every
record once, without making objects of them. It covers what a broker must know before it stores a batch: the framing
of the records, their timestamps, and their keys if the topic is compacted.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from kcoord.config import TopicConfig
from kcoord.topics.record_scan import ScanRules, largest_record_bytes, scan_records
from kcoord_protocol.batch_header import (
    ATTRIBUTES_POSITION,
    BATCH_OVERHEAD_BYTES,
    COMPRESSION_BITS,
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    MAGIC_POSITION,
    NO_TIMESTAMP,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    crc32c,
    decode_header,
)
from kcoord_protocol.compiled import check_records, stamp_sound_batch
from kcoord_protocol.compression import Compression, decompress
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.record_batch import decode_records, encode_batch
from kcoord_protocol.record_check import DOUBTFUL

MAX_EXPANSION: Final = 64
ALWAYS_ALLOWED_BYTES: Final = 16 * 1024 * 1024
"""A compressed batch may expand to ALWAYS_ALLOWED_BYTES or to MAX_EXPANSION times max.message.bytes, whichever is more.

Otherwise a small message could take all memory. Kafka has no such limit.
"""

_SMALLEST_RECORD_SET_BYTES = 14
_ZSTD_SINCE_PRODUCE_VERSION = 7
_SHOWN_RECORD_ERRORS = 3

_LENGTH = struct.Struct(">i")
_KIND = struct.Struct(">8xi4xb4xh")
"""The length, the magic and the attributes."""
_OFFSET = struct.Struct(">q")
_START = struct.Struct(">qii")
"""The base offset, the length and the leader epoch."""
_EARLIEST = -(2**63)
_LATEST = 2**63 - 1
_CRC_POSITION = 17
_MAX_TIMESTAMP_POSITION = 35
_CRC_AND_ATTRIBUTES = struct.Struct(">Ih")
_KEPT_BITS = COMPRESSION_BITS | TRANSACTIONAL_BIT | CONTROL_BIT | DELETE_HORIZON_BIT
"""The attributes that stay if a timestamp is changed. Kafka drops those without a meaning, too."""


class RecordsRejectedError(KafkaError):
    """The batch is rejected because of single records: `record_errors` has (index in the batch, reason)."""

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
"""Codecs by the value of `compression.type`; None keeps the producer's codec."""


@dataclass(slots=True)
class BatchRules:
    """The rules that a topic's configuration sets for batches."""

    max_message_bytes: int
    segment_bytes: int
    compacted: bool = False
    log_append_time: bool = False
    timestamp_before_max_ms: int = 2**63 - 1
    timestamp_after_max_ms: int = 2**63 - 1
    max_record_bytes: int = 2**31 - 1
    """The limit for a single record of a compressed batch, after decompression."""
    compression: Compression | None = None
    """The codec in which batches are stored; None keeps the producer's codec."""
    compression_level: int | None = None
    """The level of `compression`; None is the default of the codec."""
    most_stored_bytes: int = field(init=False)
    """The limit for a batch that is stored as it was sent."""
    keeps_batches: bool = field(init=False)
    """True if an uncompressed batch without any fault is stored as it was sent."""

    def __post_init__(self) -> None:
        self.most_stored_bytes = min(self.max_message_bytes, self.segment_bytes)
        self.keeps_batches = not self.log_append_time and self.compression in (None, Compression.NONE)

    @property
    def max_decompressed_bytes(self) -> int:
        return max(MAX_EXPANSION * self.max_message_bytes, ALWAYS_ALLOWED_BYTES)


@lru_cache(maxsize=64)
def batch_rules(config: TopicConfig) -> BatchRules:
    """Returns the rules that a topic's configuration sets for batches. Partitions with the same object share them."""
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


def single_batch(records: Buffer | None, api_version: int) -> Buffer:
    """Returns the single batch that a produce request has for a partition.

    Trailing bytes that are no batch are cut off, as Kafka does.
    """
    if records is None:
        raise KafkaError(Errors.INVALID_RECORD, "The produce request has no records for the partition.")
    if len(records) >= BATCH_OVERHEAD_BYTES:
        # Nearly all requests. The checks below take three times as long.
        length, magic, attributes = _KIND.unpack_from(records)
        if length == len(records) - LOG_OVERHEAD_BYTES and magic == MAGIC and not attributes & COMPRESSION_BITS:
            return records
    size = _whole_batch_bytes(records, 0)
    if size is None:
        raise KafkaError(
            Errors.INVALID_RECORD,
            "A produce request must have one record batch per partition; this request has no whole batch.",
        )
    if records[MAGIC_POSITION] != MAGIC:
        raise KafkaError(
            Errors.INVALID_RECORD, f"Record batches must have magic 2; this batch has {records[MAGIC_POSITION]}."
        )
    if (
        api_version < _ZSTD_SINCE_PRODUCE_VERSION
        and size > ATTRIBUTES_POSITION + 1
        and records[ATTRIBUTES_POSITION + 1] & COMPRESSION_BITS == Compression.ZSTD
    ):
        raise KafkaError(
            Errors.UNSUPPORTED_COMPRESSION_TYPE,
            f"Produce version {api_version} does not allow zstd, which requires version 7 or later.",
        )
    if size == len(records):
        return records
    if _whole_batch_bytes(records, size) is not None:
        raise KafkaError(Errors.INVALID_RECORD, "A produce request may have only one record batch per partition.")
    return records[:size]


def _whole_batch_bytes(records: Buffer, position: int) -> int | None:
    """Returns the size of the batch at `position`, None if the bytes do not hold a whole batch."""
    if len(records) - position < LOG_OVERHEAD_BYTES:
        return None
    (length,) = _LENGTH.unpack_from(records, position + 8)
    if length < _SMALLEST_RECORD_SET_BYTES:
        raise KafkaError(
            Errors.CORRUPT_MESSAGE, f"The record batch length {length} is below {_SMALLEST_RECORD_SET_BYTES}."
        )
    if len(records) - position <= MAGIC_POSITION:
        return None
    if records[position + MAGIC_POSITION] > MAGIC:
        raise KafkaError(
            Errors.CORRUPT_MESSAGE, f"The magic {records[position + MAGIC_POSITION]} of the record batch is unknown."
        )
    size = int(length) + LOG_OVERHEAD_BYTES
    return size if len(records) - position >= size else None


def check_batch(data: Buffer, rules: BatchRules) -> BatchHeader:
    """Checks the header and the checksum of a batch, in Kafka's order; returns the header."""
    (base_offset,) = _OFFSET.unpack_from(data)
    if base_offset != 0:
        raise KafkaError(Errors.INVALID_RECORD, f"The base offset of a sent batch must be 0, not {base_offset}.")
    if len(data) < BATCH_OVERHEAD_BYTES:
        raise KafkaError(
            Errors.CORRUPT_MESSAGE,
            f"The record batch has {len(data)} bytes; its header alone has {BATCH_OVERHEAD_BYTES}.",
        )
    header = decode_header(data)
    if len(data) > rules.max_message_bytes:
        raise _too_large(len(data), rules)
    end = header.batch_length + LOG_OVERHEAD_BYTES
    if len(data) < end or crc32c(memoryview(data)[ATTRIBUTES_POSITION:end]) != header.crc:
        raise KafkaError(Errors.CORRUPT_MESSAGE, "The checksum of the record batch does not match its bytes.")
    if not 0 <= header.last_offset_delta == header.records_count - 1:
        raise _wrong_counts(header)
    if header.attributes & CONTROL_BIT:
        raise KafkaError(Errors.INVALID_RECORD, "Clients must not write control records.")
    if header.producer_id >= 0 and header.base_sequence < 0:
        raise KafkaError(
            Errors.INVALID_RECORD,
            f"Sequence number {header.base_sequence} is not valid: a batch with a producer id needs at least 0.",
        )
    return header


def _too_large(size: int, rules: BatchRules) -> KafkaError:
    return KafkaError(
        Errors.MESSAGE_TOO_LARGE,
        f"The record batch has {size} bytes; the topic's max.message.bytes is {rules.max_message_bytes}.",
    )


def _wrong_counts(header: BatchHeader) -> KafkaError:
    offsets = header.last_offset_delta + 1
    if offsets <= 0:
        text = f"The record batch has an invalid last offset delta: {header.last_offset_delta}."
    elif header.records_count <= 0:
        text = f"The records count {header.records_count} of the record batch is below 1."
    else:
        text = f"The record batch spans {offsets} offsets, but its records count is {header.records_count}."
    return KafkaError(Errors.INVALID_RECORD, text)


def stamp_batch(
    data: Buffer, rules: BatchRules, *, base_offset: int, leader_epoch: int, now_ms: int
) -> tuple[bytes, BatchHeader]:
    """Validates the batch; returns it as it is stored at `base_offset`, and the header that it has there."""
    if rules.keeps_batches:
        sound = stamp_sound_batch(
            data,
            base_offset,
            leader_epoch,
            rules.most_stored_bytes,
            rules.compacted,
            now_ms - rules.timestamp_before_max_ms,
            now_ms + rules.timestamp_after_max_ms,
        )
        if sound is not None:
            return sound
    header = check_batch(data, rules)
    stored = _stamp(data, base_offset, leader_epoch)
    header.base_offset, header.partition_leader_epoch = base_offset, leader_epoch
    max_timestamp = _check_records(stored, header, rules, now_ms)
    if rules.log_append_time:
        max_timestamp = now_ms
    if rules.compression is not None and rules.compression != header.compression:
        stored = _stamp(_recompress(data, header, rules), base_offset, leader_epoch)
        header = decode_header(stored)
        if len(stored) > rules.max_message_bytes:
            raise _too_large(len(stored), rules)
    type_changed = rules.log_append_time != bool(header.attributes & LOG_APPEND_TIME_BIT)
    if type_changed or len(stored) != header.size_bytes or max_timestamp != header.max_timestamp:
        stored = _stamp_timestamp(stored, max_timestamp, log_append_time=rules.log_append_time)
        header = decode_header(stored)
    if len(stored) > rules.segment_bytes:
        raise KafkaError(
            Errors.RECORD_LIST_TOO_LARGE,
            f"The record batch has {len(stored)} bytes; the largest segment has {rules.segment_bytes}.",
        )
    return stored, header


def _stamp(data: Buffer, base_offset: int, leader_epoch: int) -> bytes:
    """Returns a copy with these fields. The checksum begins at the attributes, so it stays correct."""
    start = _START.pack(base_offset, len(data) - LOG_OVERHEAD_BYTES, leader_epoch)
    return b"".join((start, memoryview(data)[_START.size :]))


def _check_records(data: bytes, header: BatchHeader, rules: BatchRules, now_ms: int) -> int:
    """Checks the records; returns their largest timestamp.

    If the batch claims log append time, every record has the largest timestamp of the header. Kafka accepts such a
    batch as if a producer had set that timestamp, unless the topic has log append time.
    """
    earliest_ms, latest_ms, refused = _EARLIEST, _LATEST, None
    if not rules.log_append_time:
        earliest_ms, latest_ms = now_ms - rules.timestamp_before_max_ms, now_ms + rules.timestamp_after_max_ms
    claims_append_time = bool(header.attributes & LOG_APPEND_TIME_BIT)
    if claims_append_time:
        if rules.log_append_time or header.max_timestamp == NO_TIMESTAMP:
            refused = "The batch has the timestamp type LogAppendTime, which only a broker sets."
        elif not earliest_ms <= header.max_timestamp <= latest_ms:
            refused = f"Timestamp {header.max_timestamp} of the batch is not within [{earliest_ms}, {latest_ms}]."
        earliest_ms, latest_ms = _EARLIEST, _LATEST
    records, start, count, base_timestamp = data, BATCH_OVERHEAD_BYTES, header.records_count, header.base_timestamp
    try:
        if header.attributes & COMPRESSION_BITS:
            records, start = decompress(header.compression, data[start:], rules.max_decompressed_bytes), 0
        largest = check_records(records, start, count, rules.compacted, base_timestamp, earliest_ms, latest_ms)
        if largest == DOUBTFUL or refused is not None:
            scan_rules = ScanRules(rules.compacted, not rules.log_append_time, earliest_ms, latest_ms, refused)
            scan = scan_records(records[start:], count, base_timestamp, scan_rules)
            largest, errors = scan.max_timestamp, scan.errors
        else:
            errors = []
    except (DecodeError, ValueError) as error:
        raise KafkaError(Errors.INVALID_RECORD, f"The records of the batch cannot be read: {error}") from error
    if start == 0 and len(records) > rules.max_record_bytes:
        record_bytes = largest_record_bytes(records, count)
        if record_bytes > rules.max_record_bytes:
            text = (
                f"A record of {record_bytes} bytes is larger than "
                f"max.decompressed.message.bytes={rules.max_record_bytes}."
            )
            raise KafkaError(Errors.INVALID_RECORD, text)
    if errors:
        _reject(errors)
    return max(header.max_timestamp, NO_TIMESTAMP) if claims_append_time else largest


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


def _recompress(data: Buffer, header: BatchHeader, rules: BatchRules) -> bytes:
    try:
        records = decode_records(data, max_bytes=rules.max_decompressed_bytes)
    except DecodeError as error:
        # The earlier check of the records does not parse their headers.
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


def _stamp_timestamp(data: bytes, max_timestamp: int, *, log_append_time: bool) -> bytes:
    batch = bytearray(data)
    _OFFSET.pack_into(batch, _MAX_TIMESTAMP_POSITION, max_timestamp)
    _, attributes = _CRC_AND_ATTRIBUTES.unpack_from(batch, _CRC_POSITION)
    attributes = attributes & _KEPT_BITS | log_append_time * LOG_APPEND_TIME_BIT
    _CRC_AND_ATTRIBUTES.pack_into(batch, _CRC_POSITION, 0, attributes)
    crc = crc32c(memoryview(batch)[ATTRIBUTES_POSITION:])
    _CRC_AND_ATTRIBUTES.pack_into(batch, _CRC_POSITION, crc, attributes)
    return bytes(batch)
