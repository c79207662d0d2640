# SPDX-License-Identifier: Apache-2.0
"""The ledger: which records producers were promised, and whether readers see them.

Theory of operation
-------------------
The ledger maps offsets to values per partition. Every attempt to append has a value of its own, so a value identifies
its attempt. Producers report attempts and acknowledgements, readers report values and log ends. The first report of an
offset fills the entry; every later one has to agree with it.

* L-1: an acknowledged record stays at its offset. Only a power loss may take records, and always from some offset to
  the end. It may take unacknowledged records; in a topic that is not flushed at each append also acknowledged ones.
* L-2: the log has a value at most as often as it was sent; once if its producer is idempotent, and in the order of the
  producer's sequence.
* L-3: a read_committed reader gets all records of a committed transaction, and none of any other transaction.

Concurrency. Requests overlap with each other and with power losses. A response reflects the log when its request was
sent or later. Each report therefore carries the numbers of power losses and of entries from when its request was sent
(`Glance`): it cannot contradict an entry that is newer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kcoord.simulation.trace import ViolationError

FLUSHED_TOPIC: Final = "records-flushed"
"""A topic whose appends are on disk before they are acknowledged (`flush.messages=1`)."""
CACHED_TOPIC: Final = "records-cached"
"""A topic whose appends wait in the page cache, as is the default."""
RECORD_TOPICS: Final = (FLUSHED_TOPIC, CACHED_TOPIC)
RECORD_PARTITIONS: Final = 2

_NEVER_LOST: Final = "L-1 no acknowledged record is lost"
_ONCE: Final = "L-2 a record appears once and in order"
_WHOLE: Final = "L-3 a transaction is atomic"


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction in the view of its producer.

    `may_be_committed`: the producer has sent a commit. `is_committed`: the commit was acknowledged.
    """

    may_be_committed: bool = False
    is_committed: bool = False


@dataclass(slots=True)
class Attempt:
    """A value that was sent to a partition.

    `copies` is how often it may appear. `sequence` counts the values of an idempotent producer in that partition.
    """

    place: Place
    copies: int
    producer: str = ""
    sequence: int = -1
    transaction: Transaction | None = None


@dataclass(slots=True)
class LedgerEntry:
    """The value at an offset, according to a response."""

    value: bytes
    power_losses: int
    """Number of power losses when the latest request was sent whose response had this value."""
    number: int
    """Position of the entry in the order in which entries were made."""
    acknowledged_ms: int = -1
    """Virtual time of the acknowledgement; -1 if there was none."""


class Glance(NamedTuple):
    """The state of the ledger when a request was sent. The response reflects the log at that time or later."""

    power_losses: int
    entries: int


@dataclass(slots=True)
class _Partition:
    entries: dict[int, LedgerEntry] = field(default_factory=dict)
    offsets: dict[bytes, list[int]] = field(default_factory=dict)
    by_sequence: dict[tuple[str, int], int] = field(default_factory=dict)


