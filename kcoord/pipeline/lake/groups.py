# SPDX-License-Identifier: Apache-2.0
"""The kind, members and subscriptions of every group at a moment, from silver tables up to that moment.

A group that has only offsets (a simple consumer) has no row, since the log has nothing else about it.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


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
    values = ("incarnation", "kind", "epoch", "protocol_type", "protocol", "empty_since", "creation_timestamp")
    newest = rows.groupBy("group").agg(
        F.expr(f"max_by(struct(is_tombstone, {', '.join(values)}), struct(log_offset)) AS newest")
    )
    there = newest.where("NOT newest.is_tombstone").select("group", "newest.*")
    counts = (
        as_of(members, moment)
        .groupBy("group", "incarnation", "kind")
        .agg(F.expr("int(count(DISTINCT member_id)) AS counted"))
    )
    return there.join(counts, ["group", "incarnation", "kind"], "left").selectExpr(
        "group",
        *values,
        "if(kind = 'streams', NULL, coalesce(counted, 0)) AS members",
        "CASE WHEN kind = 'streams' THEN 'Unknown' WHEN counted > 0 THEN 'Stable' ELSE 'Empty' END AS state",
    )


def subscriptions(members: DataFrame, regexes: DataFrame) -> DataFrame:
    """Returns per group with members: `topics`, the current subscriptions, and `is_known`.

    `is_known` is true if the log has the subscription of every member.
    """
    now = as_of(members, None)
    matched = regexes.selectExpr("group", "regex AS subscribed_regex", "topics AS matched")
    said = now.join(matched, ["group", "subscribed_regex"], "left")
    topics = "array_union(coalesce(subscribed_topics, array()), coalesce(matched, array()))"
    return said.groupBy("group").agg(
        F.expr(f"array_distinct(flatten(collect_list({topics}))) AS topics"),
        F.expr("min(subscribed_topics IS NOT NULL OR subscribed_regex IS NOT NULL) AS is_known"),
    )
