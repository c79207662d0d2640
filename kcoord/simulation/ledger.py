# SPDX-License-Identifier: Apache-2.0
"""What producers were promised about records, and whether readers find it so: a plain book of offsets and values.

Every attempt to append has a value of its own. A record that was acknowledged stays at its offset. Only a power loss
may take records away, always from some offset to the end: those that nobody was promised, and all of them in a topic
that is not flushed with every append (L-1). A value stands in the log as often as it was sent, and where its producer
is idempotent once, and in the order of its sequence (L-2). Readers of committed records see all records of a
transaction that was committed, and none of another (L-3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kcoord.simulation.trace import ViolationError

FLUSHED_TOPIC: Final = "records-flushed"
"""Every append is on the disk before it is acknowledged (`flush.messages=1`)."""
CACHED_TOPIC: Final = "records-cached"
"""Appends wait in the page cache, as they do by default."""
RECORD_TOPICS: Final = (FLUSHED_TOPIC, CACHED_TOPIC)
RECORD_PARTITIONS: Final = 2

_NEVER_LOST: Final = "L-1 no acknowledged record is lost"
_ONCE: Final = "L-2 a record is there once, and in order"
_WHOLE: Final = "L-3 a transaction counts as a whole"


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(slots=True, eq=False)
class Transaction:
    """What its producer has asked for, and been told. One that it never asked to commit is never committed."""

    may_be_committed: bool = False
    is_committed: bool = False


@dataclass(slots=True)
class Attempt:
    """A value that was sent to a partition. `sequence` counts the values of an idempotent producer there."""

    place: Place
    copies: int
    producer: str = ""
    sequence: int = -1
    transaction: Transaction | None = None


@dataclass(slots=True)
class LedgerEntry:
    """What is known to stand at an offset."""

    value: bytes
    power_losses: int
    """How many there had been when somebody asked who was told of it."""
    number: int
    """Counts the entries as they were made."""
    acknowledged_ms: int = -1


class Glance(NamedTuple):
    """What was known when a request was sent: its answer tells of the log then, or later."""

    power_losses: int
    entries: int


@dataclass(slots=True)
class _Partition:
    entries: dict[int, LedgerEntry] = field(default_factory=dict)
    offsets: dict[bytes, list[int]] = field(default_factory=dict)
    by_sequence: dict[tuple[str, int], int] = field(default_factory=dict)


class Ledger:
    """See the module's text. `power_losses` counts them."""

    def __init__(self, power_losses: Callable[[], int], now_ms: Callable[[], int]) -> None:
        self._power_losses = power_losses
        self._now_ms = now_ms
        self._attempts: dict[bytes, Attempt] = {}
        self._entries = 0
        self._partitions = {
            Place(topic, number): _Partition() for topic in RECORD_TOPICS for number in range(RECORD_PARTITIONS)
        }

    def end_offset(self, place: Place) -> int:
        """Where the partition ends at least, unless the power is lost."""
        return max(self._partitions[place].entries, default=-1) + 1

    def glance(self) -> Glance:
        return Glance(self._power_losses(), self._entries)

    # What producers do.

    def attempt(self, value: bytes, attempt: Attempt) -> None:
        self._attempts[value] = attempt

    def acknowledge(self, place: Place, offset: int, value: bytes, power_losses: int) -> None:
        """`power_losses` are those before the request was sent."""
        entry = self._note(place, offset, value, power_losses)
        if entry.acknowledged_ms < 0:
            entry.acknowledged_ms = self._now_ms()

    # What readers see.

    def ends_at(self, place: Place, end_offset: int, asked: Glance) -> None:
        """A reader is told where a partition ends."""
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
        """A reader has gone over all offsets from the first to the next one, and found these values."""
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
        """When the record was acknowledged, -1 if it was not."""
        return self._partitions[place].entries[offset].acknowledged_ms

    # The book.

    def _note(self, place: Place, offset: int, value: bytes, power_losses: int) -> LedgerEntry:
        partition = self._partitions[place]
        attempt = self._attempts.get(value)
        if attempt is None or attempt.place != place:
            raise ViolationError(_ONCE, f"{place}: {value!r} at {offset} was never sent there")
        entry = partition.entries.get(offset)
        if entry is not None and entry.value != value:
            if entry.power_losses > power_losses:
                # The answer is older than the power loss after which something else came there.
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
        """L-2: what stood elsewhere until now must have been lost."""
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
        for offset in sorted(offset for offset in self._partitions[place].entries if offset >= first_offset):
            self._lose(place, offset, power_losses, evidence, broken)

    def _lose(self, place: Place, offset: int, power_losses: int, evidence: str, broken: str = _NEVER_LOST) -> None:
        """What was known of the offset must have been lost with the power, if that may be. `power_losses` are those
        that the evidence is as old as, at most.
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
