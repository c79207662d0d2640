# SPDX-License-Identifier: Apache-2.0
"""Serializes records, collects them in batches for a shard's log, and maps group ids to partitions.

Records are framed as in Kafka's coordinator logs or in its metadata log. A record of an unknown type or version is
deserialized to None: a newer release wrote it. Readers of the log count and skip it (as KIP-915 does for downgrades).
Bytes that contradict their own type and version raise DecodeError.

Recovery keeps or drops whole batches. So an atomic result never spans two batches. A batch belongs to one producer, so
the records of a transaction and its marker have batches of their own. Sizes are checked with a cheap upper bound. The
exact size is computed only if the bound exceeds the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final, NamedTuple, Protocol, TypeAlias

from kcoord.runtime.result import CoordinatorRecord, PackedRecords, Producer
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, control_key, end_txn_marker
from kcoord_protocol.errors import DecodeError, Errors, KafkaError
from kcoord_protocol.messages import ControlRecordTypeSchema, EndTxnMarker, Message, message_class
from kcoord_protocol.primitives import decode_uvarint, encode_uvarint
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    Record,
    encode_batch,
    encode_batch_around,
    encode_batch_from_parts,
)

_UINT32: Final = 0xFFFF_FFFF
_SIGN_BIT: Final = 0x8000_0000
_INT32_MIN: Final = -0x8000_0000

SerializedRecord: TypeAlias = tuple[bytes | None, bytes | None]

GROUP_RECORDS: Final = (
    "OffsetCommit",
    "GroupMetadata",
    "ConsumerGroupMetadata",
    "ConsumerGroupPartitionMetadata",
    "ConsumerGroupMemberMetadata",
    "ConsumerGroupTargetAssignmentMetadata",
    "ConsumerGroupTargetAssignmentMember",
    "ConsumerGroupCurrentMemberAssignment",
    "ConsumerGroupRegularExpression",
    "GroupImport",
)
TRANSACTION_RECORDS: Final = ("TransactionLog",)
METADATA_RECORDS: Final = (
    "AccessControlEntryRecord",
    "BrokerRegistrationChangeRecord",
    "ClearElrRecord",
    "ClientQuotaRecord",
    "ConfigRecord",
    "DelegationTokenRecord",
    "FeatureLevelRecord",
    "FenceBrokerRecord",
    "NoOpRecord",
    "PartitionChangeRecord",
    "PartitionRecord",
    "ProducerIdsRecord",
    "RegisterBrokerRecord",
    "RegisterControllerRecord",
    "RemoveAccessControlEntryRecord",
    "RemoveDelegationTokenRecord",
    "RemoveTopicRecord",
    "RemoveUserScramCredentialRecord",
    "TopicRecord",
    "UnfenceBrokerRecord",
    "UnregisterBrokerRecord",
    "UserScramCredentialRecord",
)
_INT16: Final = Struct(">h")
_METADATA_FRAME_VERSION: Final = 1
_METADATA_FRAME: Final = encode_uvarint(_METADATA_FRAME_VERSION)


class RecordSerde(Protocol):
    """The format of the records in one kind of log."""

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord:
        """Returns the key and the value of the record in bytes."""
        ...

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        """Returns the record, or None if its type or version is unknown. Raises DecodeError for malformed bytes."""

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        """Returns type and version of a record of an unknown type or version, for a log line."""


class CoordinatorSerde:
    """Kafka's coordinator records: an int16 type before the key, an int16 version before the value.

    `names` are the record types of the log, without the suffixes `Key` and `Value`. Every log has its own numbers for
    its types.
    """

    def __init__(self, names: Iterable[str] = GROUP_RECORDS) -> None:
        self._types: dict[int, tuple[type[Message], type[Message]]] = {}
        for name in names:
            key_class = message_class(f"{name}Key")
            classes = key_class, message_class(f"{name}Value")
            self._types[key_class.api_key] = classes
            if name == "OffsetCommit":
                # Old Kafka releases write committed offsets with type 0. The key is the same.
                self._types[0] = classes
        self._type_prefixes = {key_class: _INT16.pack(key_class.api_key) for key_class, _ in self._types.values()}

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord:
        key = record.key
        assert key is not None, "a coordinator record has a key"
        key_bytes = self._type_prefixes[type(key)] + key.encode(0)
        if record.value is None:
            return key_bytes, None
        version = record.value_version
        return key_bytes, _INT16.pack(version) + record.value.encode(version)

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        if key is None:
            return None
        classes = self._types.get(_int16(key, "key"))
        if classes is None:
            return None
        key_class, value_class = classes
        if value is None:
            return CoordinatorRecord(key_class.decode(key[2:], 0), None)
        version = _int16(value, "value")
        if version not in value_class.valid_versions:
            return None
        return CoordinatorRecord(key_class.decode(key[2:], 0), value_class.decode(value[2:], version), version)

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        if key is None:
            return "a record without a key"
        version = "" if value is None else f", version {_int16(value, 'value')}"
        return f"record type {_int16(key, 'key')}{version}"


class MetadataSerde:
    """Kafka's metadata records: no key; the value starts with a frame version, the type and the version as varints."""

    def __init__(self, names: Iterable[str] = METADATA_RECORDS) -> None:
        classes = [message_class(name) for name in names]
        self._types = {cls.api_key: cls for cls in classes}
        self._prefixes = {cls: _METADATA_FRAME + encode_uvarint(cls.api_key) for cls in classes}

    def serialize(self, record: CoordinatorRecord) -> SerializedRecord:
        value = record.value
        assert value is not None, "a metadata record has a value"
        version = record.value_version
        return None, self._prefixes[type(value)] + encode_uvarint(version) + value.encode(version)

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        if value is None:
            return None
        frame_version, record_type, version, position = _metadata_header(value)
        cls = self._types.get(record_type)
        if frame_version != _METADATA_FRAME_VERSION or cls is None or version not in cls.valid_versions:
            return None
        return CoordinatorRecord(None, cls.decode(value[position:], version), version)

    def describe(self, key: bytes | None, value: bytes | None) -> str:
        if value is None:
            return "a record without a value"
        frame_version, record_type, version, _ = _metadata_header(value)
        return f"frame version {frame_version}, record type {record_type}, version {version}"


