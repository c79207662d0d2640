# SPDX-License-Identifier: Apache-2.0
"""bronze.records: a copy of the log that stays when the log is cleaned.

Theory of operation. A structured stream reads the log, and its checkpoint has the offsets of each micro-batch. A
micro-batch has its own part of the table's layout (`batch=N`). These steps happen in order for each micro-batch:

1. Spark writes the offsets of the micro-batch to the checkpoint.
2. `write_files` or `write_batch` replaces the part `batch=N`, and then updates the note of the table.
3. Spark notes in the checkpoint that the micro-batch is done.

After a crash between 1 and 3 Spark runs the micro-batch again with the same offsets. It replaces its own part, and the
note counts its rows only once. So each record is in the table exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import kcoord.pipeline
from kcoord.pipeline.lake import record_files
from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES
from kcoord.pipeline.options import SourceOptions

GROUP_OFFSET: Final = "group_offset."
"""Prefix of the keys of a note's `progress` that have the offset of the newest group record of a log partition."""
MAX_TIMESTAMP_MS: Final = "max_timestamp_ms"
_DEFAULTS: Final = {"maxBytesPerTrigger": str(512 << 20)}
"""Limits how much of the log a run reads again after a crash."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """The result of a micro-batch: its number, its rows, and the rows of the table after it."""

    batch: int
    rows: int
    total: int


def ingest(
    lake: Lake,
    log: str,
    *,
    follow_interval_ms: int | None = None,
    options: dict[str, str] | None = None,
    on_batch: Callable[[Ingested], None] = lambda done: None,
) -> StreamingQuery:
    """Starts the stream. Without `follow_interval_ms` it ends at the current ends of the log.

    Raises LakeError if the lake has records but no checkpoint.
    """
    if lake.note("records") is not None and not lake.has_checkpoint():
        raise LakeError(
            f"checkpoint {lake.checkpoint} does not exist, so it is unknown which records the lake has: "
            f"restore it, or remove {lake.path(TABLES['records'])} and {lake.uri}/_kcoord as well"
        )
    kcoord.pipeline.register(lake.spark)
    given = {**_DEFAULTS, **(options or {})}
    by_files = lake.format is Format.PARQUET
    source = lake.spark.readStream.format("kcoord").option("table", "ranges" if by_files else "records")
    stream = source.options(**given).load(log)
    parsed = SourceOptions.parse({**given, "table": "records", "path": log})

    def write(frame: DataFrame, batch: int) -> None:
        on_batch(write_files(lake, frame, batch, parsed) if by_files else write_batch(lake, frame, batch))

    writer = (
        stream.writeStream.queryName("kcoord-ingest").foreachBatch(write).option("checkpointLocation", lake.checkpoint)
    )
    if follow_interval_ms is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{follow_interval_ms} milliseconds").start()


def bronze(source: DataFrame, batch: int) -> DataFrame:
    """Makes rows of bronze.records from rows of the source."""
    kind = (
        F.when(F.col("control_type").isNotNull(), "control")
        .when(F.col("record_type").isin(0, 1), "offset")
        .otherwise("group")
    )
    return TABLES["records"].conform(source.withColumn("kind", kind).withColumn("batch", F.lit(batch)))


def write_files(lake: Lake, ranges: DataFrame, batch: int, options: SourceOptions) -> Ingested:
    """Does the same as `write_batch`, for rows of the source's table `ranges`.

    The workers read these ranges and write the files.
    """
    place = lake.files_uri(TABLES["records"])
    record_files.clear(place, batch)
    write = record_files.writer(options, place, batch)
    return _note(lake, batch, ranges.select("work").mapInArrow(write, record_files.FACTS).collect())


def write_batch(lake: Lake, frame: DataFrame, batch: int) -> Ingested:
    """Writes one micro-batch and updates the note of the table. It may be run again with the same result."""
    lake.write("records", bronze(frame, batch))
    written = lake.read("records").where(F.col("batch") == batch)
    facts = written.groupBy("log_partition").agg(
        F.count("*").alias("rows"),
        F.max(F.when(F.col("kind") == "group", F.col("log_offset"))).alias("group_offset"),
        F.max(F.unix_millis("timestamp")).alias("newest_ms"),
    )
    return _note(lake, batch, facts.collect())


def _note(lake: Lake, batch: int, facts: Iterable[Row]) -> Ingested:
    note = lake.note("records") or TableNote()
    progress = dict(note.progress)
    rows = 0
    for fact in facts:
        rows += int(fact["rows"])
        if fact["group_offset"] is not None:
            name = f"{GROUP_OFFSET}{fact['log_partition']}"
            progress[name] = max(progress.get(name, -1), int(fact["group_offset"]))
        progress[MAX_TIMESTAMP_MS] = max(progress.get(MAX_TIMESTAMP_MS, 0), int(fact["newest_ms"] or 0))
    if batch > progress.get("batch", -1):
        progress["rows"] = progress.get("rows", 0) + rows
    progress["batch"] = batch
    lake.set_note("records", TableNote(note.version + 1, {}, progress))
    return Ingested(batch, rows, progress.get("rows", rows))
