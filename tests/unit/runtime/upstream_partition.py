# SPDX-License-Identifier: Apache-2.0
"""A partition of Apache Kafka and a transaction coordinator, as far as idempotent producers see them.

Written from the behaviour of Apache Kafka 3.9.1, 4.3.1 and 4.4.0: epochs fence, the last five batches of a producer are
deduplicated by sequence, a gap is rejected. With acks=all a batch counts when it is below the high watermark. A new
leader does not have the batches above it, or, if it was elected uncleanly, lacks some below it, too.

Compaction removes what later batches replace. In this model, a tombstone has a value that begins with a minus sign. It
is removed a while after what it deletes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from kcoord_protocol.batch_header import rewrite_header
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_entries, decode_header

EPOCH_END = 32_766
"""An epoch that cannot be raised. The producer gets a new id instead."""


EXPIRATION_MS = 24 * 3_600_000
"""A partition forgets a producer whose last batch is older."""


@dataclass
class ProducerState:
    epoch: int
    last_ms: int
    last_sequence: int = -1
    batches: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))
    """First sequence, last sequence and base offset."""


class Coordinator:
    """Hands out producer ids and epochs."""

    def __init__(self) -> None:
        self.next_id = 1000
        self.ids: dict[str, tuple[int, int]] = {}

    def init(self, transactional_id: str) -> tuple[int, int]:
        producer_id, epoch = self.ids.get(transactional_id, (0, EPOCH_END))
        if epoch >= EPOCH_END:
            self.next_id += 1
            producer_id, epoch = self.next_id, -1
        self.ids[transactional_id] = producer_id, epoch + 1
        return self.ids[transactional_id]


class UpstreamPartition:
    """One partition. `batches` are the ones of the present leader, in order, with one record each.

    `written` also has those that compaction has removed.
    """

    def __init__(self, random: Random | None = None) -> None:
        self.random = random or Random(0)
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.written: list[tuple[BatchHeader, bytes]] = []
        self.leader_epoch = 0
        self._horizons: dict[int, int] = {}
        """When the tombstones that compaction has seen may be removed, by offset."""
        self.high_watermark = 0
        self.start_offset = 0
        self.producers: dict[int, ProducerState] = {}
        self.has_too_few_replicas = False
        self.now_ms = 0

    @property
    def end_offset(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else self.start_offset

    def append(self, data: bytes) -> int:
        """Appends a batch and returns its offset, or that of the batch that it repeats. Raises KafkaError."""
        if self.has_too_few_replicas:
            raise KafkaError(Errors.NOT_ENOUGH_REPLICAS)
        header = decode_header(data)
        if header.producer_id >= 0:
            repeated = self._check(header)
            if repeated is not None:
                return repeated
        batch = bytearray(data)
        rewrite_header(batch, base_offset=self.end_offset, partition_leader_epoch=self.leader_epoch)
        header = decode_header(batch)
        self._take(header, bytes(batch))
        self.written.append((header, bytes(batch)))
        return self.batches[-1][0].base_offset

    def _check(self, header: BatchHeader) -> int | None:
        state = self.producers.get(header.producer_id)
        if state is None:
            return None
        if header.producer_epoch < state.epoch:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH)
        if header.is_control:
            return None
        if header.producer_epoch > state.epoch:
            if header.base_sequence != 0:
                raise KafkaError(Errors.OUT_OF_ORDER_SEQUENCE_NUMBER)
            return None
        for first, last, offset in state.batches:
            if (first, last) == (header.base_sequence, header.last_sequence):
                return offset
        if header.base_sequence != (state.last_sequence + 1) & 0x7FFF_FFFF:
            raise KafkaError(Errors.OUT_OF_ORDER_SEQUENCE_NUMBER)
        return None

    def _take(self, header: BatchHeader, batch: bytes) -> None:
        self.batches.append((header, batch))
        if header.producer_id < 0:
            return
        state = self.producers.get(header.producer_id)
        if state is None or state.epoch != header.producer_epoch:
            state = self.producers[header.producer_id] = ProducerState(header.producer_epoch, 0)
        state.last_ms = self.now_ms
        if header.is_control:
            return
        state.last_sequence = header.last_sequence
        state.batches.append((header.base_sequence, header.last_sequence, header.base_offset))

    def pass_time(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.producers = {
            producer_id: state
            for producer_id, state in self.producers.items()
            if now_ms - state.last_ms <= EXPIRATION_MS
        }

    def replicate(self) -> None:
        self.high_watermark = self.end_offset

    def change_leader(self) -> None:
        """Elects a replica that has the batches below the high watermark only."""
        self.truncate(self.high_watermark)

    def truncate(self, offset: int) -> None:
        """Elects a replica that ends at `offset`."""
        self.leader_epoch += 1
        self._horizons = {at: horizon_ms for at, horizon_ms in self._horizons.items() if at < offset}
        kept = [batch for batch in self.batches if batch[0].next_offset <= offset]
        self.batches = []
        self.producers = {}
        for header, batch in kept:
            self._take(header, batch)
        self.written = [batch for batch in self.written if batch[0].next_offset <= offset]
        self.high_watermark = min(self.high_watermark, self.end_offset)

    def compact(self, now_ms: int, tombstones_kept_ms: int) -> None:
        """Removes replaced batches below the high watermark, but none of the active segment: the last batches."""
        below = [batch for batch in self.batches if batch[0].next_offset <= self.high_watermark]
        closed = below[: -self.random.randint(1, 5)]
        last = {decode_entries(data)[0][1]: header.base_offset for header, data in closed}
        kept = []
        for header, data in closed:
            _, key, value = decode_entries(data)[0]
            if last[key] == header.base_offset:
                is_tombstone = value is not None and value.startswith(b"-")
                horizon_ms = self._horizons.setdefault(header.base_offset, now_ms + tombstones_kept_ms)
                if not is_tombstone or now_ms < horizon_ms:
                    kept.append((header, data))
        self.batches = kept + self.batches[len(closed) :]

    def fetch(self, offset: int, max_batches: int = 2) -> bytes:
        """Returns some batches below the high watermark. Raises KafkaError."""
        if not self.start_offset <= offset <= self.end_offset:
            raise KafkaError(Errors.OFFSET_OUT_OF_RANGE)
        below = [batch for header, batch in self.batches if offset < header.next_offset <= self.high_watermark]
        return b"".join(below[:max_batches])
