# SPDX-License-Identifier: Apache-2.0
"""A partition of Apache Kafka and a transaction coordinator, as far as idempotent producers see them.

Written from the behaviour of Apache Kafka 3.9.1, 4.3.1 and 4.4.0: epochs fence, the last five batches of a producer are
deduplicated by sequence, a gap is rejected. With acks=all a batch counts when it is below the high watermark. A new
leader does not have the batches above it, or, if it was elected uncleanly, lacks some below it, too.

Compaction removes batches of which later ones replace all records. A tombstone is removed a while after what it
deletes. As in Kafka's cleaner, what follows the first batch of an open transaction stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Final

from kcoord_protocol.batch_header import rewrite_header
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, decode_entries, decode_header, decode_records, encode_batch

EPOCH_END: Final = 32_766
"""An epoch that cannot be raised. The producer gets a new id instead."""


EXPIRATION_MS: Final = 24 * 3_600_000
"""A partition forgets a producer whose last batch is older."""


@dataclass
class SeenProducer:
    """What a partition knows of a producer."""

    epoch: int
    last_ms: int
    last_sequence: int = -1
    batches: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))
    """First sequence, last sequence and base offset."""


class TransactionalIds:
    """Hands out producer ids and epochs to transactional ids."""

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


@lru_cache(maxsize=1 << 14)
def entries_of(batch: bytes) -> list[tuple[int, bytes | None, bytes | None]]:
    """Returns offset, key and value of the records of a batch. Batches are looked at again and again."""
    return decode_entries(batch)


def is_null(value: bytes | None) -> bool:
    """Returns whether a value is that of a tombstone."""
    return value is None


def _with_records(header: BatchHeader, data: bytes, offsets: AbstractSet[int]) -> tuple[BatchHeader, bytes]:
    """Returns a batch without its other records. The header keeps offsets and sequence numbers."""
    kept = [record for record in decode_records(data) if record.offset in offsets]
    batch = encode_batch(
        kept,
        base_offset=header.base_offset,
        last_offset=header.base_offset + header.last_offset_delta,
        partition_leader_epoch=header.partition_leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        is_transactional=header.is_transactional,
    )
    return decode_header(batch), batch


class ModelPartition:
    """One partition. `batches` are the ones of the present leader, in order.

    `written` also has those that compaction has removed. `is_tombstone` tells by its value whether a record deletes.
    """

    def __init__(self, random: Random | None = None, is_tombstone: Callable[[bytes | None], bool] = is_null) -> None:
        self._is_tombstone = is_tombstone
        self.random = random or Random(0)
        self.batches: list[tuple[BatchHeader, bytes]] = []
        self.written: list[tuple[BatchHeader, bytes]] = []
        self.leader_epoch = 0
        self._horizons: dict[int, int] = {}
        """When the tombstones that compaction has seen may be removed, by offset."""
        self.high_watermark = 0
        self.start_offset = 0
        self.producers: dict[int, SeenProducer] = {}
        self.has_too_few_replicas = False
        self.now_ms = 0

    @property
    def end_offset(self) -> int:
        return self.batches[-1][0].next_offset if self.batches else self.start_offset

    @property
    def owner(self) -> tuple[int, int]:
        """The producer id and the epoch of the last batch outside transactions."""
        for header, _ in reversed(self.batches):
            if not header.is_control and not header.is_transactional:
                return header.producer_id, header.producer_epoch
        return -1, -1

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
            state = self.producers[header.producer_id] = SeenProducer(header.producer_epoch, 0)
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
        """Removes replaced records below the high watermark, but none of the active segment: the last batches.

        Records of aborted transactions replace nothing, and are removed, too. Of the last batch of each producer, its
        header stays, which has the sequence number.
        """
        below = [batch for batch in self.batches if batch[0].next_offset <= self.high_watermark]
        closed = below[: -self.random.randint(1, 5)]
        aborted, first_open = self._transactions(closed)
        closed = closed[:first_open]
        newest = {
            key: offset
            for header, data in closed
            if not header.is_control and header.base_offset not in aborted
            for offset, key, _ in entries_of(data)
        }
        lasts = {header.producer_id: header.base_offset for header, _ in self.batches if not header.is_control}
        kept = []
        for header, data in closed:
            if header.is_control:
                kept.append((header, data))
                continue
            is_kept = now_ms < self._horizons.setdefault(header.base_offset, now_ms + tombstones_kept_ms)
            entries = entries_of(data)
            offsets = {
                offset
                for offset, key, value in entries
                if newest.get(key) == offset and (is_kept or not self._is_tombstone(value))
            }
            if entries and len(offsets) == len(entries):
                kept.append((header, data))
            elif offsets or lasts[header.producer_id] == header.base_offset:
                kept.append(_with_records(header, data, offsets))
        self.batches = kept + self.batches[len(closed) :]

    @staticmethod
    def _transactions(batches: list[tuple[BatchHeader, bytes]]) -> tuple[set[int], int]:
        """Returns the offsets of batches of aborted transactions, and the place of the first batch of an open one."""
        opened: dict[int, list[int]] = {}
        aborted: set[int] = set()
        for place, (header, data) in enumerate(batches):
            if header.is_control:
                ended = opened.pop(header.producer_id, [])
                if decode_control_key(entries_of(data)[0][1]) is ControlRecordType.ABORT:
                    aborted.update(batches[begun][0].base_offset for begun in ended)
            elif header.is_transactional:
                opened.setdefault(header.producer_id, []).append(place)
        return aborted, min((begun[0] for begun in opened.values()), default=len(batches))

    def fetch(self, offset: int, max_batches: int = 2) -> bytes:
        """Returns some batches below the high watermark. Raises KafkaError."""
        if not self.start_offset <= offset <= self.end_offset:
            raise KafkaError(Errors.OFFSET_OUT_OF_RANGE)
        below = [batch for header, batch in self.batches if offset < header.next_offset <= self.high_watermark]
        return b"".join(below[:max_batches])
