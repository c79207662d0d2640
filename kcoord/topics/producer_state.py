# SPDX-License-Identifier: Apache-2.0
"""What a partition knows about its producers: the last batches of each (idempotence, KIP-98) and the transactions
under way.

`check` decides and changes nothing; `replay` takes a batch that is in the log, checks nothing, and is the only way
the state grows. So a restart rebuilds the same state from the log. The last stable offset is the first offset of the
oldest open transaction.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kcoord_protocol.errors import Errors, KafkaError

CACHED_BATCHES: Final = 5
"""How many batches of a producer a duplicate is looked for in: as many as a client may have in flight."""

NO_PRODUCER_ID: Final = -1
NO_SEQUENCE: Final = -1
_MAX_SEQUENCE = 2**31 - 1
_SEQUENCE_SPACE = 2**31


class BatchFacts(NamedTuple):
    """The producer's side of one batch: what `check` and `replay` look at."""

    producer_id: int
    producer_epoch: int
    base_sequence: int
    last_sequence: int
    base_offset: int
    last_offset: int
    timestamp_ms: int
    is_transactional: bool


class CachedBatch(NamedTuple):
    """A batch that was written, as remembered for duplicates."""

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
    """An aborted transaction: `last_offset` is its marker, `last_stable_offset` the stable end once the marker was
    written.
    """

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


@dataclass(slots=True)
class ProducerEntry:
    """One producer id in one partition."""

    producer_id: int
    producer_epoch: int = -1
    coordinator_epoch: int = -1
    last_timestamp_ms: int = -1
    current_transaction_first_offset: int | None = None
    batches: list[CachedBatch] = field(default_factory=list)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    def find_duplicate(self, facts: BatchFacts) -> CachedBatch | None:
        """The remembered batch with exactly these sequence numbers."""
        if facts.producer_epoch != self.producer_epoch:
            return None
        for batch in self.batches:
            if batch.last_sequence == facts.last_sequence and batch.base_sequence == facts.base_sequence:
                return batch
        return None

    def enter_epoch(self, epoch: int) -> None:
        """A new epoch starts its sequence numbers again: what was remembered of the old one cannot be repeated."""
        if epoch != self.producer_epoch:
            self.producer_epoch = epoch
            self.batches.clear()


def _in_sequence(last_sequence: int, next_sequence: int) -> bool:
    return next_sequence == last_sequence + 1 or (next_sequence == 0 and last_sequence == _MAX_SEQUENCE)


