# SPDX-License-Identifier: Apache-2.0
"""silver.commits: offset records that counted, and why offsets were removed.

kcoord writes the reason of a tombstone as a record header. Kafka writes none; then it is the first reason that holds:

| reason | holds if |
|---|---|
| `expired` | the last commit of the key is older than the retention, or past its own expire time |
| `group-delete` | the group ends within a second |
| `offset-delete` | none of these |

A reason depends on no later record but the end of the group, so it is the same however the log was copied. `losses`
looks at all groups, and can tell that a topic was deleted.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import unique
from kcoord.pipeline.lake.incarnations import group_ends, with_incarnation
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.tables import TABLES

KEY = ("group", "topic", "partition")


def build(new: DataFrame, records: DataFrame, history: DataFrame, settings: LakeSettings) -> DataFrame:
    """Makes rows of `commits` for the records in `new`. `records` is all of bronze, `history` the earlier commits."""
    rows = new.where("`kind` = 'offset' AND effective_offset IS NOT NULL AND `group` IS NOT NULL")
    # The marker may be in a later micro-batch, but each record of its transaction has the time of the marker.
    rows = rows.withColumn("effective_timestamp", F.coalesce("marker_timestamp", "timestamp"))
    rows = with_incarnation(rows, group_ends(records))
    reasons = _inferred(rows, records, history, settings)
    place = ["log_partition", "log_offset"]
    rows = rows.join(F.broadcast(reasons), place, "left")
    recorded = F.col("tombstone_reason").isNotNull() | ~F.col("is_tombstone")
    reason = F.when(~F.col("is_tombstone"), "commit").otherwise(F.coalesce("tombstone_reason", "inferred_reason"))
    source = F.when(recorded, "recorded").otherwise("inferred")
    return TABLES["commits"].conform(rows.withColumns({"reason": reason, "reason_source": source}))


def _inferred(rows: DataFrame, records: DataFrame, history: DataFrame, settings: LakeSettings) -> DataFrame:
    """Returns the `inferred_reason` of each tombstone in `rows` without a recorded reason."""
    tombstones = rows.where("is_tombstone AND tombstone_reason IS NULL")
    ends = records.where("`kind` = 'group' AND group_end").select(
        "group", F.col("log_offset").alias("end_offset"), F.col("timestamp").alias("end_timestamp")
    )
    near_end = ends.join(tombstones.select("group", "log_offset", "timestamp"), "group").where(
        "end_offset > log_offset AND abs(unix_millis(end_timestamp) - unix_millis(timestamp)) <= 1000"
    )
    near_end = unique(near_end, "group", "log_offset").withColumn("is_group_end", F.lit(True))
    aged = _last_commit(rows, tombstones, history).join(near_end, ["group", "log_offset"], "left")
    return aged.select("log_partition", "log_offset", _reason(settings).alias("inferred_reason"))


def _reason(settings: LakeSettings) -> Column:
    age_ms = F.expr("unix_millis(timestamp) - unix_millis(last_commit)")
    return (
        F.when(F.expr("timestamp >= last_expire"), "expired")
        .when(age_ms >= settings.retention_ms, "expired")
        .when(F.col("is_group_end"), "group-delete")
        .otherwise("offset-delete")
    )


def _last_commit(rows: DataFrame, tombstones: DataFrame, history: DataFrame) -> DataFrame:
    """Adds `last_commit` and `last_expire` to the tombstones: the times of the commit that a tombstone removes."""
    columns = ["log_partition", "log_offset", "timestamp", *KEY, "commit_timestamp", "expire_timestamp", "is_tombstone"]
    columns = [f"`{name}`" for name in columns]
    marked = rows.select(*columns, F.col("tombstone_reason").isNull().alias("is_new"))
    past = history.select(*columns, F.lit(False).alias("is_new"))
    keys = unique(tombstones, *KEY)
    timeline = marked.unionByName(past).join(F.broadcast(keys), list(KEY), "left_semi")
    before = Window.partitionBy(*KEY).orderBy("log_offset").rowsBetween(Window.unboundedPreceding, -1)
    last = F.last(F.when(~F.col("is_tombstone"), F.struct("commit_timestamp", "expire_timestamp")), ignorenulls=True)
    timeline = timeline.withColumn("last", last.over(before)).where("is_tombstone AND is_new")
    return timeline.select(
        "*", F.col("last.commit_timestamp").alias("last_commit"), F.col("last.expire_timestamp").alias("last_expire")
    )
