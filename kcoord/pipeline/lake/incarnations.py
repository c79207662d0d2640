# SPDX-License-Identifier: Apache-2.0
"""Distinguishes groups with the same name, since epochs and generations start again when a group is created again.

The incarnation of a row is the number of earlier tombstones in the log that ended a group of this name.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def group_ends(records: DataFrame) -> DataFrame:
    """Returns `group` and `ends` of each group that has ended: the log offsets of the ends, ascending."""
    ended = records.where("`kind` = 'group' AND group_end")
    return ended.groupBy("group").agg(F.sort_array(F.collect_set("log_offset")).alias("ends"))


def with_incarnation(frame: DataFrame, ends: DataFrame) -> DataFrame:
    """Adds `incarnation` to rows with `group` and `log_offset`."""
    count = F.expr("size(filter(ends, ended_at -> ended_at < log_offset))")
    joined = frame.join(F.broadcast(ends), "group", "left")
    return joined.withColumn("incarnation", F.coalesce(count, F.lit(0)))
