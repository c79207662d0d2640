# SPDX-License-Identifier: Apache-2.0
"""Groups of one name told apart: epochs and generations start again when a group is made again.

The incarnation of a row is the number of tombstones that ended a group of this name before it in the log.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def group_ends(records: DataFrame) -> DataFrame:
    """Of each group that ever ended: `ends`, the log offsets at which it did, ascending. `group` is its name."""
    ended = records.where("`kind` = 'group' AND group_end")
    return ended.groupBy("group").agg(F.sort_array(F.collect_set("log_offset")).alias("ends"))


def with_incarnation(frame: DataFrame, ends: DataFrame) -> DataFrame:
    """Adds `incarnation` to rows with `group` and `log_offset`."""
    count = F.expr("size(filter(ends, each -> each < log_offset))")
    joined = frame.join(F.broadcast(ends), "group", "left")
    return joined.withColumn("incarnation", F.coalesce(count, F.lit(0)))
