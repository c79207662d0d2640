# SPDX-License-Identifier: Apache-2.0
"""Interpolates the end offset of a partition at any moment: straight lines between the samples of `ends`."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import with_latest

TOPIC_PARTITION = ("topic", "partition")


def with_lives(ends: DataFrame) -> DataFrame:
    """Adds `life`, how often the topic was created again, `first_ms`, when that life was first seen, and `reached`.

    `reached` is the largest end in the life until the sample. The end of a partition may fall, if its log is truncated.
    Without topic ids a fall begins a new life.
    """
    order = Window.partitionBy(*TOPIC_PARTITION).orderBy("timestamp")
    before, fell = F.lag("topic_id").over(order), F.col("end_offset") < F.lag("end_offset").over(order)
    is_known = before.isNotNull() & F.col("topic_id").isNotNull()
    begins = F.when(is_known, F.col("topic_id") != before).otherwise(F.coalesce(fell, F.lit(False))).cast("int")
    life = Window.partitionBy(*TOPIC_PARTITION, "life")
    return (
        ends.withColumn("begins", begins)
        .withColumn("life", F.sum("begins").over(order))
        .withColumn("first_ms", F.min(F.unix_millis("timestamp")).over(life))
        .withColumn("reached", F.max("end_offset").over(life.orderBy("timestamp")))
    )


def lines(samples: DataFrame, key: tuple[str, ...] = TOPIC_PARTITION, end: str = "end_offset") -> DataFrame:
    """Returns the lines from each sample (t0, e0) of the key to the next (t1, e1). Times are in ms.

    t1 and e1 of the last sample are null.
    """
    order = Window.partitionBy(*key).orderBy("timestamp")
    return samples.select(
        *key,
        F.unix_millis("timestamp").alias("t0"),
        F.col(end).alias("e0"),
        F.lead(F.unix_millis("timestamp")).over(order).alias("t1"),
        F.lead(end).over(order).alias("e1"),
    )


def with_end_at(rows: DataFrame, ends: DataFrame, at: str, name: str) -> DataFrame:
    """Adds the column `name`: the end offset at the time in column `at`, or null before the first sample."""
    rows = rows.withColumn("t0", F.unix_millis(F.col(at)))
    rows = with_latest(rows, lines(ends).where("t1 IS NULL OR t1 > t0"), TOPIC_PARTITION, "t0", "line")
    between = F.expr("line.e0 + (line.e1 - line.e0) * (t0 - line.t0) / (line.t1 - line.t0)")
    return rows.withColumn(name, F.when(F.col("line.t1").isNull(), F.col("line.e0")).otherwise(F.floor(between)))


def newest(ends: DataFrame) -> DataFrame:
    """Returns the rows of the newest sample."""
    return ends.join(F.broadcast(ends.agg(F.max("timestamp").alias("timestamp"))), "timestamp")
