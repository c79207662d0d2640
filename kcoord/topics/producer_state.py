# SPDX-License-Identifier: Apache-2.0
"""The producers of a partition: their last batches (idempotence, KIP-98) and their open transactions.

The state follows the log:

* `check`, `check_marker` and `check_coordinator_epoch` decide about a batch before it is written. They change nothing.
* `replay_data` and `replay_marker` add a batch that is in the log. They check nothing, and nothing else adds state.

A restart replays the same batches and therefore rebuilds the same state. `restore` shortens this by a snapshot.
Another thread may encode a snapshot (`begin_snapshot`). Until `end_snapshot`, the event loop copies each producer to
`changed` before its first change, and the thread then uses the copy.

A producer's transaction is open from its first transactional batch until its marker. The last stable offset is the
first offset of the oldest open transaction.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, NamedTuple

from kcoord_protocol.batch_header import NO_PRODUCER_EPOCH, NO_SEQUENCE, TRANSACTIONAL_BIT, BatchHeader
from kcoord_protocol.errors import Errors, KafkaError

CACHED_BATCHES: Final = 5
"""A duplicate is recognised among this many last batches of a producer: a client may have as many in flight."""

_MAX_SEQUENCE = 2**31 - 1
_SEQUENCE_SPACE = 2**31


class CachedBatch(NamedTuple):
    """A written batch, kept to recognise duplicates."""

    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp_ms: int

    @property
    def base_sequence(self) -> int:
        return (self.last_sequence - self.offset_delta) % _SEQUENCE_SPACE

    @property
    def base_offset(self) -> int:
        return self.last_offset - self.offset_delta


class AbortedTransaction(NamedTuple):
    """An aborted transaction.

    `last_offset` is the offset of its marker, `last_stable_offset` the last stable offset after the marker.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


@dataclass(slots=True)
class ProducerEntry:
    """The state of one producer id in one partition."""

    producer_id: int
    producer_epoch: int = NO_PRODUCER_EPOCH
    coordinator_epoch: int = -1
    last_timestamp_ms: int = -1
    current_transaction_first_offset: int | None = None
    batches: list[CachedBatch] = field(default_factory=list)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        """The offset of the last record, -1 if there is none in this epoch."""
        return self.batches[-1].last_offset if self.batches else -1

    def find_duplicate(self, header: BatchHeader) -> CachedBatch | None:
        """Returns the kept batch of the same epoch with exactly these sequence numbers, None if there is none."""
        last_sequence = header.last_sequence
        for batch in self.batches:
            if batch.last_sequence == last_sequence and batch.base_sequence == header.base_sequence:
                return batch
        return None

    def enter_epoch(self, epoch: int) -> None:
        """Changes the producer epoch and drops the batches of the old one: sequence numbers begin again."""
        if epoch != self.producer_epoch:
            self.producer_epoch = epoch
            self.batches.clear()


def _note_change(changed: dict[int, ProducerEntry], entry: ProducerEntry) -> None:
    if entry.producer_id not in changed:
        changed[entry.producer_id] = replace(entry, batches=entry.batches[-1:])


def _in_sequence(last_sequence: int, next_sequence: int) -> bool:
    return next_sequence == last_sequence + 1 or (next_sequence == 0 and last_sequence == _MAX_SEQUENCE)


def _old_epoch(producer_id: int, epoch: int, last_epoch: int) -> KafkaError:
    return KafkaError(
        Errors.INVALID_PRODUCER_EPOCH,
        f"Epoch {epoch} of producer {producer_id} is older than its current epoch {last_epoch}.",
    )


