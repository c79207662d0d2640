# SPDX-License-Identifier: Apache-2.0
"""gold.audit_1327: records of new partitions that a group skipped or will skip.

With `auto.offset.reset=latest` a consumer starts at the end of a partition without a commit. If the partition is
younger than the group, the consumer skips records unintentionally (KIP-1327, Motivation). The log does not have the
reset policy of the consumers, but it shows what they did:

* `skipped`: the first commit is at or after the end that the partition had when a member first got it.
* `safe`: the first commit is before that end, or the partition was empty then.
* `at-risk`: there is no commit yet, so the loss is still to come.
* `unknown`: there is a commit, but no record of the first assignment, or no sample of the partition before it. Members
  get a new partition within seconds, and the next sample may already have the records that they skipped.

The creation time of a partition is the time that the broker reports. If it reports none, it is the time of the last
sample that has the topic without the partition. A partition as old as its group is not new (KIP-1327, Classification
Flow).
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, newest, with_end_at
from kcoord.pipeline.lake.frames import unique
from kcoord.pipeline.lake.groups import group_states, subscriptions
from kcoord.pipeline.lake.tables import TABLES

_PLACE: Final = [*KEY, "incarnation"]
# A partition that is empty in its first sample was empty before.
_END_THEN: Final = """coalesce(
    end_at_assignment, if(first_assigned IS NOT NULL AND first_end <= start_offset, start_offset, NULL)
) AS end_then"""
_VERDICT: Final = """CASE
    WHEN first_committed_offset IS NULL THEN 'at-risk'
    WHEN first_assigned IS NOT NULL AND first_committed_offset <= start_offset THEN 'safe'
    WHEN end_then IS NULL THEN 'unknown'
    WHEN end_then > start_offset AND first_committed_offset >= end_then THEN 'skipped'
    ELSE 'safe'
END AS verdict"""
_RECORDS: Final = """CASE verdict
    WHEN 'at-risk' THEN end_offset - start_offset
    WHEN 'skipped' THEN end_then - start_offset
    WHEN 'unknown' THEN greatest(
        if(first_assigned IS NULL, first_committed_offset, least(first_committed_offset, first_end)) - start_offset, 0
    )
    ELSE 0
END"""


def build(
    commits: DataFrame,
    epochs: DataFrame,
    members: DataFrame,
    assignments: DataFrame,
    regexes: DataFrame,
    ends: DataFrame,
) -> DataFrame:
    # What streams groups read is not known.
    groups = group_states(epochs, members).where("kind != 'streams'")
    groups = groups.selectExpr("group", "incarnation", "creation_timestamp AS group_created")
    topics = subscriptions(members, regexes).selectExpr("group", "explode(topics) AS topic")
    counted = commits.where("NOT is_tombstone").select(*_PLACE, "committed_offset", "log_offset")
    read = counted.join(groups, ["group", "incarnation"]).select("group", "topic")
    topics = unique(topics.union(read), "group", "topic")
    pairs = groups.join(topics, "group").join(_partitions(ends), "topic").where("partition_created > group_created")
    owned = assignments.where("kind != 'target' AND topic IS NOT NULL").groupBy(*_PLACE)
    pairs = pairs.join(owned.agg(F.min("from_timestamp").alias("first_assigned")), _PLACE, "left")
    first_commit = F.min_by("committed_offset", "log_offset").alias("first_committed_offset")
    pairs = pairs.join(counted.groupBy(*_PLACE).agg(first_commit), _PLACE, "left")
    pairs = with_end_at(pairs, ends, "first_assigned", "end_at_assignment")
    return TABLES["audit_1327"].conform(pairs.selectExpr("*", _END_THEN, _VERDICT), records=_RECORDS)


def _partitions(ends: DataFrame) -> DataFrame:
    """Returns the partitions of the newest sample, with `partition_created` and `created_source` (null if unknown).

    `first_end` is the end offset in the first sample.
    """
    missing_at = "lag(timestamp) OVER (PARTITION BY topic ORDER BY timestamp) AS missing_at"
    moments = unique(ends, "topic", "timestamp").selectExpr("*", missing_at)
    first = ends.groupBy(*TOPIC_PARTITION).agg(
        F.min("timestamp").alias("timestamp"),
        F.max("created_timestamp").alias("recorded"),
        F.min_by("end_offset", "timestamp").alias("first_end"),
    )
    first = first.join(moments, ["topic", "timestamp"]).selectExpr(
        *(*TOPIC_PARTITION, "first_end"),
        "coalesce(recorded, missing_at) AS partition_created",
        "CASE WHEN recorded IS NOT NULL THEN 'recorded' WHEN missing_at IS NOT NULL THEN 'inferred' END"
        " AS created_source",
    )
    last = newest(ends).select(*TOPIC_PARTITION, "start_offset", "end_offset")
    return last.join(first, list(TOPIC_PARTITION))
