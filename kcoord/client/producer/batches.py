# SPDX-License-Identifier: Apache-2.0
"""Records that wait to be sent, in batches per partition. Pure: the caller brings the time, and the `done` of a record
is whatever the caller wants to know it by.

One batch per partition is under way at a time. That alone keeps order, and the sequence numbers of the next batch are
known only when the fate of the one before is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kcoord.client.types import TopicPartition
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Compression, Record, encode_batch

D = TypeVar("D")

# Per record: length, attributes, timestamp and offset deltas, lengths of key, value and headers, at their largest.
# Per header: the lengths of its name and its value.
_RECORD_OVERHEAD_BYTES: Final = 21
_HEADER_OVERHEAD_BYTES: Final = 10
_MAX_SEQUENCE: Final = 0x7FFF_FFFF


def record_size(record: Record) -> int:
    """An upper bound of what a record adds to a batch, before compression."""
    size = _RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += _HEADER_OVERHEAD_BYTES + len(name.encode("utf-8", "surrogateescape")) + len(value or b"")
    return size


@dataclass(slots=True, eq=False)
class ProducerBatch(Generic[D]):
    """Records of one partition. Once it has been sent, producer and sequence stay: a repetition must look the same."""

    partition: TopicPartition
    created_ms: float
    records: list[Record] = field(default_factory=list)
    done: list[D] = field(default_factory=list)
    size_bytes: int = BATCH_OVERHEAD_BYTES
    attempts: int = 0
    retry_at_ms: float = 0
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1

    def add(self, record: Record, done: D, size: int) -> None:
        self.records.append(record)
        self.done.append(done)
        self.size_bytes += size

    def encode(self, compression: Compression, is_transactional: bool) -> bytes:
        return encode_batch(
            self.records,
            compression=compression,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=self.base_sequence,
            is_transactional=is_transactional,
        )

    def split(self) -> list[ProducerBatch[D]]:
        """Two halves of a batch that the broker found too large."""
        middle = len(self.records) // 2
        halves = []
        for part in (slice(None, middle), slice(middle, None)):
            half: ProducerBatch[D] = ProducerBatch(self.partition, self.created_ms)
            for record, done in zip(self.records[part], self.done[part], strict=True):
                half.add(record, done, record_size(record))
            halves.append(half)
        return halves


@dataclass(slots=True)
class _Queue(Generic[D]):
    batches: deque[ProducerBatch[D]] = field(default_factory=deque)
    sending: ProducerBatch[D] | None = None


class Accumulator(Generic[D]):
    """All batches of a producer."""

    def __init__(self, batch_size: int, linger_ms: float) -> None:
        self._batch_size = batch_size
        self._linger_ms = linger_ms
        self._queues: dict[TopicPartition, _Queue[D]] = {}
        self.buffered_bytes = 0
        self.flushing = 0

    def append(self, partition: TopicPartition, record: Record, done: D, now_ms: float) -> bool:
        """Puts a record into the partition's last batch, or a new one. True: a batch was closed by this."""
        size = record_size(record)
        queue = self._queues.setdefault(partition, _Queue())
        self.buffered_bytes += size
        last = queue.batches[-1] if queue.batches else None
        closes = last is not None and (last.attempts > 0 or last.size_bytes + size > self._batch_size)
        if last is None or closes:
            last = ProducerBatch(partition, now_ms)
            queue.batches.append(last)
        last.add(record, done, size)
        return closes or last.size_bytes >= self._batch_size

    def ready(self, now_ms: float) -> list[TopicPartition]:
        """Partitions with a batch that may go: full, old enough, followed by another one, or to be flushed."""
        return [
            partition
            for partition, queue in self._queues.items()
            if queue.batches and queue.sending is None and self._due_ms(queue) <= now_ms
        ]

    def next_due_ms(self) -> float | None:
        """When `ready` may have more, None if nothing but an append changes that."""
        due = [self._due_ms(queue) for queue in self._queues.values() if queue.batches and queue.sending is None]
        return min(due, default=None)

    def _due_ms(self, queue: _Queue[D]) -> float:
        first = queue.batches[0]
        if first.attempts:
            return first.retry_at_ms
        if self.flushing or len(queue.batches) > 1 or first.size_bytes >= self._batch_size:
            return first.created_ms
        return first.created_ms + self._linger_ms

    def take(self, partition: TopicPartition) -> ProducerBatch[D]:
        """The partition's next batch, which is then the one under way."""
        queue = self._queues[partition]
        assert queue.sending is None
        queue.sending = queue.batches.popleft()
        return queue.sending

    def finished(self, batch: ProducerBatch[D]) -> None:
        """The batch is answered for, well or badly."""
        self._queues[batch.partition].sending = None
        self.buffered_bytes -= batch.size_bytes - BATCH_OVERHEAD_BYTES

    def put_back(self, batch: ProducerBatch[D], retry_at_ms: float) -> None:
        """The batch is to be sent again, before all others of its partition."""
        queue = self._queues[batch.partition]
        queue.sending = None
        batch.attempts += 1
        batch.retry_at_ms = retry_at_ms
        queue.batches.appendleft(batch)

    def split(self, batch: ProducerBatch[D]) -> None:
        """Halves of the batch take its place."""
        queue = self._queues[batch.partition]
        queue.sending = None
        queue.batches.extendleft(reversed(batch.split()))

    def expired(self, before_ms: float) -> list[ProducerBatch[D]]:
        """Takes out batches made before that time, oldest first; the one under way is not among them."""
        found = []
        for queue in self._queues.values():
            while queue.batches and queue.sending is None and queue.batches[0].created_ms <= before_ms:
                found.append(queue.batches.popleft())
        self._drop(found)
        return found

    def drain(self) -> list[ProducerBatch[D]]:
        """Takes out everything that is not under way."""
        found = [batch for queue in self._queues.values() for batch in queue.batches]
        for queue in self._queues.values():
            queue.batches.clear()
        self._drop(found)
        return found

    def _drop(self, batches: list[ProducerBatch[D]]) -> None:
        self.buffered_bytes -= sum(batch.size_bytes - BATCH_OVERHEAD_BYTES for batch in batches)

    def pending(self) -> list[ProducerBatch[D]]:
        """Everything that is not answered for."""
        found = []
        for queue in self._queues.values():
            found += [queue.sending] if queue.sending is not None else []
            found += queue.batches
        return found


@dataclass(slots=True)
class Sequences:
    """The next sequence number per partition, under the producer id and epoch they belong to (KIP-98)."""

    producer_id: int = -1
    producer_epoch: int = -1
    _next: dict[TopicPartition, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        return self.producer_id >= 0

    def reset(self, producer_id: int = -1, producer_epoch: int = -1) -> None:
        """A new producer id or epoch begins at 0 everywhere."""
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self._next.clear()

    def assign(self, batch: ProducerBatch[D]) -> None:
        """Numbers a batch that has no number yet."""
        if batch.base_sequence < 0:
            batch.producer_id, batch.producer_epoch = self.producer_id, self.producer_epoch
            batch.base_sequence = self._next.get(batch.partition, 0)

    def stored(self, batch: ProducerBatch[D]) -> None:
        """The broker has the batch: the next one follows it."""
        if (batch.producer_id, batch.producer_epoch) == (self.producer_id, self.producer_epoch):
            self._next[batch.partition] = (batch.base_sequence + len(batch.records)) & _MAX_SEQUENCE