def _int16(data: bytes, what: str) -> int:
    if len(data) < 2:
        raise DecodeError(f"the {what} of a coordinator record has {len(data)} bytes")
    number: int
    (number,) = _INT16.unpack_from(data)
    return number


def _metadata_header(value: bytes) -> tuple[int, int, int, int]:
    """Returns the frame version, the record type, the record version, and the position of the record."""
    try:
        frame_version, position = decode_uvarint(value, 0)
        record_type, position = decode_uvarint(value, position)
        version, position = decode_uvarint(value, position)
    except (IndexError, ValueError) as error:
        raise DecodeError("the header of a metadata record is cut off or not made of varints") from error
    return frame_version, record_type, version, position


_PLAIN_OVERHEAD_BOUND_BYTES: Final = 23
"""The maximum size of the lengths, deltas and flags around a record's key and value."""
_REASON_BOUND_BYTES: Final = 49
"""The maximum size of the reason of a tombstone."""
_RECORD_OVERHEAD_BOUND_BYTES: Final = _PLAIN_OVERHEAD_BOUND_BYTES + _REASON_BOUND_BYTES

REASON_HEADER: Final = "kcoord.reason"
"""The record header with the reason for a tombstone. Kafka ignores it."""

PRINCIPAL_HEADER: Final = "kcoord.principal"
"""The record header with the principal whose request wrote a tombstone. Kafka ignores it."""

_PRINCIPAL_OVERHEAD_BYTES: Final = len(PRINCIPAL_HEADER) + 8
"""The maximum size of the name and the lengths around a principal of up to a megabyte."""

Headers: TypeAlias = list[tuple[str, bytes | None]]


class BatchStamp(NamedTuple):
    """The properties of a result that needs a batch of its own: its transaction, or the headers of its tombstones.

    The batch is part of the transaction of `producer`, or ends it if `is_control`. `headers` has one entry per record,
    empty for a record without headers.
    """

    producer: Producer | None
    is_control: bool = False
    headers: tuple[Headers, ...] = ()


def stamp_of(records: Sequence[CoordinatorRecord]) -> BatchStamp | None:
    """Returns the stamp for the batch of a result's records, or None if they may share a batch with other results."""
    first = records[0]
    if first.producer is None:
        if not any(record.reason for record in records):
            return None
        return BatchStamp(None, headers=tuple(map(_headers_of, records)))
    assert all(record.producer == first.producer for record in records), (
        f"R-12: the records of a result belong to {len({record.producer for record in records})} transactions"
    )
    assert len(records) == 1 or not first.is_control, (
        f"R-13: a result has a transaction marker in {len(records)} records"
    )
    return BatchStamp(first.producer, first.is_control)


def _headers_of(record: CoordinatorRecord) -> Headers:
    headers: Headers = []
    if record.reason:
        headers.append((REASON_HEADER, record.reason.encode()))
    if record.principal:
        headers.append((PRINCIPAL_HEADER, record.principal.encode()))
    return headers