class Ledger:
    """Takes reports of producers and readers, and raises ViolationError if they contradict each other.

    `power_losses` returns the number of power losses so far.
    """

    def __init__(self, power_losses: Callable[[], int], now_ms: Callable[[], int]) -> None:
        self._power_losses = power_losses
        self._now_ms = now_ms
        self._attempts: dict[bytes, Attempt] = {}
        self._entries = 0
        self._partitions = {
            Place(topic, number): _Partition() for topic in RECORD_TOPICS for number in range(RECORD_PARTITIONS)
        }

    def end_offset(self, place: Place) -> int:
        """Returns a lower bound of the partition's log end offset, unless the power is lost."""
        return max(self._partitions[place].entries, default=-1) + 1

    def glance(self) -> Glance:
        return Glance(self._power_losses(), self._entries)

    # Reports of producers.

    def attempt(self, value: bytes, attempt: Attempt) -> None:
        self._attempts[value] = attempt

    def acknowledge(self, place: Place, offset: int, value: bytes, power_losses: int) -> None:
        """Takes an acknowledgement. `power_losses` is their number when the request was sent."""
        entry = self._note(place, offset, value, power_losses)
        if entry.acknowledged_ms < 0:
            entry.acknowledged_ms = self._now_ms()

    # Reports of readers.

    def ends_at(self, place: Place, end_offset: int, asked: Glance) -> None:
        """Takes a log end offset that a reader got: every entry from there on must have been lost."""
        entries = self._partitions[place].entries
        lost = (offset for offset, entry in entries.items() if offset >= end_offset and entry.number < asked.entries)
        for offset in sorted(lost):
            self._lose(place, offset, asked.power_losses, f"the log ends at {end_offset}")

    def read(
        self,
        place: Place,
        first_offset: int,
        next_offset: int,
        values: Mapping[int, bytes],
        asked: Glance,
        *,
        committed: bool,
    ) -> None:
        """Takes the values that a reader got between `first_offset` and `next_offset` (exclusive)."""
        for offset, value in values.items():
            self._note(place, offset, value, asked.power_losses)
            transaction = self._attempts[value].transaction
            if committed and transaction is not None and not transaction.may_be_committed:
                raise ViolationError(_WHOLE, f"{place}: {value!r} at {offset} was not committed")
        entries = self._partitions[place].entries
        for offset in range(first_offset, next_offset):
            entry = entries.get(offset)
            if entry is None or offset in values:
                continue
            transaction = self._attempts[entry.value].transaction
            if not committed or transaction is None or transaction.is_committed:
                self._lose(place, offset, asked.power_losses, "a reader passed over it")

    def acknowledged_ms(self, place: Place, offset: int) -> int:
        """Returns the virtual time at which the record was acknowledged, or -1 if it was not."""
        return self._partitions[place].entries[offset].acknowledged_ms

    # Entries.

    def _note(self, place: Place, offset: int, value: bytes, power_losses: int) -> LedgerEntry:
        partition = self._partitions[place]
        attempt = self._attempts.get(value)
        if attempt is None or attempt.place != place:
            raise ViolationError(_ONCE, f"{place}: {value!r} at {offset} was never sent there")
        entry = partition.entries.get(offset)
        if entry is not None and entry.value != value:
            if entry.power_losses > power_losses:
                # The response is older than the power loss after which another record got this offset.
                return LedgerEntry(value, power_losses, self._entries)
            self._cut(place, offset, power_losses, f"{value!r} is at {offset}")
            entry = None
        if entry is None:
            self._check_place(place, partition, offset, attempt, value, power_losses)
            entry = partition.entries[offset] = LedgerEntry(value, power_losses, self._entries)
            self._entries += 1
            partition.offsets.setdefault(value, []).append(offset)
        entry.power_losses = max(entry.power_losses, power_losses)
        return entry

    def _check_place(
        self, place: Place, partition: _Partition, offset: int, attempt: Attempt, value: bytes, power_losses: int
    ) -> None:
        """L-2: earlier places of the value, and neighbours out of order, must have been lost."""
        offsets = partition.offsets.get(value, [])
        if len(offsets) >= attempt.copies:
            self._cut(place, min(offsets), power_losses, f"{value!r} is at {offset}, too", _ONCE)
        if attempt.sequence < 0:
            return
        for step in (-1, 1):
            neighbour = partition.by_sequence.get((attempt.producer, attempt.sequence + step))
            if neighbour is not None and (neighbour < offset) != (step < 0):
                self._cut(place, min(neighbour, offset), power_losses, f"{value!r} is at {offset}", _ONCE)
        partition.by_sequence[attempt.producer, attempt.sequence] = offset

    def _cut(
        self, place: Place, first_offset: int, power_losses: int, evidence: str, broken: str = _NEVER_LOST
    ) -> None:
        """Removes the entries from `first_offset` on, except those beyond it that are as new as the evidence."""
        entries = self._partitions[place].entries
        for offset in sorted(offset for offset in entries if offset >= first_offset):
            if offset == first_offset or entries[offset].power_losses < power_losses:
                self._lose(place, offset, power_losses, evidence, broken)

    def _lose(self, place: Place, offset: int, power_losses: int, evidence: str, broken: str = _NEVER_LOST) -> None:
        """Removes an entry that `evidence` contradicts. Raises ViolationError if no power loss explains it.

        `power_losses` is the number of power losses when the request of the evidence was sent. A newer entry stays.
        """
        partition = self._partitions[place]
        entry = partition.entries.get(offset)
        if entry is None or entry.power_losses > power_losses:
            return
        is_promised = place.topic == FLUSHED_TOPIC and entry.acknowledged_ms >= 0
        if is_promised or entry.power_losses == self._power_losses():
            raise ViolationError(broken, f"{place}: {entry} was at {offset}, and {evidence}")
        del partition.entries[offset]
        attempt = self._attempts[entry.value]
        partition.offsets[entry.value].remove(offset)
        partition.by_sequence.pop((attempt.producer, attempt.sequence), None)
