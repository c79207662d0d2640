# SPDX-License-Identifier: Apache-2.0
"""bronze.records as Parquet files that the tasks of `ingest` write themselves.

A task has the records of a range as Arrow columns. In the JVM they would become rows, and then columns again in
Parquet; that takes several times as long as everything else. So a task gets the ranges from `ingest`, and returns
`FACTS`. The layout is that of Spark: `kind=K/batch=N/` has the files of a batch.

Theory of operation. `ingest` calls `clear` before a batch, which removes the files of earlier attempts. Each
task writes one file per kind, under a name that Spark ignores (`_NAME.ATTEMPT`), and renames it to NAME at the end.
NAME depends only on the first range of the task, so a repeated task replaces its own file. If a task fails, `discard`
removes its unfinished files. A killed worker leaves them, and Spark ignores them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from kcoord.pipeline.keys import OFFSET_TYPES
from kcoord.pipeline.lake.files import file_system
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import RECORDS

KINDS: Final = ("offset", "group", "control")
FACTS: Final = "log_partition int, rows bigint, group_offset bigint, newest_ms bigint"
"""The columns that a task returns for each log partition: its number, the rows written, the log offset of the last
group record, and the newest timestamp in ms."""
_NEARLY_UNIQUE: Final = frozenset(
    {"log_offset", "effective_offset", "timestamp", "marker_timestamp", "commit_timestamp", "committed_offset", "value"}
)
_DICTIONARIES: Final = [column.name for column in RECORDS.columns if column.name not in _NEARLY_UNIQUE]
_DICTIONARY_BYTES: Final = 4 << 20


def clear(table_uri: str, batch: int) -> None:
    """Removes the files that an earlier attempt at a batch left."""
    files, root = file_system(table_uri)
    for kind in KINDS:
        with suppress(FileNotFoundError):
            files.delete_dir(_folder(root, kind, batch))


def write_ranges(work: Ranges, options: SourceOptions, table_uri: str, batch: int) -> pa.RecordBatch:
    """Writes the records of the ranges, into one file per kind that occurs. Returns the rows of `FACTS`."""
    files, root = file_system(table_uri)
    writers = {kind: _Writer(files, _folder(root, kind, batch), _name(work.ranges[0])) for kind in KINDS}
    facts: dict[int, _Facts] = {}
    try:
        for log_range in work.ranges:
            fact = facts.setdefault(log_range.log.log_partition, _Facts())
            for rows in read_ranges(Ranges([log_range]), options, RECORDS.schema(), options.groups):
                group = _write_rows(rows, writers)
                _note_facts(fact, rows, group)
        for kind_writer in writers.values():
            kind_writer.finish()
    finally:
        for kind_writer in writers.values():
            kind_writer.discard()
    result = [(number, fact.rows, fact.group_offset, fact.newest_ms) for number, fact in facts.items()]
    types = pa.int32(), pa.int64(), pa.int64(), pa.int64()
    names = [column.split()[0] for column in FACTS.split(", ")]
    columns = [pa.array(column, dtype) for column, dtype in zip(zip(*result, strict=True), types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names)


@dataclass(slots=True)
class _Facts:
    rows: int = 0
    group_offset: int | None = None
    newest_ms: int | None = None


def _write_rows(rows: pa.RecordBatch, writers: dict[str, _Writer]) -> pa.RecordBatch:
    """Writes rows to the files of their kinds. Returns the group records among them."""
    control = pc.is_valid(rows.column("control_type"))
    offset = pc.and_not(pc.is_in(rows.column("record_type"), pa.array(OFFSET_TYPES, pa.int32())), control)
    if offset.true_count == len(rows):
        writers["offset"].write(rows)
        return rows.slice(0, 0)
    group = rows.filter(pc.invert(pc.or_(control, offset)))
    for kind, part in (("offset", rows.filter(offset)), ("control", rows.filter(control)), ("group", group)):
        if len(part):
            writers[kind].write(part)
    return group


def _note_facts(fact: _Facts, rows: pa.RecordBatch, group: pa.RecordBatch) -> None:
    fact.rows += len(rows)
    if len(group):
        fact.group_offset = pc.max(group.column("log_offset")).as_py()
    newest = pc.max(rows.column("timestamp")).value
    if newest is not None:
        fact.newest_ms = max(newest // 1000, fact.newest_ms or 0)


@dataclass(slots=True)
class _Writer:
    """Writes one file, which is created with the first rows. It gets its name when it is complete."""

    files: fs.FileSystem
    folder: str
    name: str
    attempt: str = field(default_factory=lambda: uuid4().hex)
    _open: pq.ParquetWriter | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        if self._open is None:
            self.files.create_dir(self.folder)
            self._open = pq.ParquetWriter(
                self._unfinished,
                rows.schema,
                filesystem=self.files,
                compression="zstd",
                use_dictionary=_DICTIONARIES,
                dictionary_pagesize_limit=_DICTIONARY_BYTES,
            )
        self._open.write_batch(rows)

    def finish(self) -> None:
        if self._open is not None:
            self._open.close()
            self.files.move(self._unfinished, f"{self.folder}/{self.name}")
            self._open = None

    def discard(self) -> None:
        """Removes the file if it is not finished, as after a failure."""
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
            with suppress(FileNotFoundError):
                self.files.delete_file(self._unfinished)

    @property
    def _unfinished(self) -> str:
        """The name of the unfinished file. Spark ignores names that begin with an underscore."""
        return f"{self.folder}/_{self.name}.{self.attempt}"


def _folder(root: str, kind: str, batch: int) -> str:
    return f"{root}/kind={kind}/batch={batch}"


def _name(first: LogRange) -> str:
    """Returns the name of a task's file. A range belongs to one task, so a second attempt replaces the first."""
    return f"part-{first.log.log_partition:05d}-{first.start:020d}.parquet"