def serialize_control(record: CoordinatorRecord) -> SerializedRecord:
    """Serializes a transaction marker, whose format is the same in all logs."""
    key, value = record.key, record.value
    assert isinstance(key, ControlRecordTypeSchema)
    assert isinstance(value, EndTxnMarker)
    return control_key(ControlRecordType(key.type)), end_txn_marker(value.coordinator_epoch)


class OpenBatch:
    """A batch to which results can be added. All its records have the timestamp of its first result."""

    __slots__ = ("_records", "base_offset", "size_bound_bytes", "stamp", "timestamp_ms")

    def __init__(self, base_offset: int, timestamp_ms: int, stamp: BatchStamp | None = None) -> None:
        self.base_offset = base_offset
        self.timestamp_ms = timestamp_ms
        self.stamp = stamp
        self.size_bound_bytes = BATCH_OVERHEAD_BYTES
        self._records: list[SerializedRecord] = []

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self.base_offset + len(self._records)

    def add(self, records: list[SerializedRecord], bound_bytes: int) -> None:
        """Adds the records of one result. `bound_bytes` is their `size_bound_bytes`."""
        self._records += records
        self.size_bound_bytes += bound_bytes

    def takes(self, stamp: BatchStamp | None, bound_bytes: int, max_batch_bytes: int) -> bool:
        """True if a result fits into this batch. A stamped result has a batch of its own, as transactions in Kafka."""
        return stamp is None and self.stamp is None and self.size_bound_bytes + bound_bytes <= max_batch_bytes

    def encode(self, compression: Compression = Compression.NONE) -> bytes:
        """Returns the batch in bytes. A transaction marker is never compressed, as in Kafka."""
        if self.stamp is None:
            return encode_batch_from_parts(
                self._records, base_offset=self.base_offset, timestamp_ms=self.timestamp_ms, compression=compression
            )
        if self.stamp.producer is None:
            return encode_batch(
                [
                    Record(key, value, headers, self.timestamp_ms)
                    for (key, value), headers in zip(self._records, self.stamp.headers, strict=True)
                ],
                base_offset=self.base_offset,
                compression=compression,
            )
        producer_id, producer_epoch = self.stamp.producer
        if not self.stamp.is_control:
            return encode_batch_from_parts(
                self._records,
                base_offset=self.base_offset,
                timestamp_ms=self.timestamp_ms,
                compression=compression,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                is_transactional=True,
            )
        return encode_batch(
            [Record(key, value, timestamp_ms=self.timestamp_ms) for key, value in self._records],
            base_offset=self.base_offset,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            is_transactional=True,
            is_control=True,
        )


class PackedBatch:
    """A batch of results whose records are already encoded."""

    __slots__ = ("_bodies", "base_offset", "count", "size_bytes", "timestamp_ms")

    def __init__(self, base_offset: int, timestamp_ms: int) -> None:
        self.base_offset = base_offset
        self.timestamp_ms = timestamp_ms
        self.count = 0
        self.size_bytes = BATCH_OVERHEAD_BYTES
        self._bodies: list[bytes] = []

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self.base_offset + self.count

    def add(self, body: bytes, count: int) -> None:
        """Adds the records of one result. They were encoded for their place after `self.count` other records."""
        self._bodies.append(body)
        self.count += count
        self.size_bytes += len(body)

    def encode(self, compression: Compression = Compression.NONE) -> bytes:
        """Returns the batch in bytes."""
        return encode_batch_around(
            b"".join(self._bodies),
            self.count,
            timestamp_ms=self.timestamp_ms,
            base_offset=self.base_offset,
            compression=compression,
        )


def size_bound_bytes(records: list[SerializedRecord]) -> int:
    """Returns an upper bound of the size of these records in a batch."""
    sizes = sum([len(key) for key, _ in records if key]) + sum([len(value) for _, value in records if value])
    return _RECORD_OVERHEAD_BOUND_BYTES * len(records) + sizes


def runs_of(records: list[SerializedRecord], max_batch_bytes: int) -> Iterator[slice]:
    """Yields the slices of the records that fit into a batch each. Each record must fit into one."""
    start, bound_bytes = 0, BATCH_OVERHEAD_BYTES
    for number, record in enumerate(records):
        record_bytes = size_bound_bytes([record])
        if number > start and bound_bytes + record_bytes > max_batch_bytes:
            yield slice(start, number)
            start, bound_bytes = number, BATCH_OVERHEAD_BYTES
        bound_bytes += record_bytes
    yield slice(start, len(records))


