# SPDX-License-Identifier: Apache-2.0
"""Resolves the transactions in a log partition, by whole batches: a producer's batches are decided by its next marker.

Which records of committed transactions lose against a later record of the same key, a commit or a tombstone, is found
by `superseded`. Both together are the rule of
`kcoord.coordinator.group.offsets.transactional_offsets` for columns; a property test holds the tables to what a
coordinator loads.
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
"""The effective offset of what does not count."""
OWN: Final = -1
"""The effective offset of what counts from its own place on."""

_ENDS: Final = {int(ControlRecordType.COMMIT): COMMITTED, int(ControlRecordType.ABORT): ABORTED}


@dataclass(slots=True)
class Resolution:
    """A row per batch: what became of it, the log offset from which its records count (OWN, NEVER, or that of a
    marker), and when that marker was written, -1 without one.
    """

    outcome: Ints
    effective_offset: Ints
    marker_timestamp_ms: Ints

    @classmethod
    def without(cls, count: int) -> Resolution:
        """No transactions."""
        return cls(np.zeros(count, np.int64), np.full(count, OWN), np.full(count, -1))


class Resolver:
    """Give it the batches of a log partition in order; it fills in the resolutions that it gave before as markers
    come.
    """

    def __init__(self) -> None:
        self._pending: dict[int, list[tuple[Resolution, int]]] = {}

    def has_open(self) -> bool:
        """Whether something still waits for a marker."""
        return bool(self._pending)

    def add(self, batches: Batches, control_types: dict[int, int]) -> Resolution:
        """`control_types` has the type of each control batch, by row."""
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
        """Batches behind those that are wanted: their markers alone matter."""
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
    """Which producers have a transaction open, going forward through the batches of a log partition."""

    def __init__(self) -> None:
        self.first_offset: dict[int, int] = {}
        self.last_timestamp_ms: dict[int, int] = {}

    def note(self, producer_id: int, base_offset: int, max_timestamp_ms: int, control_type: int | None) -> None:
        """A transactional batch; `control_type` is None where it is no marker."""
        if control_type is None:
            self.first_offset.setdefault(producer_id, base_offset)
            self.last_timestamp_ms[producer_id] = max_timestamp_ms
        elif control_type in _ENDS:
            self.first_offset.pop(producer_id, None)
            self.last_timestamp_ms.pop(producer_id, None)

    def note_all(self, batches: Batches, control_types: dict[int, int]) -> None:
        """`control_types` has the type of each control batch, by row."""
        for row in np.flatnonzero(batches.is_transactional).tolist():
            producer_id = int(batches.producer_id[row])
            place = int(batches.base_offset[row]), int(batches.max_timestamp[row])
            self.note(producer_id, *place, control_types.get(row))

    def first_open(self, otherwise: int, abandoned_before_ms: int) -> int:
        """Where the first open transaction begins. One without a record since `abandoned_before_ms` does not count."""
        times = self.last_timestamp_ms
        return min(
            (at for each, at in self.first_offset.items() if times[each] >= abandoned_before_ms), default=otherwise
        )


def superseded(keys: Ints, offset: Ints, effective: Ints, outcome: Ints) -> Flags:
    """Which records of committed transactions lost: a later record of the same key counted before them, or came later
    in the same transaction. A tombstone counts from its own place on. `keys` are numbers of keys, -1 for records that
    are not to be looked at.
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
    """For each row the least value among the later rows with the same key, NEVER where there are none.

    `keys` are sorted. Backwards a smaller key makes a smaller number than all before it, so one running minimum serves
    all keys.
    """
    least = np.full(len(keys), NEVER)
    distinct, rank = np.unique(values, return_inverse=True)
    _, key_rank = np.unique(keys, return_inverse=True)
    combined = key_rank * len(distinct) + rank
    running = np.minimum.accumulate(combined[::-1])[::-1]
    same = np.flatnonzero(keys[1:] == keys[:-1])
    least[same] = distinct[running[same + 1] % len(distinct)]
    return least
