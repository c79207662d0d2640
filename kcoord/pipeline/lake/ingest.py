# SPDX-License-Identifier: Apache-2.0
"""bronze.records: a copy of the log that stays when the log is cleaned.

Theory of operation. `Ingest` reads the log batch by batch. A batch has its own part of the table's layout (`batch=N`).
These steps happen in order for each batch:

1. The plan of the batch replaces the previous one (`ingest.json` beside the notes). It has the number of the batch,
   the offsets of the stream at its start and end, and the ranges of each task.
2. The tasks write the part `batch=N`.
3. The note of the table gets the number of the batch and its rows. From now on the batch is done.

After a crash between 1 and 3 the next run does the planned batch again: the same ranges, into files of the same names.
A task of the crashed run that is still running writes the same rows into the same files. So each record is in the
table exactly once, and the plan alone says where the log has been read up to.

Only one process at a time may do these steps, which the lease `ingest` ensures. A run that begins while another one
copies would plan the same batch. Each step begins with the stored plan, so runs may take turns.

A small batch is read in this process, while Spark may still be starting. Larger ones are read by the workers of Spark.
Lakes of older releases have a checkpoint of Spark instead of a plan. Its newest offsets become the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from kcoord.pipeline.errors import DataLossError
from kcoord.pipeline.lake import record_files
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord.pipeline.log_reader import END_OF_LOG
from kcoord.pipeline.log_stream import TOPIC_ID, LogStream, StreamOffset
from kcoord.pipeline.options import OptionError, SourceOptions
from kcoord.pipeline.planning import cluster_id_of, pack
from kcoord.pipeline.range_reader import LogRange
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import RECORDS

GROUP_OFFSET: Final = "group_offset."
"""Prefix of the keys of a note's `progress` that have the offset of the newest group record of a log partition."""
MAX_TIMESTAMP_MS: Final = "max_timestamp_ms"
PLAN: Final = "ingest.json"
_BATCH_BYTES: Final = 512 << 20
"""Limits how much of the log a run reads again after a crash."""
SMALL_BYTES: Final = 32 << 20
"""A batch of at most this size is read in the driver: starting workers would take longer."""

_ENDING_SECONDS: Final = 5.0
"""How long a copy waits for another one, which may just be ending."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch. `tasks` has the ranges of each task: log partition, start and end.

    They are None for a batch that a checkpoint of Spark has left.
    """

    batch: int
    start: StreamOffset
    end: StreamOffset
    size_bytes: int
    tasks: list[list[list[int]]] | None

    def to_json(self) -> str:
        return json.dumps({name: getattr(self, name) for name in self.__slots__})


@dataclass(frozen=True, slots=True)
class Ingested:
    """A batch that is done: its number, its rows and bytes of log, the rows of the table, and what is left to read.

    `left_bytes` has the bytes of each log partition that follow the batch. Sizes of logs in a cluster are estimates.
    """

    batch: int
    rows: int
    total: int
    size_bytes: int
    left_bytes: Mapping[str, int]


