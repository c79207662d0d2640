# SPDX-License-Identifier: Apache-2.0
"""The table `current_offsets`: the newest commit of each key of a log partition, without deleted offsets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kcoord.pipeline.buffers import Ints
from kcoord.pipeline.kernels import kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import log_ranges
from kcoord.pipeline.range_reader import LogRange, read_range
from kcoord.pipeline.tables import ROWS_PER_BATCH, applied_commits, record_batch

_LEAST_HELD: Final = 1 << 18


class _Latest:
    """Keeps the newest row of each key.

    Superseded rows are dropped when the number of rows has doubled since the last time, and is above _LEAST_HELD.
    """

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._order: list[npt.NDArray[np.int64]] = []
        self._rows = 0
        self._limit = _LEAST_HELD

    def add(self, order: Ints, batch: pa.RecordBatch) -> None:
        """Adds rows of `current_offsets`. The columns of `order` are: key, effective offset, offset, is tombstone."""
        self._batches.append(batch)
        self._order.append(order)
        self._rows += len(order)
        if self._rows > self._limit:
            self._merge()
            self._limit = max(_LEAST_HELD, 2 * self._rows)

    def _merge(self) -> None:
        order = np.concatenate(self._order)
        kept = newest(order)
        table = pa.Table.from_batches(self._batches).take(pa.array(kept)).combine_chunks()
        self._batches, self._order, self._rows = table.to_batches(), [order[kept]], len(kept)

    def result(self) -> Iterator[pa.RecordBatch]:
        if self._batches:
            self._merge()
            alive = pa.array(self._order[0][:, 3] == 0)
            yield from pa.Table.from_batches(self._batches).filter(alive).to_batches(ROWS_PER_BATCH)


def newest(order: Ints) -> Ints:
    """Returns the row with the greatest (effective offset, offset) of each key, in the order of the log."""
    rows = np.lexsort((order[:, 2], order[:, 1], order[:, 0]))
    keys = order[rows, 0]
    return np.sort(rows[np.flatnonzero(np.diff(keys, append=-1) != 0)])


def current_offsets(
    whole: LogRange, options: SourceOptions, names: list[str], groups: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of one log partition of any size.

    Reads range after range and keeps in memory only the newest row of each key. None as `groups` means all groups.
    """
    loops = kernels(options.decoder)
    keys = KeyTable(loops.key_index())
    latest = _Latest()
    for log_range, _ in log_ranges(whole.log, options.split_bytes, whole.start, whole.end):
        for part in read_range(log_range, keys, options.checksums, loops):
            chunk = part.chunk
            if groups is not None:
                chunk = chunk.rows(chunk.keys.flags(lambda key: key.group in groups))
            chunk = applied_commits(chunk)
            order = np.stack([chunk.keys.places, chunk.effective, chunk.records.offset, chunk.is_tombstone], axis=1)
            kept = newest(order)
            if len(kept):
                latest.add(order[kept], record_batch(chunk.rows(kept), names))
    yield from latest.result()
