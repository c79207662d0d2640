# SPDX-License-Identifier: Apache-2.0
"""Interpolates the end offset of a partition at any moment: straight lines between the samples of `ends`."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import with_latest

TOPIC_PARTITION = ("topic", "partition")


def with_lives(ends: DataFrame) -> DataFrame:
    """Adds `life`, how often the topic was created again, `first_ms`, when that life was first seen, and `reached`.

    `reached` is the largest end in the life until the sample. The end of a partition may fall, if its log is truncated.
    Without topic ids a fall begins a new life.
    """
    order = "OVER (PARTITION BY topic, partition ORDER BY timestamp)"
    is_other, fell = f"topic_id != lag(topic_id) {order}", f"end_offset < lag(end_offset) {order}"
    lives = ends.selectExpr("*", f"sum(int(coalesce({is_other}, {fell}, false))) {order} AS life")
    life = "PARTITION BY topic, partition, life"
    return lives.selectExpr(
        "*",
        f"min(unix_millis(timestamp)) OVER ({life}) AS first_ms",
        f"max(end_offset) OVER ({life} ORDER BY timestamp) AS reached",
    )


def lines(samples: DataFrame, key: tuple[str, ...] = TOPIC_PARTITION, end: str = "end_offset") -> DataFrame:
    """Returns the lines from each sample (t0, e0) of the key to the next (t1, e1). Times are in ms.

    t1 and e1 of the last sample are null.
    """
    order = f"OVER (PARTITION BY {', '.join(key)} ORDER BY timestamp)"
    return samples.selectExpr(
        *key,
        "unix_millis(timestamp) AS t0",
        f"{end} AS e0",
        f"unix_millis(lead(timestamp) {order}) AS t1",
        f"lead({end}) {order} AS e1",
    )


def with_end_at(rows: DataFrame, ends: DataFrame, at: str, name: str) -> DataFrame:
    """Adds the column `name`: the end offset at the time in column `at`, or null before the first sample."""
    rows = rows.selectExpr("*", f"unix_millis({at}) AS t0")
    rows = with_latest(rows, lines(ends).where("t1 IS NULL OR t1 > t0"), TOPIC_PARTITION, "t0", "line")
    between = "line.e0 + (line.e1 - line.e0) * (t0 - line.t0) / (line.t1 - line.t0)"
    return rows.selectExpr("*", f"if(line.t1 IS NULL, line.e0, floor({between})) AS {name}")


def newest(ends: DataFrame) -> DataFrame:
    """Returns the rows of the newest sample."""
    return ends.join(F.broadcast(ends.agg(F.max("timestamp").alias("timestamp"))), "timestamp")
