# SPDX-License-Identifier: Apache-2.0
"""Maintenance: merges the small files of a lake, and removes history that is older than a moment.

Theory of operation. `ingest` writes a part of the layout (`batch=N`) for each micro-batch, and a sample writes a file.
`Compaction` replaces adjacent parts by one, whose number is the greatest of theirs, and the files of a past day by one
file. Each replacement is one step (`Store.rewrite`), so a killed job loses nothing, and nothing is there twice. Only
parts that `commits` has already are replaced. `ingest` never writes these again, so it may run meanwhile. The lease
`compaction` keeps another compaction from removing files that are hidden for a moment only.

With a moment it also removes what no answer about that moment or later needs:

* of the records and commits before the moment, all but the last one of each key. The log cleaner keeps the same. The
  last one goes too if it is a tombstone, unless it follows a record that stays: the clock of a coordinator may have
  gone back. Tombstones that end a group stay, because incarnations are counted by them;
* markers, and records that do not count, such as those of aborted transactions;
* entries of audit logs before the moment, and samples before its day. The newest day of samples stays, and `topics`.

The tables that are made from group records are then made again by the next job. The lease `tables` keeps other jobs
from making them of the old rows meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.builders import BY_LOG_PARTITION
from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.formats.store import StoredFile
from kcoord.pipeline.lake.jobs import Jobs
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES

FILE_BYTES: Final = 128 << 20
"""A part is merged with others up to this size."""
_MOST_VALUES: Final = 1000
"""Limits the parts that one step replaces, because Iceberg gets a condition with all of them."""

_SAMPLED: Final = ("ends", "brokers", "topics", "descriptions")
_MADE_FROM: Final = {
    "commits": "commits",
    "records": "commits",
    "audit": "audit",
    "changes": "audit",
    "denials": "audit",
}
"""Tables with a part per batch, and the table whose note has the newest batch that is done in both."""
_TIMES: Final = {"commits": "effective_timestamp", "records": "coalesce(marker_timestamp, timestamp)"}


@dataclass(frozen=True, slots=True)
class TableCompaction:
    """What a compaction does to a table: it replaces `merged` of its `files`, with their bytes, and removes rows."""

    cluster: str | None
    table: str
    files: int
    merged: int
    merged_bytes: int
    removed_rows: int


class Compaction:
    """Compacts one cluster of a lake. `before` is the moment of which older history is removed."""

    def __init__(self, lake: Lake, jobs: Jobs, before: datetime | None = None) -> None:
        self._lake = lake
        self._jobs = jobs
        self._before = before

    def alone(self) -> AbstractContextManager[None]:
        """Keeps other processes from compacting the cluster. Raises LeaseError if one does for a minute."""
        return self._lake.lease("compaction").held()

    def run(self, *, dry_run: bool = False) -> Iterator[TableCompaction]:
        """Compacts table by table, or only finds out what there is to do.

        Raises LakeError for a lake without records.
        """
        self._lake.check_records()
        with nullcontext() if dry_run else self.alone():
            if not dry_run:
                # Tombstones may go once this table has them.
                self._jobs.ensure("current_offsets")
            for name in (*_MADE_FROM, *_SAMPLED):
                if not dry_run:
                    self._lake.lease("compaction").check()
                    self._lake.remove_replaced(name)
                yield self._compact(name, dry_run=dry_run)

    def remove_replaced(self) -> None:
        """Removes the replaced files. Readers that began before `run` may still need them."""
        with self.alone():
            for name in (*_MADE_FROM, *_SAMPLED):
                self._lake.remove_replaced(name)

    def _compact(self, name: str, *, dry_run: bool) -> TableCompaction:
        files = self._lake.stored_files(name)
        marked = None
        # Spark would run queries over tables that were never made.
        if self._before is not None and name not in _SAMPLED and files:
            marked = self._marked(name, self._before)
        removed = {} if marked is None else _removed_rows(marked)
        steps = [*self._days(name, files)] if name in _SAMPLED else [*self._batches(name, files, removed)]
        sizes = [sum(file.size_bytes for file in files if file.value in step) for step in steps]
        if not dry_run:
            changes_groups = name == "records" and bool(removed)
            with self._lake.lease("tables").held() if changes_groups else nullcontext():
                if changes_groups:
                    self._invalidate()
                for step, size_bytes in zip(steps, sizes, strict=True):
                    self._lake.rewrite(name, self._rows(name, step, marked if removed else None, size_bytes), [*step])
        merged = sum(file.value in step for step in steps for file in files)
        return TableCompaction(self._lake.cluster, name, len(files), merged, sum(sizes), sum(removed.values()))

    def _invalidate(self) -> None:
        """Lets the next jobs make the tables that are made from group records and commits."""
        for name in BY_LOG_PARTITION:
            self._lake.begin(name)
        note = self._lake.note("commits") or TableNote()
        self._lake.set_note("commits", TableNote(note.version + 1, note.made_from, note.progress))

    def _batches(self, name: str, files: Sequence[StoredFile], removed: Mapping[str, int]) -> Iterator[dict[str, None]]:
        """Yields the batches that become one."""
        note = self._lake.note(_MADE_FROM[name]) or TableNote()
        newest = note.progress.get("batch", -1)
        sizes = Counter[int]()
        for file in files:
            sizes[int(file.value)] += file.size_bytes
        for batches in _runs({batch: sizes[batch] for batch in sorted(sizes) if batch <= newest}):
            step = dict.fromkeys(map(str, batches))
            if len(step) > 1 or step.keys() & removed.keys():
                yield step

    def _days(self, name: str, files: Sequence[StoredFile]) -> Iterator[dict[str, None]]:
        """Yields each day whose samples become one file, or go. The newest day still gets samples."""
        counts = Counter(file.value for file in files)
        for day in sorted(counts)[:-1]:
            if counts[day] > 1 or self._is_too_old(name, day):
                yield {day: None}

    def _is_too_old(self, name: str, day: str) -> bool:
        """True if the samples of the day go. A row of `topics` holds until the next row of the same topic."""
        return name != "topics" and self._before is not None and day < self._before.date().isoformat()

    def _rows(self, name: str, step: Mapping[str, None], marked: DataFrame | None, size_bytes: int) -> DataFrame | None:
        """Returns the rows in place of those of a step, or None if all of them go."""
        if name in _SAMPLED:
            (day,) = step
            return (
                None if self._is_too_old(name, day) else self._lake.read(name).where(F.col("date") == day).coalesce(1)
            )
        batches = [int(batch) for batch in step]
        rows = self._lake.read(name) if marked is None else marked.where("NOT goes")
        rows = rows.where(F.col("batch").between(batches[0], batches[-1])).withColumn("batch", F.lit(batches[-1]))
        return TABLES[name].conform(rows.coalesce(max(1, ceil(size_bytes / FILE_BYTES))))

    def _marked(self, name: str, before: datetime) -> DataFrame:
        """Returns the rows of a table with `goes`, which is true for those that are removed."""
        rows = self._lake.read(name)
        is_old = F.coalesce(F.expr(_TIMES.get(name, "timestamp")) < F.lit(before), F.lit(False))
        if name not in _TIMES:
            return rows.withColumn("goes", is_old)
        last = _last_places(name, rows, is_old).localCheckpoint()
        stays = F.col("is_last").isNotNull()
        if name == "records":
            stays = stays | ((F.col("kind") == "group") & F.col("group_end"))
        rows = rows.join(last, ["log_partition", "log_offset"], "left")
        return rows.withColumn("goes", is_old & ~F.coalesce(stays, F.lit(False)))


def _last_places(name: str, rows: DataFrame, is_old: Column) -> DataFrame:
    """Returns the places of the last old row of each key, with `is_last`. Leaves out tombstones that nothing needs."""
    key: list[Column | str] = [*KEY]
    if name == "records":
        key += ["kind", F.when(F.col("kind") == "group", F.col("key")).alias("group_key")]
    place = F.struct("log_partition", "log_offset", "is_tombstone", "effective_offset")
    order = F.when(is_old, F.struct("effective_offset", "log_offset"))
    last = (
        rows.where("effective_offset IS NOT NULL")
        .groupBy(*key)
        .agg(
            F.max_by(place, order).alias("last"), F.min(F.when(~is_old, F.col("effective_offset"))).alias("first_kept")
        )
    )
    return last.where("NOT last.is_tombstone OR first_kept < last.effective_offset").select(
        "last.log_partition", "last.log_offset", F.lit(True).alias("is_last")
    )


def _removed_rows(rows: DataFrame) -> dict[str, int]:
    """Returns the number of rows that go in each batch that has some."""
    return {str(row["batch"]): row["count"] for row in rows.where("goes").groupBy("batch").count().collect()}


def _runs(sizes: Mapping[int, int]) -> Iterator[list[int]]:
    """Yields runs of adjacent batches that fit one file, or single batches that do not."""
    run: list[int] = []
    run_bytes = 0
    for batch, size_bytes in sizes.items():
        if run and (run_bytes + size_bytes > FILE_BYTES or len(run) == _MOST_VALUES):
            yield run
            run, run_bytes = [], 0
        run.append(batch)
        run_bytes += size_bytes
    if run:
        yield run
