# SPDX-License-Identifier: Apache-2.0
"""Interpolates the end offset of a partition at any moment: straight lines between the samples of `ends`."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

TOPIC_PARTITION = ("topic", "partition")


def lines(ends: DataFrame) -> DataFrame:
    """Returns the lines from each sample (t0, e0) to the next (t1, e1). Times are in ms.

    t1 and e1 of the last sample are null.
    """
    order = Window.partitionBy(*TOPIC_PARTITION).orderBy("timestamp")
    return ends.select(
        *TOPIC_PARTITION,
        F.expr("unix_millis(timestamp)").alias("t0"),
        F.col("end_offset").alias("e0"),
        F.lead(F.expr("unix_millis(timestamp)")).over(order).alias("t1"),
        F.lead("end_offset").over(order).alias("e1"),
    )


def with_end_at(rows: DataFrame, ends: DataFrame, at: str, name: str) -> DataFrame:
    """Adds the column `name`: the end offset at the time in column `at`, or null before the first sample."""
    moment = F.unix_millis(F.col(at))
    joined = rows.join(
        lines(ends).withColumnsRenamed({"topic": "line_topic", "partition": "line_partition"}),
        (F.col("topic") == F.col("line_topic"))
        & (F.col("partition") == F.col("line_partition"))
        & (F.col("t0") <= moment)
        & (F.col("t1").isNull() | (moment < F.col("t1"))),
        "left",
    )
    between = F.col("e0") + (F.col("e1") - F.col("e0")) * (moment - F.col("t0")) / (F.col("t1") - F.col("t0"))
    value = F.when(F.col("t1").isNull(), F.col("e0")).otherwise(F.floor(between))
    return joined.withColumn(name, value)


def newest(ends: DataFrame) -> DataFrame:
    """Returns the rows of the newest sample."""
    last = F.max("timestamp").over(Window.partitionBy(F.lit(0)))
    return ends.withColumn("last", last).where("timestamp = last")


def seconds_since(committed: Column, timestamp: Column) -> tuple[Column, Column]:
    """Returns the seconds from when the end passed `committed` to `timestamp`, and whether that is a lower bound.

    The rows have the line on which the end passed `committed`. If there is none, the first sample (`first_ms`) counts,
    and the true value is larger.
    """
    passed = F.col("t0") + (committed - F.col("e0")) * (F.col("t1") - F.col("t0")) / (F.col("e1") - F.col("e0"))
    seconds = (F.unix_millis(timestamp) - F.coalesce(passed, F.col("first_ms"))) / 1000.0
    return seconds, passed.isNull()
