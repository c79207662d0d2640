# SPDX-License-Identifier: Apache-2.0
"""The batches that are to be written to a shard's log next, with final offsets."""

from __future__ import annotations

from kcoord.runtime.batch import BatchStamp, OpenBatch, PackedBatch, size_bound_bytes
from kcoord.runtime.result import PackedRecords
from kcoord.runtime.serde import SerializedRecord
from kcoord_protocol.compression import Compression


class WriteBuffer:
    """See the module's text. `add` and `pack` are given the offset of their first record, and say whether a batch
    began.
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
