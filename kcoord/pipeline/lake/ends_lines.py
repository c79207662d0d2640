# SPDX-License-Identifier: Apache-2.0
"""Interpolates the end offset of a partition at any moment: straight lines between the samples of `ends`."""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import with_latest

TOPIC_PARTITION = ("topic", "partition")


def with_lives(ends: DataFrame) -> DataFrame:
    """Adds `life`, how often the end of the partition had fallen, and `first_ms`, the first sample of that life.

    The end of a partition falls if the topic is deleted and created again.
    """
    order = Window.partitionBy(*TOPIC_PARTITION).orderBy("timestamp")
    falls = (F.col("end_offset") < F.lag("end_offset").over(order)).cast("int")
    life = F.sum(F.coalesce("falls", F.lit(0))).over(order)
    first_ms = F.min(F.unix_millis("timestamp")).over(Window.partitionBy(*TOPIC_PARTITION, "life"))
    return ends.withColumn("falls", falls).withColumn("life", life).withColumn("first_ms", first_ms)


def lines(samples: DataFrame, key: tuple[str, ...] = TOPIC_PARTITION) -> DataFrame:
    """Returns the lines from each sample (t0, e0) of the key to the next (t1, e1). Times are in ms.

    t1 and e1 of the last sample are null.
    """
    order = Window.partitionBy(*key).orderBy("timestamp")
    return samples.select(
        *key,
        F.unix_millis("timestamp").alias("t0"),
        F.col("end_offset").alias("e0"),
        F.lead(F.unix_millis("timestamp")).over(order).alias("t1"),
        F.lead("end_offset").over(order).alias("e1"),
    )


def with_end_at(rows: DataFrame, ends: DataFrame, at: str, name: str) -> DataFrame:
    """Adds the column `name`: the end offset at the time in column `at`, or null before the first sample."""
    rows = rows.withColumn("t0", F.unix_millis(F.col(at)))
    rows = with_latest(rows, lines(ends), TOPIC_PARTITION, "t0", "line")
    between = F.expr("line.e0 + (line.e1 - line.e0) * (t0 - line.t0) / (line.t1 - line.t0)")
    return rows.withColumn(name, F.when(F.col("line.t1").isNull(), F.col("line.e0")).otherwise(F.floor(between)))


def newest(ends: DataFrame) -> DataFrame:
    """Returns the rows of the newest sample."""
    return ends.join(F.broadcast(ends.agg(F.max("timestamp").alias("timestamp"))), "timestamp")
