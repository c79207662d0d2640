# SPDX-License-Identifier: Apache-2.0
"""gold.lag: the committed offset of each group at each sample of `ends`, and its lag in records and seconds.

The lag in seconds is the time since the end of the partition passed the committed offset. That time is interpolated
between two samples. A commit of a transaction counts from its marker on.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, lines, seconds_since
from kcoord.pipeline.lake.frames import unique
from kcoord.pipeline.lake.tables import TABLES


def build(commits: DataFrame, ends: DataFrame) -> DataFrame:
    committed = _committed_at_samples(commits, ends)
    committed = committed.withColumn("lag", F.greatest(F.col("end_offset") - F.col("committed_offset"), F.lit(0)))
    first = ends.groupBy(*TOPIC_PARTITION).agg(F.min(F.expr("unix_millis(timestamp)")).alias("first_ms"))
    line = lines(ends).where("e1 > e0").withColumnsRenamed({"topic": "line_topic", "partition": "line_partition"})
    crossing = (
        (F.col("topic") == F.col("line_topic"))
        & (F.col("partition") == F.col("line_partition"))
        & (F.col("lag") > 0)
        & (F.col("e0") <= F.col("committed_offset"))
        & (F.col("committed_offset") < F.col("e1"))
        & (F.col("t0") < F.unix_millis("timestamp"))
    )
    rows = committed.join(first, list(TOPIC_PARTITION)).join(line, crossing, "left")
    seconds, is_longer = seconds_since(F.col("committed_offset"), F.col("timestamp"))
    # The end can pass an offset twice if the topic was deleted and created again. The later time counts.
    order = Window.partitionBy(*KEY, "timestamp").orderBy(F.col("t0").desc_nulls_last())
    rows = rows.withColumn("choice", F.row_number().over(order)).where("choice = 1")
    behind = F.col("lag") > 0
    return TABLES["lag"].conform(
        rows.withColumn("seconds_behind", F.when(behind, seconds).otherwise(0.0)).withColumn(
            "is_lower_bound", behind & is_longer
        )
    )


def _committed_at_samples(commits: DataFrame, ends: DataFrame) -> DataFrame:
    """Returns rows of KEY, timestamp, committed_offset and end_offset."""
    states = commits.select(
        *KEY,
        F.col("effective_timestamp").alias("timestamp"),
        F.struct("is_tombstone", "committed_offset").alias("state"),
        F.struct("effective_offset", "log_offset").alias("place"),
        F.lit(None).cast("bigint").alias("end_offset"),
    )
    keys = unique(commits, *KEY)
    samples = ends.select(*TOPIC_PARTITION, "timestamp", "end_offset").join(keys, list(TOPIC_PARTITION))
    questions = samples.select(
        *KEY,
        "timestamp",
        F.lit(None).cast("struct<is_tombstone:boolean,committed_offset:bigint>").alias("state"),
        F.lit(None).cast("struct<effective_offset:bigint,log_offset:bigint>").alias("place"),
        "end_offset",
    )
    # A commit at the time of a sample precedes the sample.
    order = Window.partitionBy(*KEY).orderBy("timestamp", F.col("place").asc_nulls_last())
    until = order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    answered = states.unionByName(questions).withColumn("last", F.last("state", ignorenulls=True).over(until))
    answered = answered.where("end_offset IS NOT NULL AND NOT last.is_tombstone")
    return answered.select(*KEY, "timestamp", "last.committed_offset", "end_offset")
