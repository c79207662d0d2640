# SPDX-License-Identifier: Apache-2.0
"""gold.storms, gold.convergence and gold.churn.

They show how often groups rebalance, how long rebalances take, and which members join and leave.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.frames import with_zeros
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.tables import TABLES

_LIFE = ("group", "incarnation", "kind")


def build_storms(epochs: DataFrame, settings: LakeSettings) -> DataFrame:
    """Finds storms: at least `storm_epochs` epochs within `storm_window_ms`, and the epochs that follow as closely."""
    order = Window.partitionBy(*_LIFE).orderBy("log_offset")
    span = settings.storm_epochs - 1
    moment = F.unix_millis("timestamp")
    opens = F.lead(moment, span).over(order) - moment <= settings.storm_window_ms
    rows = _epochs(epochs).withColumn("opens", F.coalesce(opens, F.lit(False)))
    rows = rows.withColumn("is_storm", F.max("opens").over(order.rowsBetween(-span, 0))).where("is_storm")
    gap = moment - F.lag(moment).over(order) > settings.storm_window_ms
    rows = rows.withColumn("storm", F.sum(F.coalesce(gap.cast("int"), F.lit(0))).over(order))
    storms = rows.groupBy(*_LIFE, "storm").agg(
        F.min("timestamp").alias("from_timestamp"),
        F.max("timestamp").alias("to_timestamp"),
        F.count("*").alias("epochs"),
        F.min("epoch").alias("first_epoch"),
        F.max("epoch").alias("last_epoch"),
    )
    counted = _reasons(rows, [*_LIFE, "storm"])
    storms = storms.join(counted, [*_LIFE, "storm"])
    duration = F.unix_millis("to_timestamp") - F.unix_millis("from_timestamp")
    return TABLES["storms"].conform(storms.withColumn("duration_ms", duration))


def build_convergence(epochs: DataFrame, records: DataFrame) -> DataFrame:
    """Measures the time from the record of an epoch until every member is stable in it.

    `records` are group records with their incarnation. Records of type 8 show each step of a KIP-848 member. Classic
    groups write no such records.
    """
    life = ["group", "incarnation"]
    rows = _epochs(epochs).where("`kind` = 'consumer'")
    order = Window.partitionBy(*life).orderBy("log_offset")
    rows = rows.withColumn("next_offset", F.lead("log_offset").over(order))
    targets = epochs.where("`kind` = 'target' AND NOT is_tombstone").groupBy(*life, "epoch")
    rows = rows.join(targets.agg(F.min("timestamp").alias("target_timestamp")), [*life, "epoch"], "left")
    steps = records.where("record_type = 8 AND current_assignment.state = 'stable'").select(
        *life,
        "member_id",
        F.col("current_assignment.member_epoch").alias("epoch"),
        F.col("timestamp").alias("reached_timestamp"),
        F.col("log_offset").alias("reached_offset"),
    )
    reached = rows.join(steps, [*life, "epoch"], "left").where(
        "reached_offset IS NULL OR next_offset IS NULL OR reached_offset < next_offset"
    )
    reached = reached.groupBy(*life, "epoch").agg(
        F.count_distinct("member_id").cast("int").alias("members_reached"), F.max("reached_timestamp").alias("last")
    )
    rows = with_zeros(rows.join(reached, [*life, "epoch"], "left"), "members_reached")
    is_converged = F.col("members_reached") >= F.col("members")
    began = F.unix_millis("timestamp")
    took = F.when(F.col("members") == 0, 0).otherwise(F.greatest(F.unix_millis("last") - began, F.lit(0)))
    target = F.greatest(F.unix_millis("target_timestamp") - began, F.lit(0))
    return TABLES["convergence"].conform(
        rows.withColumns(
            {
                "target_ms": F.when(F.col("target_timestamp").isNotNull(), target),
                "is_converged": is_converged,
                "convergence_ms": F.when(is_converged, took),
            }
        )
    )


def build_churn(members: DataFrame, epochs: DataFrame) -> DataFrame:
    key = ["group", "incarnation", "kind", "member_id"]
    order = Window.partitionBy(*key).orderBy("from_offset")
    until = F.lag("to_offset").over(order)
    # A visit has all versions of a member from its join to its leave.
    visits = members.withColumn("begins", (until.isNull() | (until != F.col("from_offset"))).cast("int"))
    visits = visits.withColumn("visit", F.sum("begins").over(order))
    visits = visits.groupBy(*key, "visit").agg(
        F.min("from_timestamp").alias("came"), F.max_by("to_timestamp", "from_offset").alias("went")
    )
    joins = visits.groupBy("group", F.date_trunc("hour", "came").alias("hour")).agg(F.count("*").alias("joins"))
    gone = visits.where("went IS NOT NULL")
    lifetime = F.avg(F.unix_millis("went") - F.unix_millis("came"))
    leaves = gone.groupBy("group", F.date_trunc("hour", "went").alias("hour")).agg(
        F.count("*").alias("leaves"), lifetime.alias("mean_lifetime_ms")
    )
    hourly = _epochs(epochs).withColumn("hour", F.date_trunc("hour", "timestamp"))
    counted = hourly.groupBy("group", "hour").agg(F.count("*").alias("epochs"))
    counted = counted.join(_reasons(hourly, ["group", "hour"]), ["group", "hour"])
    rows = joins.join(leaves, ["group", "hour"], "outer").join(counted, ["group", "hour"], "outer")
    return TABLES["churn"].conform(with_zeros(rows, "joins", "leaves", "epochs"))


def _epochs(epochs: DataFrame) -> DataFrame:
    return epochs.where("`kind` != 'target' AND NOT is_tombstone")


def _reasons(rows: DataFrame, key: list[str]) -> DataFrame:
    """Returns `reasons` of each key: the number of rows by reason."""
    counts = rows.groupBy(*key, "reason").agg(F.count("*").alias("count")).where("reason IS NOT NULL")
    pairs = F.sort_array(F.collect_list(F.struct("reason", "count")))
    return counts.groupBy(*key).agg(F.map_from_entries(pairs).alias("reasons"))
