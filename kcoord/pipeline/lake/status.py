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
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, newest, with_end_at
from kcoord.pipeline.lake.settings import BURROW_WINDOW
from kcoord.pipeline.lake.tables import TABLES

_KEY: Final = f"PARTITION BY {', '.join(KEY)}"
_STATUS: Final = """CASE
    WHEN lag = 0 OR least_lag = 0 THEN 'OK'
    WHEN went_back THEN 'REWIND'
    WHEN unix_millis(now) - unix_millis(last_commit_timestamp)
        > unix_millis(last_commit_timestamp) - unix_millis(first_commit_timestamp) THEN 'STOP'
    WHEN is_same THEN 'STALL'
    WHEN lag IS NOT NULL AND known_lags = commits AND NOT shrank THEN 'WARN'
    ELSE 'OK'
END"""


def build(commits: DataFrame, current: DataFrame, ends: DataFrame, now: datetime) -> DataFrame:
    recent = with_end_at(_recent(commits, current), ends, "commit_timestamp", "end_then")
    lag_then, order = _lag_to("end_then"), f"OVER ({_KEY} ORDER BY log_offset)"
    recent = recent.selectExpr(
        "*",
        f"{lag_then} AS lag_then",
        f"committed_offset < lag(committed_offset) {order} AS goes_back",
        f"{lag_then} < lag({lag_then}) {order} AS shrinks",
    )
    facts = recent.groupBy(*KEY).agg(
        F.min("lag_then").alias("least_lag"),
        F.count("lag_then").alias("known_lags"),
        F.expr("coalesce(max(goes_back), false) AS went_back"),
        F.expr("coalesce(max(shrinks), false) AS shrank"),
        F.expr("min(committed_offset) = max(committed_offset) AS is_same"),
        F.min_by("commit_timestamp", "log_offset").alias("first_commit_timestamp"),
        F.max_by("commit_timestamp", "log_offset").alias("last_commit_timestamp"),
        F.max_by("committed_offset", "log_offset").alias("committed_offset"),
        F.count("*").alias("commits"),
    )
    facts = facts.join(newest(ends).select(*TOPIC_PARTITION, "end_offset"), list(TOPIC_PARTITION), "left")
    rows = facts.withColumn("now", F.lit(now)).selectExpr(
        "*", f"{_lag_to('end_offset')} AS lag", f"{_STATUS} AS status"
    )
    worst = "max(CASE status WHEN 'OK' THEN 1 WHEN 'WARN' THEN 2 ELSE 3 END) OVER (PARTITION BY group)"
    return TABLES["status"].conform(rows, group_status=f"elt({worst}, 'OK', 'WARN', 'ERR')")


def _lag_to(end: str) -> str:
    """Returns the lag behind the end in a column, null if the end is unknown. `greatest` alone would return 0 then."""
    return f"if({end} IS NULL, NULL, greatest({end} - committed_offset, 0))"


def _recent(commits: DataFrame, current: DataFrame) -> DataFrame:
    """Returns the last commits of each key that has a current offset, in the current incarnation of its group."""
    order = f"{_KEY} ORDER BY effective_offset DESC, log_offset DESC"
    kept = commits.where("NOT is_tombstone").join(current.select(*KEY, "incarnation"), [*KEY, "incarnation"])
    kept = kept.selectExpr(
        *KEY, "log_offset", "committed_offset", "commit_timestamp", f"row_number() OVER ({order}) AS age"
    )
    return kept.where(f"age <= {BURROW_WINDOW}")
