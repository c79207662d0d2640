# SPDX-License-Identifier: Apache-2.0
"""gold.storms, gold.convergence and gold.churn.

They show how often groups rebalance, how long rebalances take, and which members join and leave.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.tables import TABLES

_LIFE = ("group", "incarnation", "kind")
_IS_EPOCH: Final = "kind != 'target' AND NOT is_tombstone"
_REASONS: Final = """map_from_entries(sort_array(
    collect_list(if(reason IS NULL, NULL, struct(reason, count)))
)) AS reasons"""
"""The number of epochs by reason. No reason of a streams group is known."""


def build_storms(epochs: DataFrame, settings: LakeSettings) -> DataFrame:
    """Finds storms: at least `storm_epochs` epochs within `storm_window_ms`, and the epochs that follow as closely."""
    order, span = f"PARTITION BY {', '.join(_LIFE)} ORDER BY log_offset", settings.storm_epochs - 1
    later, before = f"lead(timestamp, {span}) OVER ({order})", f"lag(timestamp) OVER ({order})"
    opens = f"unix_millis({later}) - unix_millis(timestamp) <= {settings.storm_window_ms}"
    begins = f"unix_millis(timestamp) - unix_millis({before}) > {settings.storm_window_ms}"
    is_storm = f"max(coalesce({opens}, false)) OVER ({order} ROWS BETWEEN {span} PRECEDING AND CURRENT ROW) AS is_storm"
    rows = epochs.where(_IS_EPOCH).selectExpr("*", is_storm).where("is_storm")
    rows = rows.selectExpr("*", f"sum(int(coalesce({begins}, false))) OVER ({order}) AS storm")
    by_reason = rows.groupBy(*_LIFE, "storm", "reason").agg(
        F.min("timestamp").alias("begin"),
        F.max("timestamp").alias("end"),
        F.min("epoch").alias("first"),
        F.max("epoch").alias("last"),
        F.count("*").alias("count"),
    )
    storms = by_reason.groupBy(*_LIFE, "storm").agg(
        F.min("begin").alias("from_timestamp"),
        F.max("end").alias("to_timestamp"),
        F.sum("count").alias("epochs"),
        F.min("first").alias("first_epoch"),
        F.max("last").alias("last_epoch"),
        F.expr(_REASONS),
    )
    duration_ms = "unix_millis(to_timestamp) - unix_millis(from_timestamp)"
    return TABLES["storms"].conform(storms.where("size(reasons) > 0"), duration_ms=duration_ms)


def build_convergence(epochs: DataFrame, records: DataFrame) -> DataFrame:
    """Measures the time from the record of an epoch until every member is stable in it.

    `records` are group records with their incarnation. Records of type 8 show each step of a KIP-848 member. Classic
    groups write no such records.
    """
    epoch = ["group", "incarnation", "epoch"]
    rows = epochs.where(f"{_IS_EPOCH} AND kind = 'consumer'").selectExpr(
        *(*epoch, "timestamp", "members"),
        "lead(log_offset) OVER (PARTITION BY group, incarnation ORDER BY log_offset) AS next_offset",
    )
    targets = epochs.where("kind = 'target' AND NOT is_tombstone").groupBy(*epoch)
    rows = rows.join(targets.agg(F.min("timestamp").alias("target_timestamp")), epoch, "left")
    steps = records.where("record_type = 8 AND current_assignment.state = 'stable'").selectExpr(
        *("group", "incarnation", "member_id"),
        "current_assignment.member_epoch AS epoch",
        "timestamp AS reached_timestamp",
        "log_offset AS reached_offset",
    )
    reached = rows.join(steps, epoch, "left").where(
        "reached_offset IS NULL OR next_offset IS NULL OR reached_offset < next_offset"
    )
    reached = reached.groupBy(*epoch).agg(
        F.count_distinct("member_id").alias("reached"), F.max("reached_timestamp").alias("last")
    )
    is_converged = "coalesce(reached, 0) >= members"
    took = "if(members = 0, 0, greatest(unix_millis(last) - unix_millis(timestamp), 0))"
    target = "greatest(unix_millis(target_timestamp) - unix_millis(timestamp), 0)"
    return TABLES["convergence"].conform(
        rows.join(reached, epoch, "left"),
        target_ms=f"if(target_timestamp IS NULL, NULL, {target})",
        members_reached="coalesce(reached, 0)",
        is_converged=is_converged,
        convergence_ms=f"if({is_converged}, {took}, NULL)",
    )


def build_churn(members: DataFrame, epochs: DataFrame) -> DataFrame:
    key = ["group", "incarnation", "kind", "member_id"]
    order = f"PARTITION BY {', '.join(key)} ORDER BY from_offset"
    # A visit has all versions of a member from its join to its leave.
    begins = f"coalesce(lag(to_offset) OVER ({order}) != from_offset, true)"
    visits = members.selectExpr("*", f"sum(int({begins})) OVER ({order}) AS visit")
    visits = visits.groupBy(*key, "visit").agg(
        F.min("from_timestamp").alias("came"), F.max_by("to_timestamp", "from_offset").alias("went")
    )
    joins = visits.groupBy("group", F.date_trunc("hour", "came").alias("hour")).agg(F.count("*").alias("joins"))
    gone = visits.where("went IS NOT NULL")
    lifetime = F.avg(F.unix_millis("went") - F.unix_millis("came"))
    leaves = gone.groupBy("group", F.date_trunc("hour", "went").alias("hour")).agg(
        F.count("*").alias("leaves"), lifetime.alias("mean_lifetime_ms")
    )
    hour = F.date_trunc("hour", "timestamp").alias("hour")
    counted = epochs.where(_IS_EPOCH).groupBy("group", hour, "reason").agg(F.count("*").alias("count"))
    counted = counted.groupBy("group", "hour").agg(F.sum("count").alias("epochs"), F.expr(_REASONS))
    counted = counted.where("size(reasons) > 0")
    rows = joins.join(leaves, ["group", "hour"], "outer").join(counted, ["group", "hour"], "outer")
    return TABLES["churn"].conform(rows, **{name: f"coalesce({name}, 0)" for name in ("joins", "leaves", "epochs")})
