# SPDX-License-Identifier: Apache-2.0
"""gold.status: Burrow's rules over the last ten commits of each partition.

The first rule that holds counts:

1. OK: the lag is 0 now, or was 0 at one of the commits.
2. REWIND: a committed offset is smaller than the previous one.
3. STOP: the time since the last commit is longer than the time from the first to the last commit.
4. STALL: all commits have the same offset.
5. WARN: the lag never shrank from one commit to the next.
6. OK.

Rule 2 comes before rule 3 as in Burrow's code. The lag at a commit before the first sample of `ends` is unknown. Rule 5
does not hold with such a commit, and without samples rule 1 does not hold either. Removed offsets have no status.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, newest, with_end_at
from kcoord.pipeline.lake.settings import BURROW_WINDOW
from kcoord.pipeline.lake.tables import TABLES


def build(commits: DataFrame, current: DataFrame, ends: DataFrame, now: datetime) -> DataFrame:
    recent = _recent(commits, current)
    recent = with_end_at(recent, ends, "commit_timestamp", "end_then")
    recent = recent.withColumn("lag_then", _lag_to("end_then"))
    order = Window.partitionBy(*KEY).orderBy("log_offset")
    recent = recent.withColumns(
        {
            "went_back": F.col("committed_offset") < F.lag("committed_offset").over(order),
            "shrank": F.col("lag_then") < F.lag("lag_then").over(order),
        }
    )
    facts = recent.groupBy(*KEY).agg(
        F.min("lag_then").alias("least_lag"),
        F.count("lag_then").alias("known_lags"),
        F.coalesce(F.max("went_back"), F.lit(False)).alias("went_back"),
        F.coalesce(F.max("shrank"), F.lit(False)).alias("shrank"),
        (F.min("committed_offset") == F.max("committed_offset")).alias("is_same"),
        F.min_by("commit_timestamp", "log_offset").alias("first_commit_timestamp"),
        F.max_by("commit_timestamp", "log_offset").alias("last_commit_timestamp"),
        F.max_by("committed_offset", "log_offset").alias("committed_offset"),
        F.count("*").cast("int").alias("commits"),
    )
    facts = facts.join(newest(ends).select(*TOPIC_PARTITION, "end_offset"), list(TOPIC_PARTITION), "left")
    rows = facts.withColumn("lag", _lag_to("end_offset")).withColumn("status", _status(now))
    severity = F.when(F.col("status") == "OK", 0).when(F.col("status") == "WARN", 1).otherwise(2)
    worst = F.max(severity).over(Window.partitionBy("group"))
    name = F.element_at(F.array(F.lit("OK"), F.lit("WARN"), F.lit("ERR")), worst + 1)
    return TABLES["status"].conform(rows.withColumn("group_status", name))


def _lag_to(end: str) -> Column:
    """Returns the lag behind the end in a column, null if the end is unknown. `greatest` alone would return 0 then."""
    lag = F.greatest(F.col(end) - F.col("committed_offset"), F.lit(0))
    return F.when(F.col(end).isNotNull(), lag)


def _recent(commits: DataFrame, current: DataFrame) -> DataFrame:
    """Returns the last commits of each key that has a current offset, in the current incarnation of its group."""
    order = Window.partitionBy(*KEY).orderBy(F.col("effective_offset").desc(), F.col("log_offset").desc())
    kept = commits.where("NOT is_tombstone").join(current.select(*KEY, "incarnation"), [*KEY, "incarnation"])
    return kept.withColumn("age", F.row_number().over(order)).where(F.col("age") <= BURROW_WINDOW)


def _status(now: datetime) -> Column:
    last = F.unix_millis("last_commit_timestamp")
    first = F.unix_millis("first_commit_timestamp")
    silent = F.unix_millis(F.lit(now)) - last
    return (
        F.when((F.col("lag") == 0) | (F.col("least_lag") == 0), "OK")
        .when(F.col("went_back"), "REWIND")
        .when(silent > last - first, "STOP")
        .when(F.col("is_same"), "STALL")
        .when(F.col("lag").isNotNull() & (F.col("known_lags") == F.col("commits")) & ~F.col("shrank"), "WARN")
        .otherwise("OK")
    )
