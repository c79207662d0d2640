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

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import TOPIC_PARTITION, newest, with_end_at
from kcoord.pipeline.lake.frames import unique
from kcoord.pipeline.lake.groups import group_states, subscriptions
from kcoord.pipeline.lake.tables import TABLES


def build(
    commits: DataFrame,
    epochs: DataFrame,
    members: DataFrame,
    assignments: DataFrame,
    regexes: DataFrame,
    ends: DataFrame,
) -> DataFrame:
    # What streams groups read is not known.
    groups = (
        group_states(epochs, members)
        .where("`kind` != 'streams'")
        .select("group", "incarnation", F.col("creation_timestamp").alias("group_created"))
    )
    topics = subscriptions(members, regexes).select("group", F.explode("topics").alias("topic"))
    read = (
        commits.where("NOT is_tombstone")
        .select("group", "incarnation", "topic")
        .join(groups.select("group", "incarnation"), ["group", "incarnation"])
    )
    topics = unique(topics.unionByName(read.select("group", "topic")), "group", "topic")
    pairs = groups.join(topics, "group").join(_partitions(ends), "topic")
    pairs = pairs.where(F.col("partition_created") > F.col("group_created"))
    key = [*KEY, "incarnation"]
    pairs = pairs.join(_first_assigned(assignments), key, "left").join(_first_commits(commits), key, "left")
    pairs = with_end_at(pairs, ends, "first_assigned", "end_at_assignment")
    # A partition that is empty in its first sample was empty before.
    is_empty = F.col("first_assigned").isNotNull() & (F.col("first_end") <= F.col("start_offset"))
    end_then = F.coalesce("end_at_assignment", F.when(is_empty, F.col("start_offset")))
    pairs = pairs.withColumn("end_then", end_then).withColumn("verdict", _verdict())
    return TABLES["audit_1327"].conform(pairs.withColumn("records", _records()))


def _partitions(ends: DataFrame) -> DataFrame:
    """Returns the partitions of the newest sample, with `partition_created` and `created_source` (null if unknown).

    `first_end` is the end offset in the first sample.
    """
    by_topic = Window.partitionBy("topic").orderBy("timestamp")
    moments = unique(ends, "topic", "timestamp")
    moments = moments.withColumn("missing_at", F.lag("timestamp").over(by_topic))
    first = ends.groupBy(*TOPIC_PARTITION).agg(
        F.min("timestamp").alias("timestamp"),
        F.max("created_timestamp").alias("recorded"),
        F.min_by("end_offset", "timestamp").alias("first_end"),
    )
    first = first.join(moments, ["topic", "timestamp"])
    created = F.coalesce("recorded", "missing_at")
    source = F.when(F.col("recorded").isNotNull(), "recorded").when(F.col("missing_at").isNotNull(), "inferred")
    first = first.select(
        *TOPIC_PARTITION, created.alias("partition_created"), source.alias("created_source"), "first_end"
    )
    last = newest(ends).select(*TOPIC_PARTITION, "start_offset", "end_offset")
    return last.join(first, list(TOPIC_PARTITION))


def _first_assigned(assignments: DataFrame) -> DataFrame:
    owned = assignments.where("`kind` != 'target' AND topic IS NOT NULL")
    return owned.groupBy(*KEY, "incarnation").agg(F.min("from_timestamp").alias("first_assigned"))


def _first_commits(commits: DataFrame) -> DataFrame:
    return (
        commits.where("NOT is_tombstone")
        .groupBy(*KEY, "incarnation")
        .agg(F.min_by("committed_offset", "log_offset").alias("first_committed_offset"))
    )


def _verdict() -> Column:
    return (
        F.when(F.col("first_committed_offset").isNull(), "at-risk")
        .when(F.col("first_assigned").isNotNull() & (F.col("first_committed_offset") <= F.col("start_offset")), "safe")
        .when(F.col("end_then").isNull(), "unknown")
        .when(
            (F.col("end_then") > F.col("start_offset")) & (F.col("first_committed_offset") >= F.col("end_then")),
            "skipped",
        )
        .otherwise("safe")
    )


def _records() -> Column:
    start = F.col("start_offset")
    most = F.when(F.col("first_assigned").isNotNull(), F.least("first_committed_offset", "first_end"))
    most = F.coalesce(most, "first_committed_offset")
    return (
        F.when(F.col("verdict") == "at-risk", F.col("end_offset") - start)
        .when(F.col("verdict") == "skipped", F.col("end_then") - start)
        .when(F.col("verdict") == "unknown", F.greatest(most - start, F.lit(0)))
        .otherwise(0)
    )
