# SPDX-License-Identifier: Apache-2.0
"""gold.hot_groups: the commits of each group per hour.

One group can make its log partition hot, since all its commits go there.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
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
    all_commits = "sum(commits) OVER (PARTITION BY hour)"
    return TABLES["hot_groups"].conform(
        rows,
        commits_per_s=f"commits / {SECONDS_PER_HOUR}D",
        share=f"if({all_commits} > 0, commits / {all_commits}, 0)",
    )