class Ingest:
    """Copies a log into a lake. Raises LakeError if it is unknown which records the lake has.

    Raises OptionError for options with which the lake would lack records for ever.
    """

    def __init__(self, lake: Lake, options: SourceOptions) -> None:
        _check(options)
        self._cluster_id = cluster_id_of(options)
        lake.choose(self._cluster_id)
        self._lake = lake
        self._options = options
        self._lease = lake.lease("ingest")
        self._stream = LogStream(options, resolves=True)
        self._plan = self._stored_plan()

    def alone(self) -> AbstractContextManager[None]:
        """Keeps other processes from copying into the cluster. Raises LeaseError if one does."""
        return self._lease.held(_ENDING_SECONDS)

    def stop_at_present_ends(self) -> None:
        """Makes the present ends of the logs the end of the last batch."""
        self._stream.stop_at_present_ends()

    def left_bytes(self) -> Mapping[str, int]:
        """Returns the bytes of each log partition that are not in the lake, of those that have any."""
        offset = {} if self._plan is None else self._plan.start if self._is_pending else self._plan.end
        self._stream.latest(offset, 0)
        return self._stream.bytes_behind(offset)

    def next(self) -> Ingested | None:
        """Copies the next batch. Returns None if there is nothing new.

        Raises LeaseError if another process copies into the cluster.
        """
        with self.alone():
            self._plan = self._stored_plan()
            return self._next()

    def _next(self) -> Ingested | None:
        plan = self._plan if self._is_pending else self._following()
        ranges = [] if plan is None else self._stream.ranges(plan.start, plan.end)
        # Only now it is certain that the log is not another cluster's, since the stream has compared the topic's id.
        self._lake.bind(self._cluster_id)
        if plan is None:
            return None
        if plan.tasks is None:
            plan = self._store(plan, ranges)
        facts = self._write(plan, self._work(plan, ranges))
        self._stream.done(plan.end)
        self._lease.check()
        rows, total = _note(self._lake, plan.batch, facts)
        return Ingested(plan.batch, rows, total, plan.size_bytes, self._stream.bytes_behind(plan.end))

    @property
    def _is_pending(self) -> bool:
        """True if the planned batch is not done."""
        note = self._lake.note("records")
        return self._plan is not None and self._plan.batch > _last_batch(note)

    # The plan.

    def _stored_plan(self) -> Plan | None:
        plan = _plan_of(self._lake)
        if plan is None and self._lake.note("records") is not None:
            raise LakeError(
                f"{self._lake.notes_uri}/{PLAN} does not exist, so it is unknown which records the lake has: "
                f"restore it, or remove {self._lake.path(TABLES['records'])} and {self._lake.notes_uri} as well"
            )
        return plan

    def _following(self) -> Plan | None:
        """Returns the batch after the last one, without its tasks, or None if there is nothing new."""
        last = self._plan
        start = self._stream.initial() if last is None else last.end
        end = self._stream.latest(start, self._options.max_bytes_per_trigger or _BATCH_BYTES)
        if last is None and self._options.starting_offsets != "earliest":
            # The next command would find a later `latest`. The stream has checked that the log has these offsets.
            last = self._store(Plan(-1, start, start, 0, None), [])
        return None if end == start else Plan(0 if last is None else last.batch + 1, start, end, 0, None)

    def _store(self, plan: Plan, ranges: list[tuple[LogRange, int]]) -> Plan:
        """Cuts the batch into tasks, and stores the plan."""
        tasks = [
            [[log_range.log.log_partition, log_range.start, log_range.end] for log_range in packed]
            for packed in pack(ranges, self._options.split_bytes)
        ]
        self._plan = replace(plan, size_bytes=sum(size for _, size in ranges), tasks=tasks)
        self._lease.check()
        self._lake.replace_text(PLAN, self._plan.to_json())
        return self._plan

    def _work(self, plan: Plan, ranges: list[tuple[LogRange, int]]) -> list[Ranges]:
        """Returns the ranges of each task. The log may be in another place than when it was planned."""
        logs = {log_range.log.log_partition: log_range.log for log_range, _ in ranges}
        try:
            # Every transaction of a range is decided, but its marker may follow the range.
            return [
                Ranges([LogRange(logs[number], start, end, END_OF_LOG) for number, start, end in task])
                for task in plan.tasks or ()
            ]
        except KeyError as error:
            raise DataLossError(f"{self._options.topic}-{error} is missing, and a planned batch needs it") from None

    # The rows.

    def _write(self, plan: Plan, work: list[Ranges]) -> Iterable[Mapping[str, int | None]]:
        """Replaces the part of the batch. Returns its facts, a row per task and log partition."""
        lake, options = self._lake, self._options
        if lake.format is not Format.PARQUET:
            return _write_frame(lake, _read(lake, work, options), plan.batch)
        place = lake.files_uri(TABLES["records"])
        record_files.clear(place, plan.batch)
        if plan.size_bytes <= SMALL_BYTES:
            options = replace(options, decoder="numpy" if options.decoder == "auto" else options.decoder)
            facts = [record_files.write_ranges(ranges, options, place, plan.batch) for ranges in work]
            return [row for batch in facts for row in batch.to_pylist()]
        batch = plan.batch

        def write(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for ranges in _of_task(numbers, work):
                yield record_files.write_ranges(ranges, options, place, batch)

        rows = _tasks(lake, len(work)).mapInArrow(write, record_files.FACTS).collect()
        return [row.asDict() for row in rows]


def _check(options: SourceOptions) -> None:
    """Raises OptionError if a copy with the options would leave out records that no later copy reads."""
    if options.groups is not None:
        raise OptionError("groups: a lake gets all groups, since a later copy does not read the log partition again")
    if not options.is_read_committed:
        raise OptionError("isolationLevel: a lake needs read_committed, since it reads each record once")


def ingest(lake: Lake, log: str | None = None, options: Mapping[str, str] | None = None) -> list[Ingested]:
    """Copies the log up to its present end. Returns the batches.

    `log` is the folder. Without it `options` has the brokers (`kafka.bootstrap.servers`).
    """
    given = {**(options or {}), **({} if log is None else {"path": log})}
    job = Ingest(lake, SourceOptions.parse(given))
    with job.alone():
        job.stop_at_present_ends()
        return [*iter(job.next, None)]


def bronze(source: DataFrame, batch: int) -> DataFrame:
    """Makes rows of bronze.records from rows of the source."""
    kind = (
        F.when(F.col("control_type").isNotNull(), "control")
        .when(F.col("record_type").isin(0, 1), "offset")
        .otherwise("group")
    )
    return TABLES["records"].conform(source.withColumn("kind", kind).withColumn("batch", F.lit(batch)))


def write_batch(lake: Lake, frame: DataFrame, batch: int) -> None:
    """Writes one batch of rows of the source and updates the note of the table."""
    _note(lake, batch, _write_frame(lake, frame, batch))


def _tasks(lake: Lake, count: int) -> DataFrame:
    """Returns a frame with the number of a task in each of its partitions."""
    return lake.spark.range(0, count, 1, numPartitions=count)


def _of_task(numbers: Iterator[pa.RecordBatch], work: list[Ranges]) -> Iterator[Ranges]:
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield work[number]


def _read(lake: Lake, work: list[Ranges], options: SourceOptions) -> DataFrame:
    """Returns the rows of the source, which the workers read."""

    def read(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for ranges in _of_task(numbers, work):
            yield from read_ranges(ranges, options, RECORDS.schema(), options.groups)

    return _tasks(lake, len(work)).mapInArrow(read, from_arrow_schema(RECORDS.schema()))


def _write_frame(lake: Lake, frame: DataFrame, batch: int) -> Iterable[Mapping[str, int | None]]:
    lake.write("records", bronze(frame, batch))
    written = lake.read("records").where(F.col("batch") == batch)
    facts = written.groupBy("log_partition").agg(
        F.count("*").alias("rows"),
        F.max(F.when(F.col("kind") == "group", F.col("log_offset"))).alias("group_offset"),
        F.max(F.unix_millis("timestamp")).alias("newest_ms"),
    )
    return [row.asDict() for row in facts.collect()]


def _note(lake: Lake, batch: int, facts: Iterable[Mapping[str, int | None]]) -> tuple[int, int]:
    """Updates the note. Returns the rows of the batch and of the table. A batch that is written again counts once."""
    note = lake.note("records") or TableNote()
    progress = dict(note.progress)
    rows = 0
    for fact in facts:
        rows += fact["rows"] or 0
        if fact["group_offset"] is not None:
            name = f"{GROUP_OFFSET}{fact['log_partition']}"
            progress[name] = max(progress.get(name, -1), fact["group_offset"])
        progress[MAX_TIMESTAMP_MS] = max(progress.get(MAX_TIMESTAMP_MS, 0), fact["newest_ms"] or 0)
    if batch > _last_batch(note):
        progress["rows"] = progress.get("rows", 0) + rows
    progress["batch"] = batch
    lake.set_note("records", TableNote(note.version + 1, {}, progress))
    return rows, progress.get("rows", rows)


def _last_batch(note: TableNote | None) -> int:
    """Returns the number of the last batch that is done, -1 if there is none."""
    return -1 if note is None else note.progress.get("batch", -1)


def copied_topic_id(lake: Lake) -> str | None:
    """Returns the id of the topic that the lake has copied, None if it is unknown."""
    plan = _plan_of(lake)
    topic_id = None if plan is None else plan.end.get(TOPIC_ID)
    return None if topic_id is None else str(topic_id)


def _plan_of(lake: Lake) -> Plan | None:
    """Returns the stored plan, or the one that follows from the checkpoint of an older release."""
    text = lake.text(PLAN)
    if text is None:
        return _plan_of_checkpoint(lake)
    with lake.parsing(PLAN):
        return Plan(**json.loads(text))


def _plan_of_checkpoint(lake: Lake) -> Plan | None:
    """Returns the newest batch in the checkpoint of an older release, or None if there is no checkpoint."""
    batches = sorted(int(name) for name in lake.names("checkpoint/offsets") if name.isdigit())
    if not batches:
        return None
    offsets = [_checkpointed(lake, batch) for batch in batches[-2:]]
    start = offsets[-2] if len(offsets) > 1 else StreamOffset()
    return Plan(batches[-1], start, offsets[-1], 0, None)


def _checkpointed(lake: Lake, batch: int) -> StreamOffset:
    """Returns the offset of the only source in a file of Spark: a version, a line of settings, a line per source."""
    text = lake.text(f"checkpoint/offsets/{batch}") or ""
    offset: StreamOffset = json.loads(text.splitlines()[2])
    return offset