class ProducerState:
    """See the module's text. `end_offset` is the offset up to which batches were replayed."""

    __slots__ = ("aborted", "end_offset", "entries", "open_transactions")

    def __init__(self) -> None:
        self.entries: dict[int, ProducerEntry] = {}
        self.aborted: list[AbortedTransaction] = []
        self.end_offset = 0
        self.open_transactions: dict[int, int] = {}
        """First offsets by producer id. Offsets only grow, so insertion order is the order of first offsets."""

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the oldest open transaction began."""
        return next(iter(self.open_transactions.values()), None)

    def check(self, facts: BatchFacts) -> CachedBatch | None:
        """Validates a client's batch; returns the batch it repeats, if it does. No state, or a lost one, accepts any
        sequence number (observed in Kafka 4.3.1: UNKNOWN_PRODUCER_ID is not used any more)."""
        entry = self.entries.get(facts.producer_id)
        if entry is None:
            return None
        duplicate = entry.find_duplicate(facts)
        if duplicate is not None:
            return duplicate
        self._check_epoch(entry, facts)
        self._check_sequence(entry, facts)
        if entry.current_transaction_first_offset is not None and not facts.is_transactional:
            raise KafkaError(
                Errors.INVALID_TXN_STATE,
                f"Producer {facts.producer_id} has an open transaction and sent a batch outside of it.",
            )
        return None

    def _check_epoch(self, entry: ProducerEntry, facts: BatchFacts) -> None:
        if facts.producer_epoch < entry.producer_epoch:
            raise KafkaError(
                Errors.INVALID_PRODUCER_EPOCH,
                f"Epoch {facts.producer_epoch} of producer {facts.producer_id} is older than its epoch "
                f"{entry.producer_epoch} seen before.",
            )

    def _check_sequence(self, entry: ProducerEntry, facts: BatchFacts) -> None:
        if facts.producer_epoch != entry.producer_epoch:
            if facts.base_sequence != 0 and entry.producer_epoch != -1:
                raise KafkaError(
                    Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"Producer {facts.producer_id} began epoch {facts.producer_epoch} with sequence number "
                    f"{facts.base_sequence} instead of 0.",
                )
        elif entry.producer_epoch != -1 and not _in_sequence(entry.last_sequence, facts.base_sequence):
            raise KafkaError(
                Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"Producer {facts.producer_id} sent sequence number {facts.base_sequence}; the last one written "
                f"is {entry.last_sequence}.",
            )

    def is_open(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer has a transaction under way in this epoch."""
        return producer_id in self.open_transactions and self.entries[producer_id].producer_epoch == producer_epoch

    def check_marker(self, producer_id: int, producer_epoch: int, *, bumps_epoch: bool) -> None:
        """Refuses a transaction marker of an older epoch. A producer whose every transaction has a new epoch (KIP-890)
        is told apart from its next transaction by that: its marker must be ahead of an open transaction.
        """
        entry = self.entries.get(producer_id)
        if entry is None:
            return
        is_ahead = producer_epoch > entry.producer_epoch
        may_be_equal = not bumps_epoch or entry.current_transaction_first_offset is None
        if not is_ahead and not (may_be_equal and producer_epoch == entry.producer_epoch):
            raise KafkaError(
                Errors.INVALID_PRODUCER_EPOCH,
                f"The marker has epoch {producer_epoch}, producer {producer_id} is at epoch {entry.producer_epoch}.",
            )

    def check_coordinator_epoch(self, producer_id: int, coordinator_epoch: int) -> None:
        """Refuses a transaction marker of a coordinator that was replaced since."""
        entry = self.entries.get(producer_id)
        if entry is not None and entry.coordinator_epoch > coordinator_epoch:
            raise KafkaError(
                Errors.TRANSACTION_COORDINATOR_FENCED,
                f"Coordinator epoch {coordinator_epoch} is older than {entry.coordinator_epoch}, seen before "
                f"for producer {producer_id}.",
            )

    def aborted_between(self, first_offset: int, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions with records or marker in [first_offset, end_offset)."""
        start = bisect_left(self.aborted, first_offset, key=lambda transaction: transaction.last_offset)
        found = []
        for transaction in self.aborted[start:]:
            if transaction.first_offset < end_offset:
                found.append(transaction)
            if transaction.last_stable_offset >= end_offset:
                break
        return found

    # --- changing -----------------------------------------------------------------------------------------------------

    def replay_data(self, facts: BatchFacts) -> None:
        """A data batch is in the log."""
        self.end_offset = facts.last_offset + 1
        if facts.producer_id == NO_PRODUCER_ID:
            return
        entry = self.entries.setdefault(facts.producer_id, ProducerEntry(facts.producer_id))
        entry.enter_epoch(facts.producer_epoch)
        delta = facts.last_offset - facts.base_offset
        entry.batches.append(CachedBatch(facts.last_sequence, facts.last_offset, delta, facts.timestamp_ms))
        if len(entry.batches) > CACHED_BATCHES:
            del entry.batches[0]
        entry.last_timestamp_ms = facts.timestamp_ms
        if facts.is_transactional and entry.current_transaction_first_offset is None:
            entry.current_transaction_first_offset = facts.base_offset
            self.open_transactions[facts.producer_id] = facts.base_offset

    def replay_marker(self, facts: BatchFacts, coordinator_epoch: int, *, committed: bool) -> AbortedTransaction | None:
        """A transaction marker is in the log; returns the aborted transaction if that is news."""
        self.end_offset = facts.last_offset + 1
        entry = self.entries.setdefault(facts.producer_id, ProducerEntry(facts.producer_id))
        entry.enter_epoch(facts.producer_epoch)
        entry.coordinator_epoch = coordinator_epoch
        entry.last_timestamp_ms = facts.timestamp_ms
        first_offset = entry.current_transaction_first_offset
        entry.current_transaction_first_offset = None
        self.open_transactions.pop(facts.producer_id, None)
        if first_offset is None or committed:
            return None
        unstable = self.first_unstable_offset
        stable = facts.last_offset + 1 if unstable is None else min(unstable, facts.last_offset + 1)
        aborted = AbortedTransaction(facts.producer_id, first_offset, facts.last_offset, stable)
        if self.aborted and aborted.last_offset <= self.aborted[-1].last_offset:
            return None
        self.aborted.append(aborted)
        return aborted

    def restore(self, entries: list[ProducerEntry], end_offset: int) -> None:
        """Starts from a snapshot that was taken at `end_offset`."""
        self.entries = {entry.producer_id: entry for entry in entries}
        self.end_offset = end_offset
        open_entries = [entry for entry in entries if entry.current_transaction_first_offset is not None]
        open_entries.sort(key=lambda entry: entry.current_transaction_first_offset or 0)
        self.open_transactions = {
            entry.producer_id: entry.current_transaction_first_offset or 0 for entry in open_entries
        }

    def forget_aborted(self, marker_offsets: set[int]) -> None:
        """Nothing is left of these aborted transactions; the cleaner removes their markers."""
        self.aborted = [transaction for transaction in self.aborted if transaction.last_offset not in marker_offsets]

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """Forgets producers that were silent for `producer.id.expiration.ms` and have no open transaction."""
        expired = [
            entry.producer_id
            for entry in self.entries.values()
            if entry.current_transaction_first_offset is None and now_ms - entry.last_timestamp_ms >= expiration_ms
        ]
        for producer_id in expired:
            del self.entries[producer_id]
        return len(expired)

    def advance_start(self, start_offset: int) -> None:
        """Forgets aborted transactions that ended before the start of the log."""
        position = bisect_left(self.aborted, start_offset, key=lambda transaction: transaction.last_offset)
        del self.aborted[:position]
