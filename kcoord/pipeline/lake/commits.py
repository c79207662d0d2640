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

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import unique
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.tables import TABLES
from kcoord.pipeline.schemas import RECORDS

KEY = ("group", "topic", "partition")
_FROM_RECORDS: Final = {column.name for column in RECORDS.columns} | {"batch"}
_COLUMNS: Final = (
    *(column.name for column in TABLES["commits"].columns if column.name in _FROM_RECORDS),
    "tombstone_reason",
    # The marker may be in a later micro-batch, but each record of its transaction has the time of the marker.
    "coalesce(marker_timestamp, timestamp) AS effective_timestamp",
    "coalesce(array_size(filter(ends, ended -> ended.log_offset < log_offset)), 0) AS incarnation",
    """is_tombstone AND exists(ends, ended -> ended.log_offset > log_offset
        AND abs(unix_millis(ended.timestamp) - unix_millis(timestamp)) <= 1000) AS is_group_end""",
)
_LAST: Final = """last(if(is_tombstone, NULL, struct(commit_timestamp, expire_timestamp)), true) OVER (
    PARTITION BY group, topic, partition ORDER BY log_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
) AS last"""
"""The commit that a tombstone removes."""


def build(new: DataFrame, records: DataFrame, history: DataFrame, settings: LakeSettings) -> DataFrame:
    """Makes rows of `commits` for the records in `new`. `records` is all of bronze, `history` the earlier commits."""
    ended = records.where("kind = 'group' AND group_end")
    ends = ended.groupBy("group").agg(F.expr("collect_set(struct(log_offset, timestamp)) AS ends"))
    rows = new.where("kind = 'offset' AND effective_offset IS NOT NULL AND group IS NOT NULL")
    rows = rows.join(F.broadcast(ends), "group", "left").selectExpr(*_COLUMNS)
    reasons = _inferred(rows, history, settings)
    rows = rows.join(F.broadcast(reasons), ["log_partition", "log_offset"], "left")
    return TABLES["commits"].conform(
        rows,
        reason="CASE WHEN is_tombstone THEN coalesce(tombstone_reason, inferred_reason) ELSE 'commit' END",
        reason_source="if(is_tombstone AND tombstone_reason IS NULL, 'inferred', 'recorded')",
    )


def _inferred(rows: DataFrame, history: DataFrame, settings: LakeSettings) -> DataFrame:
    """Returns the `inferred_reason` of each tombstone in `rows` without a recorded reason."""
    removals = "is_tombstone AND tombstone_reason IS NULL"
    columns = ["log_partition", "log_offset", "timestamp", *KEY, "commit_timestamp", "expire_timestamp", "is_tombstone"]
    timeline = rows.selectExpr(*columns, f"{removals} AS is_asked", "is_group_end").unionByName(
        history.selectExpr(*columns, "false AS is_asked", "false AS is_group_end")
    )
    keys = unique(rows.where(removals), *KEY)
    timeline = timeline.join(F.broadcast(keys), list(KEY), "left_semi").selectExpr("*", _LAST)
    age_ms = "unix_millis(timestamp) - unix_millis(last.commit_timestamp)"
    return timeline.where("is_asked").selectExpr(
        "log_partition",
        "log_offset",
        f"""CASE
            WHEN timestamp >= last.expire_timestamp OR {age_ms} >= {settings.retention_ms} THEN 'expired'
            WHEN is_group_end THEN 'group-delete'
            ELSE 'offset-delete'
        END AS inferred_reason""",
    )
