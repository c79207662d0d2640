# SPDX-License-Identifier: Apache-2.0
"""Collects the records of whole results into record batches, until a shard's log takes them.

A result is atomic, and a batch is what recovery keeps or drops as a whole, so a result never spans two batches. A batch
belongs to one producer, so records of a transaction, and its marker, have batches of their own. Sizes are checked with
a cheap upper bound; only where that bound exceeds the limit is the exact size looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from kcoord.runtime.result import CoordinatorRecord, PackedRecords, Producer
from kcoord.runtime.serde import SerializedRecord
from kcoord_protocol.compression import Compression
from kcoord_protocol.control_records import ControlRecordType, control_key, end_txn_marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ControlRecordTypeSchema, EndTxnMarker
from kcoord_protocol.record_batch import (
    BATCH_OVERHEAD_BYTES,
    Record,
    encode_batch,
    encode_batch_around,
    encode_batch_from_parts,
)

# Lengths, deltas, flags and the reason of a tombstone around a record's key and value take at most this much.
_RECORD_OVERHEAD_BOUND_BYTES: Final = 72


REASON_HEADER: Final = "kcoord.reason"
"""The record header that says why a tombstone was written. Kafka skips it."""


class BatchStamp(NamedTuple):
    """What sets the batch of one result apart: the transaction that it is part of or ends, or reasons of tombstones.

    `reasons` has one entry per record, "" for none.
    """

    producer: Producer | None
    is_control: bool = False
    reasons: tuple[str, ...] = ()


def stamp_of(records: Sequence[CoordinatorRecord]) -> BatchStamp | None:
    """The stamp of the batch for a result's records, None for records that may share one with others."""
    first = records[0]
    if first.producer is None:
        reasons = tuple(record.reason for record in records)
        return BatchStamp(None, reasons=reasons) if any(reasons) else None
    assert all(record.producer == first.producer for record in records), "one result, one transaction"
    assert len(records) == 1 or not first.is_control, "a marker has a batch of its own"
    return BatchStamp(first.producer, first.is_control)


def serialize_control(record: CoordinatorRecord) -> SerializedRecord:
    """A transaction marker, which looks the same in all logs."""
    key, value = record.key, record.value
    assert isinstance(key, ControlRecordTypeSchema)
    assert isinstance(value, EndTxnMarker)
    return control_key(ControlRecordType(key.type)), end_txn_marker(value.coordinator_epoch)


class OpenBatch:
    """A batch that still takes results; its records carry the time of its first one."""

    __slots__ = ("_records", "base_offset", "size_bound_bytes", "stamp", "timestamp_ms")

    def __init__(self, base_offset: int, timestamp_ms: int, stamp: BatchStamp | None = None) -> None:
        self.base_offset = base_offset
        self.timestamp_ms = timestamp_ms
        self.stamp = stamp
        self.size_bound_bytes = BATCH_OVERHEAD_BYTES
        self._records: list[SerializedRecord] = []

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self._records)

    def add(self, records: list[SerializedRecord], bound_bytes: int) -> None:
        """Takes one result; `bound_bytes` is its `size_bound_bytes`."""
        self._records += records
        self.size_bound_bytes += bound_bytes

    def takes(self, stamp: BatchStamp | None, bound_bytes: int, max_batch_bytes: int) -> bool:
        """Whether a result may join. A stamped one never does: its batch is its own, as a transaction's is in Kafka."""
        return stamp is None and self.stamp is None and self.size_bound_bytes + bound_bytes <= max_batch_bytes

    def encode(self, compression: Compression = Compression.NONE) -> bytes:
        """A marker is never compressed, as in Kafka."""
        if self.stamp is None:
            return encode_batch_from_parts(
                self._records, base_offset=self.base_offset, timestamp_ms=self.timestamp_ms, compression=compression
            )
        if self.stamp.producer is None:
            return encode_batch(
                [
                    Record(key, value, [(REASON_HEADER, reason.encode())] if reason else [], self.timestamp_ms)
                    for (key, value), reason in zip(self._records, self.stamp.reasons, strict=True)
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
    """As OpenBatch, of results whose records are bytes already."""

    __slots__ = ("_bodies", "base_offset", "count", "size_bytes", "timestamp_ms")

    def __init__(self, base_offset: int, timestamp_ms: int) -> None:
        self.base_offset = base_offset
        self.timestamp_ms = timestamp_ms
        self.count = 0
        self.size_bytes = BATCH_OVERHEAD_BYTES
        self._bodies: list[bytes] = []

    def add(self, body: bytes, count: int) -> None:
        """Takes records of one result, which were encoded to stand behind `self.count` others."""
        self._bodies.append(body)
        self.count += count
        self.size_bytes += len(body)

    def encode(self, compression: Compression = Compression.NONE) -> bytes:
        return encode_batch_around(
            b"".join(self._bodies),
            self.count,
            timestamp_ms=self.timestamp_ms,
            base_offset=self.base_offset,
            compression=compression,
        )


def size_bound_bytes(records: list[SerializedRecord]) -> int:
    """At least as much as these records take in a batch."""
    size = _RECORD_OVERHEAD_BOUND_BYTES * len(records)
    for key, value in records:
        if key is not None:
            size += len(key)
        if value is not None:
            size += len(value)
    return size


def check_size(records: list[SerializedRecord], bound_bytes: int, max_batch_bytes: int) -> None:
    """Refuses a result that does not fit into one batch, as Kafka refuses a batch beyond the topic's
    `max.message.bytes`.
    """
    if bound_bytes + BATCH_OVERHEAD_BYTES <= max_batch_bytes:
        return
    size_bytes = len(encode_batch_from_parts(records, base_offset=0, timestamp_ms=0))
    if size_bytes > max_batch_bytes:
        text = f"{len(records)} records of {size_bytes} bytes exceed the limit of {max_batch_bytes} bytes per batch"
        raise KafkaError(Errors.MESSAGE_TOO_LARGE, text)


class WriteBuffer:
    """The batches that are to be written to a shard's log next, with final offsets.

    `add` and `pack` are given the offset of their first record, and say whether a batch began.
    """

    __slots__ = ("_batches", "_compression", "_max_batch_bytes", "base_offset")

    def __init__(self, max_batch_bytes: int, compression: Compression) -> None:
        self.base_offset = 0
        self._max_batch_bytes = max_batch_bytes
        self._compression = compression
        self._batches: list[OpenBatch | PackedBatch] = []

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, records: list[SerializedRecord], stamp: BatchStamp | None, next_offset: int, now_ms: int) -> bool:
        """Adds a result, to the last batch if that takes it."""
        bound_bytes = size_bound_bytes(records)
        batch = self._batches[-1] if self._batches else None
        if isinstance(batch, OpenBatch) and batch.takes(stamp, bound_bytes, self._max_batch_bytes):
            batch.add(records, bound_bytes)
            return False
        batch = OpenBatch(next_offset, now_ms, stamp)
        batch.add(records, bound_bytes)
        self.add_batch(batch)
        return True

    def pack(self, packed: PackedRecords, next_offset: int) -> bool | None:
        """Adds to the last batch, if that is one of packed results and has room; None where no batch has."""
        batches = self._batches
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
        if not self._batches:
            self.base_offset = batch.base_offset
        self._batches.append(batch)

    def take(self) -> bytes:
        """All batches as they are written; the buffer is empty then."""
        data = b"".join([batch.encode(self._compression) for batch in self._batches])
        self._batches.clear()
        return data

    def clear(self) -> None:
        self._batches.clear()
