# SPDX-License-Identifier: Apache-2.0
"""The leader epoch cache of a partition: at which offset each leader epoch began. Consumers use it to notice
truncated logs (KIP-101, KIP-320).

Entries have growing epochs and growing start offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

UNDEFINED_EPOCH: Final = -1
UNDEFINED_OFFSET: Final = -1


class EpochEntry(NamedTuple):
    """Leader epoch `epoch` wrote the offsets from `start_offset` on."""

    epoch: int
    start_offset: int


class LeaderEpochs:
    """See the module's text."""

    __slots__ = ("entries",)

    def __init__(self, entries: list[EpochEntry] | None = None) -> None:
        self.entries: list[EpochEntry] = entries if entries is not None else []

    def to_text(self) -> str:
        """The content of Kafka's `leader-epoch-checkpoint`."""
        return "".join(
            f"{line}\n" for line in ("0", len(self.entries), *(f"{epoch} {offset}" for epoch, offset in self.entries))
        )

    @property
    def latest_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else UNDEFINED_EPOCH

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Notes that `epoch` begins at `start_offset`; True where that changed something. Entries it contradicts go
        away.
        """
        if epoch <= self.latest_epoch:
            return False
        while self.entries and self.entries[-1].start_offset >= start_offset:
            self.entries.pop()
        self.entries.append(EpochEntry(epoch, start_offset))
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The largest epoch not above `epoch`, and the offset where it ends; undefined where the cache cannot tell."""
        if epoch == UNDEFINED_EPOCH:
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        if self.entries and epoch == self.entries[-1].epoch:
            return epoch, log_end_offset
        position = bisect_right(self.entries, epoch, key=lambda entry: entry.epoch)
        if position == len(self.entries):
            return UNDEFINED_EPOCH, UNDEFINED_OFFSET
        end_offset = self.entries[position].start_offset
        if position == 0:
            return epoch, end_offset
        return self.entries[position - 1].epoch, end_offset

    def epoch_for_offset(self, offset: int) -> int:
        """The leader epoch that wrote `offset`; -1 where the cache does not reach back so far."""
        position = bisect_right(self.entries, offset, key=lambda entry: entry.start_offset)
        return self.entries[position - 1].epoch if position else UNDEFINED_EPOCH

    def advance_start(self, start_offset: int) -> bool:
        """Forgets epochs that ended before the new start of the log; the epoch in force there now begins there."""
        position = bisect_right(self.entries, start_offset, key=lambda entry: entry.start_offset)
        if position == 0 or (position == 1 and self.entries[0].start_offset == start_offset):
            return False
        self.entries[:position] = [EpochEntry(self.entries[position - 1].epoch, start_offset)]
        return True

    def truncate_end(self, end_offset: int) -> bool:
        """Forgets epochs that began at or after the end of the log, but for an epoch of an empty log."""
        kept = [entry for entry in self.entries if entry.start_offset < end_offset]
        if len(kept) == len(self.entries):
            return False
        self.entries = kept
        return True
