# SPDX-License-Identifier: Apache-2.0
"""The kind, members and subscriptions of every group at a moment, from silver tables up to that moment.

A group that has only offsets (a simple consumer) has no row, since the log has nothing else about it.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import with_zeros


def as_of(spells: DataFrame, moment: datetime | None) -> DataFrame:
    """Returns the spells that were valid at the moment. None means now."""
    if moment is None:
        return spells.where("to_offset IS NULL")
    at = F.lit(moment)
    return spells.where(
        (F.col("from_timestamp") <= at) & (F.col("to_timestamp").isNull() | (F.col("to_timestamp") > at))
    )


def group_states(epochs: DataFrame, members: DataFrame, moment: datetime | None = None) -> DataFrame:
    """Returns one row per existing group.

    The columns are group, incarnation, kind, epoch, members, protocol_type, protocol, empty_since, creation_timestamp,
    state (`Empty` or `Stable`; `Unknown` for a streams group, whose members are not read).
    """
    rows = epochs.where("`kind` != 'target'")
    if moment is not None:
        rows = rows.where(F.col("timestamp") <= F.lit(moment))
    values = ["incarnation", "kind", "epoch", "protocol_type", "protocol", "empty_since", "creation_timestamp"]
    newest = rows.groupBy("group").agg(
        F.max_by(F.struct("is_tombstone", *values), F.struct("log_offset")).alias("newest")
    )
    there = newest.where("NOT newest.is_tombstone").select("group", "newest.*")
    counts = (
        as_of(members, moment)
        .groupBy("group", "incarnation", "kind")
        .agg(F.count_distinct("member_id").cast("int").alias("members"))
    )
    states = with_zeros(there.join(counts, ["group", "incarnation", "kind"], "left"), "members")
    is_read, is_stable = F.col("kind") != "streams", F.col("members") > 0
    state = F.when(~is_read, "Unknown").when(is_stable, "Stable").otherwise("Empty")
    return states.withColumns({"state": state, "members": F.when(is_read, F.col("members"))})


def subscriptions(members: DataFrame, regexes: DataFrame) -> DataFrame:
    """Returns per group with members: `topics`, the current subscriptions, and `is_known`.

    `is_known` is true if the log has the subscription of every member.
    """
    now = as_of(members, None)
    matched = regexes.select("group", F.col("regex").alias("subscribed_regex"), F.col("topics").alias("matched"))
    said = now.join(matched, ["group", "subscribed_regex"], "left")
    none = F.array().cast("array<string>")
    topics = F.array_union(F.coalesce("subscribed_topics", none), F.coalesce("matched", none))
    is_known = F.col("subscribed_topics").isNotNull() | F.col("subscribed_regex").isNotNull()
    return said.groupBy("group").agg(
        F.array_distinct(F.flatten(F.collect_list(topics))).alias("topics"), F.min(is_known).alias("is_known")
    )
