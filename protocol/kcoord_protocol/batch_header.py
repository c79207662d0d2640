# SPDX-License-Identifier: Apache-2.0
"""The 61-byte header of a record batch, format 2: reading it, verifying its checksum, and stamping it in place.

The checksum does not cover the base offset and the leader epoch, so the broker can set them without changing the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from importlib.machinery import PathFinder
from struct import Struct
from typing import Final, TypeAlias, cast

from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import CorruptBatchError, UnsupportedMagicError

Buffer: TypeAlias = bytes | bytearray | memoryview

BATCH_OVERHEAD_BYTES: Final = 61
LOG_OVERHEAD_BYTES: Final = 12
"""The base offset and the length. batch_length does not count them."""
SMALLEST_BATCH_LENGTH: Final = BATCH_OVERHEAD_BYTES - LOG_OVERHEAD_BYTES
MAGIC: Final = 2
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1

LOG_APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40
COMPRESSION_BITS: Final = 0x07

HEADER: Final = Struct(">qiibIhiqqqhii")
PLACE: Final = Struct(">qi4xb6xi8xq")
"""The fields of a header that place a batch in a log: base offset, length, format, last offset delta, max timestamp."""
_INT64: Final = Struct(">q")
_INT32: Final = Struct(">i")
_UINT32: Final = Struct(">I")
_INT16: Final = Struct(">h")
_PRODUCER: Final = Struct(">qhi")
_LEADER_EPOCH_POSITION: Final = 12
MAGIC_POSITION: Final = 16
_CRC_POSITION: Final = 17
ATTRIBUTES_POSITION: Final = 21
"""The checksum covers everything from the attributes on."""
_MAX_TIMESTAMP_POSITION: Final = 35
_PRODUCER_POSITION: Final = 43
_MAX_INT32: Final = 0x7FFF_FFFF


def _load_crc32c() -> Callable[..., int]:
    """Return the function of the extension module alone.

    Importing its package would read installed metadata, which costs a tenth of kcoord's start.
    """
    package = PathFinder.find_spec("crc32c")
    extension = PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations) if package else None
    if extension is None or extension.loader is None:
        raise ImportError("the crc32c package is not installed", name="crc32c")
    module = extension.loader.create_module(extension)
    assert module is not None
    extension.loader.exec_module(module)
    return cast(Callable[..., int], module.crc32c)


crc32c: Final = _load_crc32c()


class TimestampType(IntEnum):
    """Whether the producer (CREATE_TIME) or the broker (LOG_APPEND_TIME) sets the timestamps of a batch."""

    CREATE_TIME = 0
    LOG_APPEND_TIME = 1


@dataclass(slots=True)
class BatchHeader:
    """The fields in the 61 bytes before the records."""

    base_offset: int
    batch_length: int
    partition_leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    records_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch, header included."""
        return self.batch_length + LOG_OVERHEAD_BYTES

    @property
    def last_offset(self) -> int:
        """Return the offset of the last record."""
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        """Return the offset after the last record."""
        return self.base_offset + self.last_offset_delta + 1

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record. Sequence numbers wrap to 0 after the largest int32."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & _MAX_INT32

    @property
    def compression(self) -> Compression:
        """Return the codec of the records. Raise CorruptBatchError if the code is unknown."""
        try:
            return Compression(self.attributes & COMPRESSION_BITS)
        except ValueError:
            raise CorruptBatchError(f"unknown compression codec {self.attributes & COMPRESSION_BITS}") from None

    @property
    def timestamp_type(self) -> TimestampType:
        """Return whether producers set the timestamps, or the broker did when it appended the batch."""
        return TimestampType.LOG_APPEND_TIME if self.attributes & LOG_APPEND_TIME_BIT else TimestampType.CREATE_TIME

    @property
    def is_transactional(self) -> bool:
        """Return whether the batch belongs to a transaction."""
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        """Return whether the batch holds a control record: the end of a transaction."""
        return bool(self.attributes & CONTROL_BIT)

    @property
    def delete_horizon_ms(self) -> int | None:
        """The time from which the cleaner may drop the batch's tombstones. It replaces the base timestamp."""
        return self.base_timestamp if self.attributes & DELETE_HORIZON_BIT else None


def decode_header(data: Buffer, position: int = 0) -> BatchHeader:
    """Read the header at `position`. The records need not be in the data."""
    if len(data) - position < BATCH_OVERHEAD_BYTES:
        if len(data) - position > MAGIC_POSITION and data[position + MAGIC_POSITION] != MAGIC:
            raise unsupported_magic(data[position + MAGIC_POSITION], position)
        reason = f"{len(data) - position} bytes are too few for a batch header of {BATCH_OVERHEAD_BYTES}"
        raise CorruptBatchError(reason, position=position)
    header = BatchHeader(*HEADER.unpack_from(data, position))
    if header.magic != MAGIC:
        raise unsupported_magic(header.magic, position)
    if header.batch_length < SMALLEST_BATCH_LENGTH:
        reason = f"a batch length of {header.batch_length} is less than its header, {SMALLEST_BATCH_LENGTH}"
        raise CorruptBatchError(reason, position=position, base_offset=header.base_offset)
    return header


def unsupported_magic(magic: int, position: int) -> UnsupportedMagicError:
    """Return the error for a batch of another record format than 2."""
    return UnsupportedMagicError(f"record format {magic} is not supported, only format {MAGIC}", position=position)


def verify_crc(data: Buffer, position: int = 0) -> bool:
    """Return whether the batch at `position` is whole and its checksum matches."""
    header = decode_header(data, position)
    end = position + header.size_bytes
    return end <= len(data) and crc32c(memoryview(data)[position + ATTRIBUTES_POSITION : end]) == header.crc


def rewrite_header(
    batch: bytearray | memoryview,
    position: int = 0,
    *,
    base_offset: int | None = None,
    partition_leader_epoch: int | None = None,
    log_append_time_ms: int | None = None,
) -> None:
    """Stamp the whole batch at `position` in place. Only a log append time requires a new checksum."""
    if base_offset is not None:
        _INT64.pack_into(batch, position, base_offset)
    if partition_leader_epoch is not None:
        _INT32.pack_into(batch, position + _LEADER_EPOCH_POSITION, partition_leader_epoch)
    if log_append_time_ms is not None:
        header = decode_header(batch, position)
        _INT16.pack_into(batch, position + ATTRIBUTES_POSITION, header.attributes | LOG_APPEND_TIME_BIT)
        _INT64.pack_into(batch, position + _MAX_TIMESTAMP_POSITION, log_append_time_ms)
        checked = memoryview(batch)[position + ATTRIBUTES_POSITION : position + header.size_bytes]
        _UINT32.pack_into(batch, position + _CRC_POSITION, crc32c(checked))


def stamp_producer(batch: bytes, producer_id: int, producer_epoch: int, base_sequence: int) -> bytes:
    """Return a copy of the batch with base offset 0 and this producer, as a Produce request has it."""
    stamped = bytearray(batch)
    _INT64.pack_into(stamped, 0, 0)
    _PRODUCER.pack_into(stamped, _PRODUCER_POSITION, producer_id, producer_epoch, base_sequence)
    _UINT32.pack_into(stamped, _CRC_POSITION, crc32c(memoryview(stamped)[ATTRIBUTES_POSITION:]))
    return bytes(stamped)
