# SPDX-License-Identifier: Apache-2.0
"""The leader epoch cache of a partition."""

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
    """The offset at which each leader epoch began. Consumers use it to detect truncated logs (KIP-101, KIP-320).

    The epochs of `entries` grow strictly, and so do the start offsets.
    """

    __slots__ = ("entries",)

    def __init__(self, entries: list[EpochEntry] | None = None) -> None:
        self.entries: list[EpochEntry] = entries if entries is not None else []

    def to_text(self) -> str:
        """Returns the content of Kafka's `leader-epoch-checkpoint`."""
        return "".join(
            f"{line}\n" for line in ("0", len(self.entries), *(f"{epoch} {offset}" for epoch, offset in self.entries))
        )

    @property
    def latest_epoch(self) -> int:
        return self.entries[-1].epoch if self.entries else UNDEFINED_EPOCH

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Adds `epoch`, which begins at `start_offset`; returns whether the cache changed.

        An epoch that is not above the latest one is ignored. Entries at or after `start_offset` are dropped.
        """
        if epoch <= self.latest_epoch:
            return False
        while self.entries and self.entries[-1].start_offset >= start_offset:
            self.entries.pop()
        assert epoch > self.latest_epoch, f"P-6: leader epoch {epoch} follows epoch {self.latest_epoch}"
        self.entries.append(EpochEntry(epoch, start_offset))
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Returns the largest epoch not above `epoch` and the offset where it ends.

        Both are -1 if `epoch` is -1 or above the latest epoch.
        """
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
        """Returns the leader epoch that wrote `offset`, -1 if the offset is before the first entry."""
        position = bisect_right(self.entries, offset, key=lambda entry: entry.start_offset)
        return self.entries[position - 1].epoch if position else UNDEFINED_EPOCH

    def advance_start(self, start_offset: int) -> bool:
        """Drops epochs that ended at or before the new start of the log; returns whether the cache changed.

        The epoch that wrote `start_offset` now begins there.
        """
        position = bisect_right(self.entries, start_offset, key=lambda entry: entry.start_offset)
        if position == 0 or (position == 1 and self.entries[0].start_offset == start_offset):
            return False
        self.entries[:position] = [EpochEntry(self.entries[position - 1].epoch, start_offset)]
        return True

    def truncate_end(self, end_offset: int) -> bool:
        """Drops epochs that began at or after the end of the log; returns whether the cache changed."""
        kept = [entry for entry in self.entries if entry.start_offset < end_offset]
        if len(kept) == len(self.entries):
            return False
        self.entries = kept
        return True
