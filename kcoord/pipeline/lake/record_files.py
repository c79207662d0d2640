# SPDX-License-Identifier: Apache-2.0
"""bronze.records as Parquet files that the workers write themselves, from the log.

A worker has the records of a range as Arrow columns. Sent through the JVM they would become rows, and columns again in
Parquet, which takes several times as long as all the rest. The JVM hands out the ranges here, and hears what came of
them. The layout is that of Spark: `kind=K/batch=N/` has the files of a micro-batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
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
"""What a worker tells: how many rows of a log partition it wrote, the log offset of the last group record and the
newest time among them."""
_NEARLY_UNIQUE: Final = frozenset(
    {"log_offset", "effective_offset", "timestamp", "marker_timestamp", "commit_timestamp", "committed_offset", "value"}
)
_DICTIONARIES: Final = [each.name for each in RECORDS.columns if each.name not in _NEARLY_UNIQUE]
_DICTIONARY_BYTES: Final = 4 << 20

Write = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def clear(table_uri: str, batch: int) -> None:
    """Takes away what an earlier attempt at a micro-batch left."""
    files, root = file_system(table_uri)
    for kind in KINDS:
        with suppress(FileNotFoundError):
            files.delete_dir(_folder(root, kind, batch))


def writer(options: SourceOptions, table_uri: str, batch: int) -> Write:
    """For `mapInArrow` over the table `ranges` of the source; the rows that it gives are `FACTS`."""

    def write(works: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for each in works:
            for work in each.column("work").to_pylist():
                yield write_ranges(pickle.loads(work), options, table_uri, batch)

    return write


def write_ranges(work: Ranges, options: SourceOptions, table_uri: str, batch: int) -> pa.RecordBatch:
    """The records of the ranges, into one file per kind that there is."""
    files, root = file_system(table_uri)
    writers = {kind: _Writer(files, _folder(root, kind, batch), _name(work.ranges[0])) for kind in KINDS}
    facts: dict[int, _Facts] = {}
    try:
        for each in work.ranges:
            fact = facts.setdefault(each.folder.log_partition, _Facts())
            for rows in read_ranges(Ranges([each]), options, RECORDS.schema(), options.groups):
                group = _write_rows(rows, writers)
                _note_facts(fact, rows, group)
        for one in writers.values():
            one.finish()
    finally:
        for one in writers.values():
            one.discard()
    told = [(number, fact.rows, fact.group_offset, fact.newest_ms) for number, fact in facts.items()]
    types = pa.int32(), pa.int64(), pa.int64(), pa.int64()
    names = [each.split()[0] for each in FACTS.split(", ")]
    columns = [pa.array(column, dtype) for column, dtype in zip(zip(*told, strict=True), types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names)


@dataclass(slots=True)
class _Facts:
    rows: int = 0
    group_offset: int | None = None
    newest_ms: int | None = None


def _write_rows(rows: pa.RecordBatch, writers: dict[str, _Writer]) -> pa.RecordBatch:
    """Gives the group records among them."""
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
    """One file, made with the first rows. It has its name when it is whole, so that nobody sees half of it."""

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
        """After a failure: takes away what is not finished."""
        if self._open is not None:
            with suppress(OSError):
                self._open.close()
            with suppress(FileNotFoundError):
                self.files.delete_file(self._unfinished)

    @property
    def _unfinished(self) -> str:
        """Spark does not see names that begin so."""
        return f"{self.folder}/_{self.name}.{self.attempt}"


def _folder(root: str, kind: str, batch: int) -> str:
    return f"{root}/kind={kind}/batch={batch}"


def _name(first: LogRange) -> str:
    """A range belongs to one task of a micro-batch, so that a second attempt replaces the first."""
    return f"part-{first.folder.log_partition:05d}-{first.start:020d}.parquet"
