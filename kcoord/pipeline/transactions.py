# SPDX-License-Identifier: Apache-2.0
"""Resolves the transactions of a log partition.

Theory of operation. A transaction has the outcomes OPEN, COMMITTED and ABORTED. The next marker of a producer decides
all of its batches before the marker that are still open (`Resolver`). The resolver must see the batches in the order
of the log.

A committed offset of a transaction counts from the commit marker on: its effective offset is the offset of the marker.
All other records, tombstones included, count from their own offset on. The state of a key is its record with the
greatest (effective offset, offset). An offset of a committed transaction is SUPERSEDED if a later record of its key
counts before the marker, or is later in the same transaction (`superseded`). It then never counts.

This is the rule of `kcoord.coordinator.group.offsets.transactional_offsets`, for columns. A property test compares the
tables with the offsets that a coordinator loads from the same log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from kcoord.pipeline.batch_table import Batches
from kcoord.pipeline.buffers import Flags, Ints
from kcoord_protocol.control_records import ControlRecordType

COMMITTED: Final = 1
ABORTED: Final = 2
OPEN: Final = 3
SUPERSEDED: Final = 4
OUTCOMES: Final = (None, "committed", "aborted", "open", "superseded")
NEVER: Final = 2**63 - 1
"""The effective offset of a batch that does not count."""
OWN: Final = -1
"""The effective offset of a batch whose records count from their own offsets on."""

_ENDS: Final = {int(ControlRecordType.COMMIT): COMMITTED, int(ControlRecordType.ABORT): ABORTED}


@dataclass(slots=True)
class Resolution:
    """The transactions of the batches, with one row per batch.

    A row has the outcome of the transaction, the log offset from which its records count, and the time of the marker.

    The effective offset is OWN, NEVER, or the offset of a commit marker. The time is -1 without a commit marker.
    """

    outcome: Ints
    effective_offset: Ints
    marker_timestamp_ms: Ints

    @classmethod
    def without(cls, count: int) -> Resolution:
        """Makes the resolution of batches without transactions."""
        return cls(np.zeros(count, np.int64), np.full(count, OWN), np.full(count, -1))


class Resolver:
    """Resolves the batches of a log partition, which it must get in order.

    A marker changes the resolutions that `add` returned before.
    """

    def __init__(self) -> None:
        self._pending: dict[int, list[tuple[Resolution, int]]] = {}

    def has_open(self) -> bool:
        """True if a batch still waits for its marker."""
        return bool(self._pending)

    def add(self, batches: Batches, control_types: dict[int, int]) -> Resolution:
        """Returns the resolution of the next batches. `control_types` has the type of each control batch, by row."""
        resolution = Resolution.without(len(batches))
        for row in np.flatnonzero(batches.is_transactional).tolist():
            control_type = control_types.get(row)
            if control_type is None:
                resolution.outcome[row], resolution.effective_offset[row] = OPEN, NEVER
                self._pending.setdefault(int(batches.producer_id[row]), []).append((resolution, row))
            elif control_type in _ENDS:
                resolution.outcome[row] = _ENDS[control_type]
                self._end(batches, row, _ENDS[control_type])
        return resolution

    def look_ahead(self, batches: Batches, control_types: dict[int, int]) -> None:
        """Applies the markers of later batches, whose records are not read."""
        for row, control_type in control_types.items():
            if control_type in _ENDS:
                self._end(batches, row, _ENDS[control_type])

    def _end(self, batches: Batches, marker: int, outcome: int) -> None:
        for resolution, row in self._pending.pop(int(batches.producer_id[marker]), ()):
            resolution.outcome[row] = outcome
            if outcome == COMMITTED:
                resolution.effective_offset[row] = batches.base_offset[marker]
                resolution.marker_timestamp_ms[row] = batches.max_timestamp[marker]


class OpenTransactions:
    """Keeps the open transactions by producer id, while reading the batches of a log partition in order."""

    def __init__(self) -> None:
        self.first_offset: dict[int, int] = {}
        self.last_timestamp_ms: dict[int, int] = {}

    def note(self, producer_id: int, base_offset: int, max_timestamp_ms: int, control_type: int | None) -> None:
        """Applies a transactional batch. `control_type` is None if it is not a marker."""
        if control_type is None:
            self.first_offset.setdefault(producer_id, base_offset)
            self.last_timestamp_ms[producer_id] = max_timestamp_ms
        elif control_type in _ENDS:
            self.first_offset.pop(producer_id, None)
            self.last_timestamp_ms.pop(producer_id, None)

    def note_all(self, batches: Batches, control_types: dict[int, int]) -> None:
        """Applies all transactional batches. `control_types` has the type of each control batch, by row."""
        for row in np.flatnonzero(batches.is_transactional).tolist():
            producer_id = int(batches.producer_id[row])
            place = int(batches.base_offset[row]), int(batches.max_timestamp[row])
            self.note(producer_id, *place, control_types.get(row))

    def first_open(self, otherwise: int, abandoned_before_ms: int) -> int:
        """Returns the first offset of the first open transaction, or `otherwise`.

        Ignores a transaction without a batch since `abandoned_before_ms`.
        """
        times = self.last_timestamp_ms
        return min(
            (offset for producer_id, offset in self.first_offset.items() if times[producer_id] >= abandoned_before_ms),
            default=otherwise,
        )


def superseded(keys: Ints, offset: Ints, effective: Ints, outcome: Ints) -> Flags:
    """Flags the superseded records of committed transactions.

    A later record of the same key counted before them, or is later in the same transaction. `keys` are numbers of keys,
    -1 for records to ignore.
    """
    lost = np.zeros(len(keys), np.bool_)
    if not (outcome == COMMITTED).any():
        return lost
    rows = np.flatnonzero((keys >= 0) & (effective != NEVER))
    rows = rows[np.lexsort((offset[rows], keys[rows]))]
    later = _least_behind(keys[rows], effective[rows])
    lost[rows] = (outcome[rows] == COMMITTED) & (later <= effective[rows])
    return lost


def _least_behind(keys: Ints, values: Ints) -> Ints:
    """Returns for each row the least value of the later rows with the same key, or NEVER if there are none.

    `keys` must be sorted. Key and rank of the value are combined into one number. From the end to the start each new
    key has smaller numbers than all keys after it, so one running minimum works for all keys.
    """
    least = np.full(len(keys), NEVER)
    distinct, rank = np.unique(values, return_inverse=True)
    _, key_rank = np.unique(keys, return_inverse=True)
    combined = key_rank * len(distinct) + rank
    running = np.minimum.accumulate(combined[::-1])[::-1]
    same = np.flatnonzero(keys[1:] == keys[:-1])
    least[same] = distinct[running[same + 1] % len(distinct)]
    return least