def check_size(records: Sequence[CoordinatorRecord], serialized: list[SerializedRecord], max_batch_bytes: int) -> None:
    """Raises MESSAGE_TOO_LARGE if a result does not fit into one batch, as Kafka does above `max.message.bytes`.

    All records with a principal have the same, since one request asked for them.
    """
    bound_bytes = BATCH_OVERHEAD_BYTES + size_bound_bytes(serialized)
    if records[0].principal:
        bound_bytes += len(records) * (_PRINCIPAL_OVERHEAD_BYTES + len(records[0].principal.encode()))
    if bound_bytes <= max_batch_bytes:
        return
    stamp = stamp_of(records)
    if stamp is None and bound_bytes - len(records) * _REASON_BOUND_BYTES <= max_batch_bytes:
        return
    batch = OpenBatch(0, 0, stamp)
    batch.add(serialized, bound_bytes)
    size_bytes = len(batch.encode())
    if size_bytes > max_batch_bytes:
        text = f"{len(records)} records of {size_bytes} bytes exceed the limit of {max_batch_bytes} bytes per batch"
        raise KafkaError(Errors.MESSAGE_TOO_LARGE, text)


class WriteBuffer:
    """The batches that the next append of a shard will write, with their final offsets.

    `add` and `pack` get the offset of their first record, and return whether they began a batch.
    """

    __slots__ = ("_compression", "_max_batch_bytes", "base_offset", "batches")

    def __init__(self, max_batch_bytes: int, compression: Compression) -> None:
        self.base_offset = 0
        self._max_batch_bytes = max_batch_bytes
        self._compression = compression
        self.batches: list[OpenBatch | PackedBatch] = []

    @property
    def next_offset(self) -> int:
        """The offset after the last record. The buffer is not empty."""
        return self.batches[-1].next_offset

    def add(self, records: list[SerializedRecord], stamp: BatchStamp | None, next_offset: int, now_ms: int) -> bool:
        """Adds a result to the last batch if it fits there, otherwise to a new batch. True if it began a batch."""
        bound_bytes = size_bound_bytes(records)
        batch = self.batches[-1] if self.batches else None
        if isinstance(batch, OpenBatch) and batch.takes(stamp, bound_bytes, self._max_batch_bytes):
            batch.add(records, bound_bytes)
            return False
        batch = OpenBatch(next_offset, now_ms, stamp)
        batch.add(records, bound_bytes)
        self.add_batch(batch)
        return True

    def pack(self, packed: PackedRecords, next_offset: int) -> bool | None:
        """Adds a packed result to the last batch, if that has packed results and space, otherwise to a new batch.

        Returns True if it began a batch, and None, without any change, if the result is larger than a batch may be.
        """
        batches = self.batches
        batch = batches[-1] if batches else None
        if type(batch) is PackedBatch:
            body = packed.encode_records(batch.count)
            if batch.size_bytes + len(body) <= self._max_batch_bytes:
                batch.add(body, packed.count)
                return False
        alone = PackedBatch(next_offset, packed.timestamp_ms)
        alone.add(packed.encode_records(0), packed.count)
        if alone.size_bytes > self._max_batch_bytes:
            return None
        self.add_batch(alone)
        return True

    def add_batch(self, batch: OpenBatch | PackedBatch) -> None:
        """Adds a batch, whose first offset follows the last one of the buffer."""
        if not self.batches:
            self.base_offset = batch.base_offset
        else:
            assert batch.base_offset == self.next_offset, (
                f"R-15: a batch begins at offset {batch.base_offset}, but the one before it ends at {self.next_offset}"
            )
        self.batches.append(batch)

    def take(self) -> bytes:
        """Encodes and removes all batches."""
        data = b"".join([batch.encode(self._compression) for batch in self.batches])
        self.batches.clear()
        return data

    def clear(self) -> None:
        """Drops all batches."""
        self.batches.clear()


def java_string_hash(text: str) -> int:
    """Returns Java's `String.hashCode`: a signed 32-bit number, base 31 over the UTF-16 code units."""
    value = 0
    if text.isascii():
        for unit in text.encode("ascii"):
            value = (value * 31 + unit) & _UINT32
    else:
        data = text.encode("utf-16-be", "surrogatepass")
        for high, low in zip(data[::2], data[1::2], strict=True):
            value = (value * 31 + (high << 8 | low)) & _UINT32
    return value - (value & _SIGN_BIT) * 2


@lru_cache(maxsize=8192)
def partition_for(group_id: str, partitions: int) -> int:
    """Returns the partition of the internal topic, and so the shard, of a group id or transactional id.

    It is the absolute value of the id's hash, modulo the number of partitions. All brokers must agree on it, so the
    hash is Java's. The smallest int32 has no absolute value in Java; Kafka uses 0 (observed in Kafka 4.3.1's folders).
    """
    value = java_string_hash(group_id)
    return 0 if value == _INT32_MIN else abs(value) % partitions
