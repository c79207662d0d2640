# SPDX-License-Identifier: Apache-2.0
"""Runs in the workers: reads ranges of logs and yields Arrow record batches of a table."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from functools import cache

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from kcoord.pipeline.current import current_offsets
from kcoord.pipeline.kernels import kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogRange, read_range
from kcoord.pipeline.tables import table_batches


class Ranges(InputPartition):
    """The ranges that one task reads."""

    def __init__(self, ranges: list[LogRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


def read_ranges(
    partition: Ranges, options: SourceOptions, schema: pa.Schema, groups: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yields the columns of the table that are in `schema`. Spark expects exactly that schema."""
    for batch in _batches(partition, options, schema.names, groups):
        yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _batches(
    partition: Ranges, options: SourceOptions, names: list[str], groups: Collection[str] | None
) -> Iterator[pa.RecordBatch]:
    loops = kernels(options.decoder)
    _freeze_garbage_collection()
    keys = KeyTable(loops.key_index())
    for log_range in partition.ranges:
        if options.table.name == "current_offsets":
            yield from current_offsets(log_range, options, names, groups)
            continue
        if keys.is_full:
            keys = KeyTable(loops.key_index())
        for part in read_range(log_range, keys, options.checksums, loops):
            yield from table_batches(options.table.name, names, part, groups)


@cache
def _freeze_garbage_collection() -> None:
    """Excludes the loaded modules from garbage collection, once per worker.

    Spark runs the collector after each task. Scanning these modules took a tenth of a worker's time.
    """
    gc.freeze()
