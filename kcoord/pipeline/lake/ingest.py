# SPDX-License-Identifier: Apache-2.0
"""bronze.records: the log, copied once and kept.

A structured stream reads it; its checkpoint says how far. Each micro-batch is one part of the table's layout, which is
replaced as a whole: a micro-batch that was killed is run again by Spark with the same offsets, and takes its own place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

import kcoord.pipeline
from kcoord.pipeline.lake.gold_tables import TABLES
from kcoord.pipeline.lake.storage import Lake, LakeError, Note

GROUP_OFFSET: Final = "group_offset."
"""Of each log partition: the log offset of its newest group record."""
MAX_TIMESTAMP_MS: Final = "max_timestamp_ms"
_DEFAULTS: Final = {"maxBytesPerTrigger": str(512 << 20)}
"""So much of the log is done again after a kill, at most."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What bronze holds after a micro-batch."""

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
    """Starts the stream. Without `follow_interval_ms` it ends when all that is there has been read."""
    if lake.note("records") is not None and not lake.has_checkpoint():
        raise LakeError(
            f"{lake.checkpoint} is gone, so nobody knows which records the lake has: "
            f"bring it back, or remove {lake.path(TABLES['records'])} and {lake.uri}/_kcoord as well"
        )
    kcoord.pipeline.register(lake.spark)
    source = lake.spark.readStream.format("kcoord").option("table", "records")
    stream = source.options(**{**_DEFAULTS, **(options or {})}).load(log)

    def write(frame: DataFrame, batch: int) -> None:
        on_batch(write_batch(lake, frame, batch))

    writer = (
        stream.writeStream.queryName("kcoord-ingest").foreachBatch(write).option("checkpointLocation", lake.checkpoint)
    )
    if follow_interval_ms is None:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{follow_interval_ms} milliseconds").start()


def bronze(source: DataFrame, batch: int) -> DataFrame:
    """Rows of bronze.records from rows of the source."""
    kind = (
        F.when(F.col("control_type").isNotNull(), "control")
        .when(F.col("record_type").isin(0, 1), "offset")
        .otherwise("group")
    )
    return TABLES["records"].conform(source.withColumn("kind", kind).withColumn("batch", F.lit(batch)))


def write_batch(lake: Lake, frame: DataFrame, batch: int) -> Ingested:
    """Puts one micro-batch in its place and notes how far the lake has come; the same however often it is done."""
    lake.write("records", bronze(frame, batch))
    written = lake.read("records").where(F.col("batch") == batch)
    facts = (
        written.groupBy("log_partition")
        .agg(
            F.count("*").alias("rows"),
            F.max(F.when(F.col("kind") == "group", F.col("log_offset"))).alias("group_offset"),
            F.max(F.unix_millis("timestamp")).alias("newest_ms"),
        )
        .collect()
    )
    note = lake.note("records") or Note()
    progress = dict(note.progress)
    rows = sum(int(fact["rows"]) for fact in facts)
    for fact in facts:
        if fact["group_offset"] is not None:
            progress[f"{GROUP_OFFSET}{fact['log_partition']}"] = int(fact["group_offset"])
        progress[MAX_TIMESTAMP_MS] = max(progress.get(MAX_TIMESTAMP_MS, 0), int(fact["newest_ms"] or 0))
    if batch > progress.get("batch", -1):
        progress["rows"] = progress.get("rows", 0) + rows
    progress["batch"] = batch
    lake.set_note("records", Note(note.version + 1, {}, progress))
    return Ingested(batch, rows, progress.get("rows", rows))
