# SPDX-License-Identifier: Apache-2.0
"""Writes logs for the tests of the pipeline, and reads its tables without Spark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from kcoord.pipeline.log_files import Folder
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import list_logs, log_ranges
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import TABLES
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log import Log
from kcoord.storage.segment import LogConfig
from tests.storage.cleaning import clean
from tests.support.offsets_sample import Row

NOW_MS = 1_795_000_000_000
TOPIC = "__consumer_offsets"


def table_rows(
    paths: str | Collection[str], table: str = "records", names: Sequence[str] | None = None, **options: str
) -> list[Row]:
    """Returns all rows of a table, in the order of log partitions and offsets. The options are those of the source."""
    path = paths if isinstance(paths, str) else ",".join(paths)
    return source_rows({"path": path, "table": table, **options}, names)


def source_rows(options: Mapping[str, str], names: Sequence[str] | None = None) -> list[Row]:
    """Returns all rows that the source has for the options, in the order of log partitions and offsets."""
    parsed = SourceOptions.parse(options)
    schema = parsed.table.schema()
    if names is not None:
        schema = pa.schema([schema.field(name) for name in names])
    rows: list[Row] = []
    for log in list_logs(parsed):
        ranges = [LogRange(log)]
        if parsed.table.name != "current_offsets":
            ranges = [log_range for log_range, _ in log_ranges(log, parsed.split_bytes)]
        for log_range in ranges:
            for batch in read_ranges(Ranges([log_range]), parsed, schema, parsed.groups):
                rows += batch.to_pylist()
    return rows


def range_rows(data: str, start: int, end: int, table: str = "records", log_partition: int = 0) -> list[Row]:
    """Returns the rows that a task of a stream reads in a range of log offsets."""
    parsed = SourceOptions.parse({"path": data, "table": table})
    folder = Folder(log_partition, f"{data}/{TOPIC}-{log_partition}")
    ranges = Ranges([LogRange(folder, start, end)])
    return [row for batch in read_ranges(ranges, parsed, TABLES[table].schema(), None) for row in batch.to_pylist()]


class LogWriter:
    """Writes batches to a log partition as the broker does. `at` makes a gap in the offsets."""

    def __init__(self, data: Path, log_partition: int = 0, **settings: int) -> None:
        self.folder = data / f"{TOPIC}-{log_partition}"
        self.config = LogConfig(**{"segment_bytes": 1 << 20, "index_interval_bytes": 256, **settings})
        self._log = Log.open(RealFileSystem(), str(self.folder), self.config, NOW_MS)

    @property
    def end_offset(self) -> int:
        return self._log.end_offset

    def append(self, batch: bytes, at: int | None = None) -> int:
        """Appends a batch and returns its base offset, which is `at` or the end offset."""
        offset = self.end_offset if at is None else at
        self._log.append(offset.to_bytes(8, "big") + batch[8:], now_ms=NOW_MS)
        return offset

    def clean(self, stable_offset: int) -> None:
        """Runs two passes of the cleaner over all but the last segment. The second pass removes tombstones."""
        self._log.roll(NOW_MS)
        for now_ms in (NOW_MS, NOW_MS + 10**9):
            clean(self._log, RealFileSystem(), stable_offset=stable_offset, now_ms=now_ms)

    def close(self) -> None:
        self._log.flush()
        self._log.close()
