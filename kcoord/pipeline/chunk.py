# SPDX-License-Identifier: Apache-2.0
"""Decoded batches: the records of a block of a log, as positions in a buffer.

`record_columns` makes the columns of the table `records` from a chunk. The values of its records are decoded on first
use and kept, so columns and tables share them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from kcoord.pipeline.batch_table import Batches
from kcoord.pipeline.buffers import Bytes, Flags, Gather, Ints
from kcoord.pipeline.group_values import VALUE_READERS, read_value
from kcoord.pipeline.kernels import NUMPY, Kernels
from kcoord.pipeline.keys import OFFSET_TYPES, KeyColumns
from kcoord.pipeline.offset_values import OffsetValues
from kcoord.pipeline.record_split import Split
from kcoord.pipeline.transactions import NEVER, OWN, Resolution
from kcoord_protocol.batch_header import LOG_APPEND_TIME_BIT
from kcoord_protocol.errors import CorruptBatchError
from kcoord_protocol.record_walk import decode_headers


@dataclass(slots=True)
class Records:
    """One row per record: its batch (a row of `batches`), its offset and time, and the positions of its parts."""

    batch: Ints
    offset: Ints
    timestamp_ms: Ints
    key_at: Ints
    key_size: Ints
    value_at: Ints
    value_size: Ints
    end: Ints
    number: Ints
    """Index of the record in its batch."""

    @classmethod
    def of(cls, batches: Batches, split: Split, counts: Ints) -> Records:
        """Adds batch, offset and time to the rows of `split`, which has `counts` records of each batch."""
        batch = np.repeat(np.arange(len(batches)), counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        times = batches.base_timestamp[batch] + split.timestamp_delta
        appended = (batches.attributes & LOG_APPEND_TIME_BIT) != 0
        if appended.any():
            times = np.where(appended[batch], batches.max_timestamp[batch], times)
        return cls(
            batch,
            batches.base_offset[batch] + split.offset_delta,
            times,
            split.key_at,
            split.key_size,
            split.value_at,
            split.value_size,
            split.end,
            np.arange(len(batch)) - first,
        )

    def rows(self, chosen: Flags | Ints | slice) -> Records:
        return Records(*(getattr(self, name)[chosen] for name in self.__slots__))


@dataclass(slots=True)
class RecordChunk:
    """Records with their batches and keys. `rows` selects some of them."""

    log_partition: int
    data: Bytes
    batches: Batches
    resolution: Resolution
    records: Records
    keys: KeyColumns
    kernels: Kernels = NUMPY
    gather: Gather = field(init=False)
    is_control: Flags = field(init=False)
    lost: Flags = field(init=False)
    """Records of committed transactions that were superseded before their marker came. `range_reader` sets it."""
    _offsets: tuple[Ints, OffsetValues] | None = None
    _values: dict[int, tuple[object | None, str | None]] | None = None

    def __post_init__(self) -> None:
        self.gather = Gather(self.data)
        self.is_control = self.batches.is_control[self.records.batch]
        self.lost = np.zeros(len(self), np.bool_)

    def __len__(self) -> int:
        return len(self.records.batch)

    def rows(self, chosen: Flags | Ints | slice) -> RecordChunk:
        """Returns a chunk of these records only."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.all():
            return self
        records, keys = self.records.rows(chosen), self.keys.rows(chosen)
        chunk = RecordChunk(self.log_partition, self.data, self.batches, self.resolution, records, keys, self.kernels)
        chunk.lost = self.lost[chosen]
        return chunk

    @property
    def is_tombstone(self) -> Flags:
        flags: Flags = (self.records.value_size < 0) & ~self.is_control
        return flags

    @property
    def effective(self) -> Ints:
        """The log offset from which each record counts; NEVER if its transaction is open or aborted.

        Ignores whether the record was superseded.
        """
        waits = self._waits
        if not waits.any():
            return self.records.offset
        return np.where(waits, self.resolution.effective_offset[self.records.batch], self.records.offset)

    @property
    def marker_timestamp_ms(self) -> Ints:
        """The time of the marker from which each record counts; -1 if it needs no marker or never counts."""
        timestamps = self.resolution.marker_timestamp_ms[self.records.batch]
        return np.where(self._waits & self.counts, timestamps, -1)

    @property
    def _waits(self) -> Flags:
        """Which records count from the marker of their transaction on. Only committed offsets do, not tombstones."""
        flags: Flags = self.resolution.effective_offset[self.records.batch] != OWN
        return flags & self.is_offset & ~self.is_tombstone if flags.any() else flags

    @property
    def counts(self) -> Flags:
        """Which records the coordinator applies."""
        flags: Flags = (self.effective != NEVER) & ~self.lost
        return flags

    @property
    def is_offset(self) -> Flags:
        types = self.keys.types
        flags: Flags = ((types == OFFSET_TYPES[0]) | (types == OFFSET_TYPES[1])) & ~self.is_control
        return flags

    @property
    def offset_values(self) -> tuple[Ints, OffsetValues]:
        """The rows with an offset commit that is not a tombstone, and their values."""
        if self._offsets is None:
            rows = np.flatnonzero(self.is_offset & (self.records.value_size >= 0))
            records = self.records
            self._offsets = (
                rows,
                self.kernels.read_offset_values(self.gather, records.value_at[rows], records.value_size[rows]),
            )
        return self._offsets

    @property
    def group_values(self) -> dict[int, tuple[object | None, str | None]]:
        """Row -> (entry, error), for the group record types in VALUE_READERS."""
        if self._values is None:
            has_reader = np.isin(self.keys.types, list(VALUE_READERS))
            flags = has_reader & (self.records.value_size >= 0) & ~self.is_control
            self._values = {
                row: read_value(int(self.keys.types[row]), self.value_bytes(row) or b"")
                for row in np.flatnonzero(flags).tolist()
            }
        return self._values

    def value_bytes(self, row: int) -> bytes | None:
        size = int(self.records.value_size[row])
        at = int(self.records.value_at[row])
        return None if size < 0 else self.data[at : at + size].tobytes()

    def headers(self) -> dict[int, list[tuple[str, bytes | None]]]:
        """Returns row -> headers, for records with headers. Headers that cannot be read are omitted."""
        records = self.records
        starts = records.value_at + np.maximum(records.value_size, 0)
        headers_by_row = {}
        for row in np.flatnonzero(records.end > starts + 1).tolist():
            with suppress(CorruptBatchError):
                data = self.data[starts[row] : records.end[row]].tobytes()
                headers_by_row[row] = decode_headers(data, 0, len(data))
        return headers_by_row
