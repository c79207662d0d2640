# SPDX-License-Identifier: Apache-2.0
"""Batches decoded: the records of a piece of a log as Arrow columns, each made when it is asked for.

The columns are those of the table `records`; docs/pipeline-tables.md says what they mean.
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
    """Per record: its batch (a row of `batches`), offset and time, and where its parts lie in the buffer."""

    batch: Ints
    offset: Ints
    timestamp_ms: Ints
    key_at: Ints
    key_size: Ints
    value_at: Ints
    value_size: Ints
    end: Ints
    number: Ints
    """Its place among the records of its batch."""

    @classmethod
    def of(cls, batches: Batches, split: Split, counts: Ints) -> Records:
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
    """Records with their batches and keys. `rows` narrows it down; `column` makes a column of `records`."""

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
    """Records of committed transactions that were superseded before their marker came."""
    _offsets: tuple[Ints, OffsetValues] | None = None
    _values: dict[int, tuple[object | None, str | None]] | None = None

    def __post_init__(self) -> None:
        self.gather = Gather(self.data)
        self.is_control = self.batches.is_control[self.records.batch]
        self.lost = np.zeros(len(self), np.bool_)

    def __len__(self) -> int:
        return len(self.records.batch)

    def rows(self, chosen: Flags | Ints | slice) -> RecordChunk:
        """These records alone."""
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.all():
            return self
        records, keys = self.records.rows(chosen), self.keys.rows(chosen)
        chunk = RecordChunk(self.log_partition, self.data, self.batches, self.resolution, records, keys, self.kernels)
        chunk.lost = self.lost[chosen]
        return chunk

    @property
    def is_tombstone(self) -> Flags:
        found: Flags = (self.records.value_size < 0) & ~self.is_control
        return found

    @property
    def effective(self) -> Ints:
        """The log offset from which each record counts, superseded or not; NEVER where it does not."""
        waits = self._waits
        if not waits.any():
            return self.records.offset
        return np.where(waits, self.resolution.effective_offset[self.records.batch], self.records.offset)

    @property
    def marker_timestamp_ms(self) -> Ints:
        """When the marker was written from which each record counts; -1 where it waits for none, or never counts."""
        found = self.resolution.marker_timestamp_ms[self.records.batch]
        return np.where(self._waits & self.counts, found, -1)

    @property
    def _waits(self) -> Flags:
        """Which records wait for the marker of their transaction: committed offsets alone do."""
        found: Flags = self.resolution.effective_offset[self.records.batch] != OWN
        return found & self.is_offset & ~self.is_tombstone if found.any() else found

    @property
    def counts(self) -> Flags:
        """Which records the coordinator applies."""
        found: Flags = (self.effective != NEVER) & ~self.lost
        return found

    @property
    def is_offset(self) -> Flags:
        types = self.keys.types
        found: Flags = ((types == OFFSET_TYPES[0]) | (types == OFFSET_TYPES[1])) & ~self.is_control
        return found

    @property
    def offset_values(self) -> tuple[Ints, OffsetValues]:
        """Rows with an offset commit that is no tombstone, and their values."""
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
        """Row -> (entry, error), for the other types that are known."""
        if self._values is None:
            known = np.isin(self.keys.types, list(VALUE_READERS)) & (self.records.value_size >= 0) & ~self.is_control
            self._values = {
                row: read_value(int(self.keys.types[row]), self.value_bytes(row) or b"")
                for row in np.flatnonzero(known).tolist()
            }
        return self._values

    def value_bytes(self, row: int) -> bytes | None:
        size = int(self.records.value_size[row])
        at = int(self.records.value_at[row])
        return None if size < 0 else self.data[at : at + size].tobytes()

    def headers(self) -> dict[int, list[tuple[str, bytes | None]]]:
        """Row -> headers, of the records that have some; headers that cannot be read are left out."""
        records = self.records
        starts = records.value_at + np.maximum(records.value_size, 0)
        found = {}
        for row in np.flatnonzero(records.end > starts + 1).tolist():
            with suppress(CorruptBatchError):
                headers = self.data[starts[row] : records.end[row]].tobytes()
                found[row] = decode_headers(headers, 0, len(headers))
        return found
