# SPDX-License-Identifier: Apache-2.0
"""Collects the records of whole results into record batches.

A result is atomic, and a batch is what recovery keeps or drops as a whole, so a result never spans two batches. Sizes
are checked with a cheap upper bound; only where that bound exceeds the limit is the exact size looked at.
"""

from __future__ import annotations

from typing import Final

from kcoord.coordinator.runtime.serde import SerializedRecord
from protocol.errors import Errors, KafkaError
from protocol.record_batch import BATCH_OVERHEAD_BYTES, encode_batch_from_parts

# Lengths, deltas and flags around a record's key and value take at most this much.
_RECORD_OVERHEAD_BOUND_BYTES: Final = 32


class OpenBatch:
    """A batch that still takes results; its records carry the time of its first one."""

    __slots__ = ("_records", "base_offset", "size_bound_bytes", "timestamp_ms")

    def __init__(self, base_offset: int, timestamp_ms: int) -> None:
        self.base_offset = base_offset
        self.timestamp_ms = timestamp_ms
        self.size_bound_bytes = BATCH_OVERHEAD_BYTES
        self._records: list[SerializedRecord] = []

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self._records)

    def add(self, records: list[SerializedRecord], bound_bytes: int) -> None:
        """Takes one result; `bound_bytes` is its `size_bound_bytes`."""
        self._records += records
        self.size_bound_bytes += bound_bytes

    def encode(self) -> bytes:
        return encode_batch_from_parts(self._records, base_offset=self.base_offset, timestamp_ms=self.timestamp_ms)


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
