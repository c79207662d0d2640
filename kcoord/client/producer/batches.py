# SPDX-License-Identifier: Apache-2.0
"""Records that wait to be sent, in batches per partition. Pure: the caller supplies the time.

`done` is the caller's object for a record, for example its future.

Each partition has a queue of batches. At most one batch of it is in flight. This keeps the order. It is also necessary
for the sequence numbers: those of the next batch depend on whether the previous batch was stored.

A batch is closed, and ready at once, if it is full, if another batch follows it, or during a flush. Otherwise it is
ready `linger_ms` after its first record. A batch that failed goes back to the head of its queue with a time for the
retry, and takes no more records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from kcoord.client.types import TopicPartition
from kcoord_protocol.record_batch import BATCH_OVERHEAD_BYTES, Compression, Record, encode_batch

D = TypeVar("D")

# The largest sizes. For each record: length, attributes, timestamp and offset deltas, and the lengths of key, value and
# headers. For each header: the lengths of its name and value.
_RECORD_OVERHEAD_BYTES: Final = 21
_HEADER_OVERHEAD_BYTES: Final = 10
_MAX_SEQUENCE: Final = 0x7FFF_FFFF


def record_size(record: Record) -> int:
    """Returns an upper bound of the bytes that a record adds to a batch, before compression."""
    size = _RECORD_OVERHEAD_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += _HEADER_OVERHEAD_BYTES + len(name.encode("utf-8", "surrogateescape")) + len(value or b"")
    return size


@dataclass(slots=True, eq=False)
class ProducerBatch(Generic[D]):
    """A batch of records of one partition.

    Once the batch was sent, its producer id and sequence stay, so that the broker recognizes a retry.
    """

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
    number: int = 0
    """The batches of a producer are numbered in the order of their first records. The halves of a batch share it."""

    def add(self, record: Record, done: D, size: int) -> None:
        """Adds a record of `size` bytes."""
        self.records.append(record)
        self.done.append(done)
        self.size_bytes += size

    def encode(self, compression: Compression, is_transactional: bool) -> bytes:
        """Returns the batch in the format of the log."""
        return encode_batch(
            self.records,
            compression=compression,
            producer_id=self.producer_id,
            producer_epoch=self.producer_epoch,
            base_sequence=self.base_sequence,
            is_transactional=is_transactional,
        )

    def split(self) -> list[ProducerBatch[D]]:
        """Returns two halves of a batch that was too large for the broker."""
        middle = len(self.records) // 2
        halves = []
        for part in (slice(None, middle), slice(middle, None)):
            half: ProducerBatch[D] = ProducerBatch(self.partition, self.created_ms, number=self.number)
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
        self.last_number = 0
        """The number of the newest batch."""

    def append(self, partition: TopicPartition, record: Record, done: D, now_ms: float) -> bool:
        """Adds a record to the partition's last batch, or to a new one. Returns whether this closed a batch."""
        size = record_size(record)
        queue = self._queues.setdefault(partition, _Queue())
        self.buffered_bytes += size
        last = queue.batches[-1] if queue.batches else None
        closes = last is not None and (last.attempts > 0 or last.size_bytes + size > self._batch_size)
        if last is None or closes:
            self.last_number += 1
            last = ProducerBatch(partition, now_ms, number=self.last_number)
            queue.batches.append(last)
        last.add(record, done, size)
        return closes or last.size_bytes >= self._batch_size

    def ready(self, now_ms: float) -> list[TopicPartition]:
        """Returns the partitions with a batch to send: closed, or older than `linger_ms`, and none in flight."""
        return [
            partition
            for partition, queue in self._queues.items()
            if queue.batches and queue.sending is None and self._due_ms(queue) <= now_ms
        ]

    def next_due_ms(self) -> float | None:
        """Returns the time at which the next batch is ready, None if no batch waits for a time."""
        due = [self._due_ms(queue) for queue in self._queues.values() if queue.batches and queue.sending is None]
        return min(due, default=None)

    def _due_ms(self, queue: _Queue[D]) -> float:
        first = queue.batches[0]
        if first.attempts:
            return first.retry_at_ms
        if self.flushing or len(queue.batches) > 1 or first.size_bytes >= self._batch_size:
            return first.created_ms
        return first.created_ms + self._linger_ms

    def waiting(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        """Returns those of the partitions that have a batch in the queue. An abort may have dropped it."""
        return [partition for partition in partitions if self._queues[partition].batches]

    def take(self, partition: TopicPartition) -> ProducerBatch[D]:
        """Takes the partition's next batch, which is then in flight."""
        queue = self._queues[partition]
        assert queue.sending is None
        queue.sending = queue.batches.popleft()
        return queue.sending

    def finished(self, batch: ProducerBatch[D]) -> None:
        """Removes a batch in flight that has a final outcome, success or failure."""
        self._queues[batch.partition].sending = None
        self.buffered_bytes -= batch.size_bytes - BATCH_OVERHEAD_BYTES

    def put_back(self, batch: ProducerBatch[D], retry_at_ms: float) -> None:
        """Puts a batch in flight back to the head of its queue, to be sent again at `retry_at_ms`."""
        queue = self._queues[batch.partition]
        queue.sending = None
        batch.attempts += 1
        batch.retry_at_ms = retry_at_ms
        queue.batches.appendleft(batch)

    def split(self, batch: ProducerBatch[D]) -> None:
        """Replaces a batch in flight by its halves, at the head of its queue."""
        queue = self._queues[batch.partition]
        queue.sending = None
        queue.batches.extendleft(reversed(batch.split()))

    def expired(self, before_ms: float) -> list[ProducerBatch[D]]:
        """Removes and returns batches that were created before that time, oldest first.

        Skips partitions with a batch in flight.
        """
        expired = []
        for queue in self._queues.values():
            while queue.batches and queue.sending is None and queue.batches[0].created_ms <= before_ms:
                expired.append(queue.batches.popleft())
        self._drop(expired)
        return expired

    def drain_unsent(self) -> list[ProducerBatch[D]]:
        """Removes and returns all batches that were never sent, so that no broker can have stored them."""
        unsent = []
        for queue in self._queues.values():
            unsent += [batch for batch in queue.batches if batch.base_sequence < 0]
            queue.batches = deque(batch for batch in queue.batches if batch.base_sequence >= 0)
        self._drop(unsent)
        return unsent

    def _drop(self, batches: list[ProducerBatch[D]]) -> None:
        self.buffered_bytes -= sum(batch.size_bytes - BATCH_OVERHEAD_BYTES for batch in batches)

    def pending(self, last_number: int | None = None) -> list[ProducerBatch[D]]:
        """Returns all batches without a final outcome, or those up to a number."""
        pending = []
        for queue in self._queues.values():
            pending += [queue.sending] if queue.sending is not None else []
            pending += queue.batches
        return pending if last_number is None else [batch for batch in pending if batch.number <= last_number]

    def drain(self) -> list[ProducerBatch[D]]:
        """Removes and returns all batches without a final outcome."""
        pending = self.pending()
        self._queues.clear()
        self.buffered_bytes = 0
        return pending


@dataclass(slots=True)
class Sequences:
    """The producer id and epoch, and the next sequence number of each partition (KIP-98)."""

    producer_id: int = -1
    producer_epoch: int = -1
    _next: dict[TopicPartition, int] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether there is a producer id."""
        return self.producer_id >= 0

    def reset(self, producer_id: int = -1, producer_epoch: int = -1) -> None:
        """Sets a new producer id and epoch, or none. All partitions begin at sequence 0."""
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self._next.clear()

    def assign(self, batch: ProducerBatch[D]) -> None:
        """Gives a batch its producer id and sequence, unless it has them already."""
        if batch.base_sequence < 0:
            batch.producer_id, batch.producer_epoch = self.producer_id, self.producer_epoch
            batch.base_sequence = self._next.get(batch.partition, 0)

    def stored(self, batch: ProducerBatch[D]) -> None:
        """Advances the sequence of the partition, because the broker has stored the batch."""
        if (batch.producer_id, batch.producer_epoch) == (self.producer_id, self.producer_epoch):
            self._next[batch.partition] = (batch.base_sequence + len(batch.records)) & _MAX_SEQUENCE
