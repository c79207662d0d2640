# SPDX-License-Identifier: Apache-2.0
"""gold.lag: the committed offset of each group at each sample of `ends`, and its lag in records and seconds.

The lag in seconds is the time since the end of the partition passed the committed offset. That time is interpolated
between two samples. If the topic was deleted and created again, only samples of the new topic count.

A commit of a transaction counts from its marker on. The log says which of two commits is the later one. Their times may
say otherwise, because each is that of the coordinator's clock. So no commit counts before the one that it follows.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, lines, with_lives
from kcoord.pipeline.lake.frames import unique, with_latest
from kcoord.pipeline.lake.tables import TABLES

_LIFE = (*TOPIC_PARTITION, "life")


def build(commits: DataFrame, ends: DataFrame) -> DataFrame:
    samples = with_lives(ends)
    committed = _committed_at_samples(commits, samples)
    # What a life has reached only grows, so the last line that begins at or below the offset is the one that passes it.
    rising = lines(samples, _LIFE, "reached").where("e1 > e0").withColumn("committed_offset", F.col("e0"))
    rows = with_latest(committed, rising, _LIFE, "committed_offset", "line")
    passed = "(line.t0 + (committed_offset - line.e0) * (line.t1 - line.t0) / (line.e1 - line.e0))"
    behind = "end_offset > committed_offset"
    return TABLES["lag"].conform(
        rows,
        lag="greatest(end_offset - committed_offset, 0)",
        seconds_behind=f"if({behind}, (unix_millis(timestamp) - coalesce({passed}, first_ms)) / 1000D, 0)",
        is_lower_bound=f"{behind} AND {passed} IS NULL",
    )


def _committed_at_samples(commits: DataFrame, samples: DataFrame) -> DataFrame:
    """Returns the samples for each key that has an offset then, with KEY and `committed_offset`."""
    place = ["effective_offset", "log_offset"]
    order = f"PARTITION BY {', '.join(KEY)} ORDER BY {', '.join(place)} ROWS UNBOUNDED PRECEDING"
    time = f"max(effective_timestamp) OVER ({order}) AS timestamp"
    commits = commits.selectExpr(*KEY, *place, "committed_offset", "is_tombstone", time)
    rows = samples.join(unique(commits, *KEY), list(TOPIC_PARTITION))
    # A commit at the time of a sample precedes the sample.
    rows = with_latest(rows, commits, KEY, "timestamp", "commit", place)
    return rows.where("NOT commit.is_tombstone").withColumn("committed_offset", F.col("commit.committed_offset"))
