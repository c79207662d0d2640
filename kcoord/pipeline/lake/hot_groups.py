# SPDX-License-Identifier: Apache-2.0
"""gold.hot_groups: the commits of each group per hour.

One group can make its log partition hot, since all its commits go there.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.tables import TABLES

SECONDS_PER_HOUR = 3600.0


def build(commits: DataFrame) -> DataFrame:
    hourly = commits.groupBy(
        "group", "log_partition", "topic", "partition", F.date_trunc("hour", "timestamp").alias("hour")
    ).agg(
        F.count_if(~F.col("is_tombstone")).alias("commits"),
        F.count_if(F.col("is_tombstone")).alias("tombstones"),
    )
    rows = hourly.groupBy("group", "log_partition", "hour").agg(
        F.sum("commits").alias("commits"),
        F.sum("tombstones").alias("tombstones"),
        F.count_if(F.col("commits") > 0).alias("partitions"),
    )
    all_commits = F.sum("commits").over(Window.partitionBy("hour"))
    share = F.when(all_commits > 0, F.col("commits") / all_commits).otherwise(0.0)
    return TABLES["hot_groups"].conform(
        rows.withColumns({"commits_per_s": F.col("commits") / SECONDS_PER_HOUR, "share": share})
    )