class ProducerState:
    """The producers of one partition. `end_offset` is the offset up to which batches were replayed."""

    __slots__ = ("aborted", "changed", "end_offset", "entries", "open_transactions")

    def __init__(self, end_offset: int = 0) -> None:
        self.entries: dict[int, ProducerEntry] = {}
        self.aborted: list[AbortedTransaction] = []
        self.end_offset = end_offset
        self.open_transactions: dict[int, int] = {}
        """First offsets by producer id. Offsets only grow, so insertion order is the order of first offsets."""
        self.changed: dict[int, ProducerEntry] | None = None
        """The producers that have changed since `begin_snapshot`, as they were then. None if no snapshot is stored."""

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def first_unstable_offset(self) -> int | None:
        """The first offset of the oldest open transaction, None if no transaction is open."""
        return next(iter(self.open_transactions.values()), None)

    def check(self, header: BatchHeader) -> CachedBatch | None:
        """Validates a client's batch; returns the earlier batch if it is a duplicate, else None.

        A producer without state has epoch -1. It may begin with any sequence number, also if its state was lost
        (observed in Kafka 4.3.1, which no longer uses UNKNOWN_PRODUCER_ID).
        """
        entry = self.entries.get(header.producer_id)
        if entry is None:
            if header.producer_epoch < NO_PRODUCER_EPOCH:
                raise _old_epoch(header.producer_id, header.producer_epoch, NO_PRODUCER_EPOCH)
            return None
        epoch, last_epoch = header.producer_epoch, entry.producer_epoch
        if epoch == last_epoch:
            last_sequence = entry.last_sequence
            # A batch in sequence is no duplicate, since the kept batches follow one another and do not use up all
            # sequence numbers. Those of epoch -1 need not follow one another.
            if last_epoch == -1 or not _in_sequence(last_sequence, header.base_sequence):
                duplicate = entry.find_duplicate(header)
                if duplicate is not None:
                    return duplicate
                if last_epoch != -1:
                    raise KafkaError(
                        Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                        f"Producer {header.producer_id} sent sequence number {header.base_sequence}; the last one "
                        f"written is {last_sequence}.",
                    )
        elif epoch < last_epoch:
            raise _old_epoch(header.producer_id, epoch, last_epoch)
        elif header.base_sequence != 0 and last_epoch != -1:
            raise KafkaError(
                Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"Producer {header.producer_id} began epoch {epoch} with sequence number {header.base_sequence} "
                "instead of 0.",
            )
        if entry.current_transaction_first_offset is not None and not header.is_transactional:
            raise KafkaError(
                Errors.INVALID_TXN_STATE,
                f"Producer {header.producer_id} has an open transaction, but sent a batch that is not transactional.",
            )
        return None

    def is_open(self, producer_id: int, producer_epoch: int) -> bool:
        """Returns whether the producer has an open transaction in this epoch."""
        return producer_id in self.open_transactions and self.entries[producer_id].producer_epoch == producer_epoch

    def check_marker(self, producer_id: int, producer_epoch: int, *, bumps_epoch: bool) -> None:
        """Raises INVALID_PRODUCER_EPOCH for a transaction marker of an older epoch.

        `bumps_epoch`: the producer has a new epoch in every transaction (KIP-890). The epoch of its marker must then be
        above the epoch of the open transaction. A marker of the same epoch is a late one of the previous transaction.
        """
        entry = self.entries.get(producer_id)
        if entry is None:
            if producer_epoch < NO_PRODUCER_EPOCH:
                raise _old_epoch(producer_id, producer_epoch, NO_PRODUCER_EPOCH)
            return
        is_ahead = producer_epoch > entry.producer_epoch
        may_be_equal = not bumps_epoch or entry.current_transaction_first_offset is None
        if not is_ahead and not (may_be_equal and producer_epoch == entry.producer_epoch):
            raise KafkaError(
                Errors.INVALID_PRODUCER_EPOCH,
                f"Epoch {producer_epoch} of the transaction marker is too old: producer {producer_id} has epoch "
                f"{entry.producer_epoch}.",
            )

    def check_coordinator_epoch(self, producer_id: int, coordinator_epoch: int) -> None:
        """Raises TRANSACTION_COORDINATOR_FENCED for a transaction marker of a coordinator that was replaced."""
        entry = self.entries.get(producer_id)
        if entry is not None and entry.coordinator_epoch > coordinator_epoch:
            raise KafkaError(
                Errors.TRANSACTION_COORDINATOR_FENCED,
                f"Coordinator epoch {coordinator_epoch} is older than {entry.coordinator_epoch}, the last coordinator "
                f"epoch of producer {producer_id}.",
            )

    def aborted_between(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """Returns the aborted transactions with records or marker in [first_offset, end_offset)."""
        transactions = []
        for number in range(self._first_from(first_offset), len(self.aborted)):
            transaction = self.aborted[number]
            if transaction.first_offset < end_offset:
                transactions.append(transaction)
            if transaction.last_stable_offset >= end_offset:
                break
        return transactions

    def aborted_from(self, offset: int) -> list[AbortedTransaction]:
        """Returns the aborted transactions whose markers are at or after `offset`."""
        return self.aborted[self._first_from(offset) :]

    def _first_from(self, offset: int) -> int:
        return bisect_left(self.aborted, offset, key=attrgetter("last_offset"))

    # --- changing -----------------------------------------------------------------------------------------------------

    def replay_data(self, header: BatchHeader) -> None:
        """Adds a data batch that is in the log."""
        last_offset, producer_id = header.last_offset, header.producer_id
        self.end_offset = last_offset + 1
        if producer_id < 0:
            return
        entry = self.entries.get(producer_id)
        if entry is None:
            entry = self.entries[producer_id] = ProducerEntry(producer_id)
        if self.changed is not None:
            _note_change(self.changed, entry)
        entry.enter_epoch(header.producer_epoch)
        batches, timestamp_ms = entry.batches, header.max_timestamp
        fields = (header.last_sequence, last_offset, header.last_offset_delta, timestamp_ms)
        # Takes a third of the time of the constructor of the class.
        batches.append(tuple.__new__(CachedBatch, fields))
        if len(batches) > CACHED_BATCHES:
            del batches[0]
        entry.last_timestamp_ms = timestamp_ms
        if header.attributes & TRANSACTIONAL_BIT and entry.current_transaction_first_offset is None:
            entry.current_transaction_first_offset = header.base_offset
            self.open_transactions[producer_id] = header.base_offset

    def replay_marker(self, header: BatchHeader, coordinator_epoch: int, *, committed: bool) -> None:
        """Adds a transaction marker that is in the log."""
        self.end_offset = header.last_offset + 1
        entry = self.entries.setdefault(header.producer_id, ProducerEntry(header.producer_id))
        if self.changed is not None:
            _note_change(self.changed, entry)
        entry.enter_epoch(header.producer_epoch)
        entry.coordinator_epoch = coordinator_epoch
        entry.last_timestamp_ms = header.max_timestamp
        first_offset = entry.current_transaction_first_offset
        entry.current_transaction_first_offset = None
        self.open_transactions.pop(header.producer_id, None)
        if first_offset is None or committed:
            return
        unstable = self.first_unstable_offset
        stable = header.last_offset + 1 if unstable is None else min(unstable, header.last_offset + 1)
        self.aborted.append(AbortedTransaction(header.producer_id, first_offset, header.last_offset, stable))

    def begin_snapshot(self) -> tuple[list[ProducerEntry], dict[int, ProducerEntry]]:
        """Returns the present producers, and a mapping that gets a copy of each before it changes."""
        self.changed = {}
        return list(self.entries.values()), self.changed

    def end_snapshot(self) -> None:
        """Ends the copies for a snapshot."""
        self.changed = None

    def restore(self, entries: list[ProducerEntry], end_offset: int) -> None:
        """Replaces the producers by those of a snapshot that was taken at `end_offset`."""
        self.entries = {entry.producer_id: entry for entry in entries}
        self.end_offset = end_offset
        open_entries = [entry for entry in entries if entry.current_transaction_first_offset is not None]
        open_entries.sort(key=lambda entry: entry.current_transaction_first_offset or 0)
        self.open_transactions = {
            entry.producer_id: entry.current_transaction_first_offset or 0 for entry in open_entries
        }

    def forget_aborted(self, marker_offsets: set[int]) -> None:
        """Drops the aborted transactions with these marker offsets, whose records are gone.

        The cleaner removes their markers.
        """
        self.aborted = [transaction for transaction in self.aborted if transaction.last_offset not in marker_offsets]

    def expire(self, producer_id: int, now_ms: int, expiration_ms: int) -> None:
        """Drops a producer if it has no open transaction and was silent for `expiration_ms`."""
        entry = self.entries.get(producer_id)
        if entry is None or entry.current_transaction_first_offset is not None:
            return
        if now_ms - entry.last_timestamp_ms >= expiration_ms:
            if self.changed is not None:
                _note_change(self.changed, entry)
            del self.entries[producer_id]

    def advance_start(self, start_offset: int) -> None:
        """Drops aborted transactions that ended before the start of the log."""
        self.aborted = self.aborted_from(start_offset)
