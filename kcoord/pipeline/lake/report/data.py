# SPDX-License-Identifier: Apache-2.0
"""Collects the data of the page. Spark aggregates and limits it, so it is small for a lake of any size."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import pandas as pd
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.groups import group_states
from kcoord.pipeline.lake.storage import Lake

MAX_HEAT_ROWS: Final = 30
MAX_HEAT_COLUMNS: Final = 160
MAX_GROUPS: Final = 30
MAX_EPOCHS: Final = 4000
MAX_SPELLS: Final = 4000
MAX_ROWS: Final = 500
_DAY_MS: Final = 24 * 3600 * 1000
_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data of the page, as pandas frames. Times are UTC. Ages are relative to `now`.

    A frame that is limited has columns `all_...`. They count the rows before the limit, and are alike in all rows.
    """

    now: datetime
    first: datetime | None
    records: int
    groups: pd.DataFrame
    status: pd.DataFrame
    lag: pd.DataFrame
    epochs: pd.DataFrame
    storms: pd.DataFrame
    convergence: pd.DataFrame
    spells: pd.DataFrame
    expiry: pd.DataFrame
    hot: pd.DataFrame
    churn: pd.DataFrame
    audit: pd.DataFrame
    orphans: pd.DataFrame
    losses: pd.DataFrame
    denials: pd.DataFrame


def collect(lake: Lake, now: datetime) -> ReportData:
    """Reads the tables of the lake, which must be up to date. Two queries run at a time, since they are small."""
    note = lake.note("records")
    with ThreadPoolExecutor(_THREADS) as threads:
        first = threads.submit(_first, lake)
        frames = dict(zip(_QUERIES, threads.map(lambda query: query(lake).toPandas(), _QUERIES.values()), strict=True))
    records = 0 if note is None else note.progress.get("rows", 0)
    return ReportData(now=now, first=first.result(), records=records, **frames)


def _first(lake: Lake) -> datetime | None:
    oldest_ms = lake.read("commits").agg(F.min(F.unix_millis("timestamp"))).collect()[0][0]
    return None if oldest_ms is None else datetime.fromtimestamp(int(oldest_ms) / 1000, UTC)


def _over_all(aggregate: Column) -> Column:
    """Returns the aggregate of all rows of a query, before its limit."""
    return aggregate.over(Window.partitionBy(F.lit(0)))


def _counted(frame: DataFrame) -> DataFrame:
    return frame.withColumn("all_rows", _over_all(F.count("*")))


def _groups(lake: Lake) -> DataFrame:
    """Returns the groups that have members or offsets, with worst status and lag. The worst groups come first."""
    states = group_states(lake.read("group_epochs"), lake.read("members"))
    offsets = (
        lake.read("current_offsets")
        .groupBy("group")
        .agg(F.count("*").alias("partitions"), F.max("commit_timestamp").alias("last_commit"))
    )
    verdicts = (
        lake.read("status")
        .groupBy("group")
        .agg(F.first("group_status").alias("group_status"), F.sum("lag").alias("lag"))
    )
    named = states.select("group", "kind", "state", "epoch", "members", "protocol", "incarnation")
    groups = _counted(named.join(offsets, "group", "outer").join(verdicts, "group", "left")).withColumns(
        {
            "all_members": _over_all(F.sum("members")),
            "all_errors": _over_all(F.count_if(F.col("group_status") == "ERR")),
            "all_lag": _over_all(F.sum("lag")),
        }
    )
    severity = F.expr("array_position(array('OK', 'WARN', 'ERR'), group_status)")
    return groups.orderBy(severity.desc_nulls_last(), F.col("lag").desc_nulls_last(), "group").limit(MAX_ROWS)


def _status(lake: Lake) -> DataFrame:
    severity = F.expr("array_position(array('OK', 'WARN', 'STALL', 'STOP', 'REWIND'), status)")
    ranked = lake.read("status").orderBy(severity.desc(), F.col("lag").desc_nulls_last(), "group", "topic", "partition")
    return ranked.limit(4 * MAX_ROWS)


def _lag(lake: Lake) -> DataFrame:
    """Returns the partitions with the largest lag. Time is cut into MAX_HEAT_COLUMNS pieces; each has its worst lag."""
    lag = lake.read("lag")
    key = ["group", "topic", "partition"]
    worst = lag.groupBy(*key).agg(F.max("lag").alias("worst")).orderBy(F.col("worst").desc(), *key).limit(MAX_HEAT_ROWS)
    span = lag.agg(F.min(F.unix_millis("timestamp")).alias("begin"), F.max(F.unix_millis("timestamp")).alias("end"))
    rows = lag.join(F.broadcast(worst), key).crossJoin(F.broadcast(span))
    width = F.greatest((F.col("end") - F.col("begin")) / MAX_HEAT_COLUMNS, F.lit(1.0))
    piece = F.floor((F.unix_millis("timestamp") - F.col("begin")) / width)
    return rows.groupBy(*key, piece.alias("piece")).agg(
        F.min("timestamp").alias("timestamp"), F.max("lag").alias("lag"), F.max("seconds_behind").alias("seconds")
    )


def _epochs(lake: Lake) -> DataFrame:
    epochs = lake.read("group_epochs")
    rows = epochs.where("`kind` NOT IN ('target', 'streams')")
    busiest = rows.groupBy("group").agg(F.count("*").alias("count")).orderBy(F.col("count").desc(), "group")
    rows = rows.join(F.broadcast(busiest.limit(MAX_GROUPS)), "group")
    kept = rows.orderBy(F.col("timestamp").desc()).limit(MAX_EPOCHS)
    return kept.select("group", "incarnation", "kind", "epoch", "timestamp", "reason", "members", "is_tombstone")


def _convergence(lake: Lake) -> DataFrame:
    """Summarizes epochs with members only, since an empty group converges at once."""
    convergence = lake.read("convergence")
    took = F.col("convergence_ms")
    return (
        convergence.where("members > 0")
        .groupBy("group")
        .agg(
            F.count("*").alias("epochs"),
            F.count_if("is_converged").alias("converged"),
            F.percentile(took, F.lit(0.5)).alias("p50_ms"),
            F.max(took).alias("max_ms"),
        )
    )


def _spells(lake: Lake) -> DataFrame:
    assignments = lake.read("assignments")
    rows = assignments.where("`kind` != 'target'")
    busiest = rows.groupBy("group").agg(F.count("*").alias("count")).orderBy(F.col("count").desc(), "group")
    rows = rows.join(F.broadcast(busiest.limit(MAX_GROUPS)), "group")
    order = Window.partitionBy("group").orderBy(F.col("from_timestamp").desc())
    rows = rows.withColumn("age", F.row_number().over(order)).where(F.col("age") <= MAX_SPELLS // 8)
    columns = ["member_id", "topic", "topic_id", "partition", "is_revoking", "from_timestamp", "to_timestamp"]
    return rows.select("group", *columns).orderBy("from_timestamp").limit(MAX_SPELLS)


def _expiry(lake: Lake) -> DataFrame:
    """Returns what expires, the earliest first."""
    expiry = lake.read("expiry").where("expires_at IS NOT NULL")
    is_due = F.col("expires_in_ms") <= _DAY_MS
    return (
        expiry.groupBy("group", "basis", "expires_at")
        .agg(F.count("*").alias("offsets"), F.min("expires_in_ms").alias("expires_in_ms"))
        .withColumn("all_due", _over_all(F.sum(F.when(is_due, F.col("offsets")).otherwise(0))))
        .orderBy("expires_at", "group")
        .limit(4 * MAX_ROWS)
    )


def _hot(lake: Lake) -> DataFrame:
    hot = lake.read("hot_groups")
    totals = hot.groupBy("group").agg(F.sum("commits").alias("all_commits"))
    top = totals.orderBy(F.col("all_commits").desc(), "group").limit(MAX_GROUPS // 2)
    return hot.join(F.broadcast(top), "group").orderBy("group", "hour")


def _churn(lake: Lake) -> DataFrame:
    churn = lake.read("churn")
    return churn.groupBy("group").agg(
        F.sum("joins").alias("joins"),
        F.sum("leaves").alias("leaves"),
        F.sum("epochs").alias("epochs"),
        F.avg("mean_lifetime_ms").alias("mean_lifetime_ms"),
    )


def _audit(lake: Lake) -> DataFrame:
    is_loss = F.col("verdict").isin("skipped", "at-risk")
    audit = _counted(lake.read("audit_1327")).withColumn(
        "all_lost", _over_all(F.sum(F.when(is_loss, F.col("records")).otherwise(0)))
    )
    return audit.orderBy(F.col("records").desc(), "group", "topic", "partition").limit(MAX_ROWS)


def _orphans(lake: Lake) -> DataFrame:
    return _counted(lake.read("orphans")).orderBy("group", "topic", "partition").limit(MAX_ROWS)


def _losses(lake: Lake) -> DataFrame:
    """Returns the newest losses. What one request or one moment did to a topic of a group is one row."""
    who = ["principal", "host", "client_id", "request", "reason_source"]
    second = F.date_trunc("second", "timestamp").alias("timestamp")
    grouped = lake.read("losses").groupBy("group", "topic", "action", second, *who)
    sums = F.count("*").alias("partitions"), F.sum("records").alias("records"), F.sum("lost_offset").alias("lost")
    return _counted(grouped.agg(*sums)).orderBy(F.col("timestamp").desc(), "group", "topic").limit(MAX_ROWS)


def _denials(lake: Lake) -> DataFrame:
    """Returns who was denied what, most often first."""
    what = ["principal", "request", "operation", "resource_type", "resource"]
    grouped = lake.read("denials").groupBy(*what)
    times = F.count("*").alias("times"), F.max("timestamp").alias("timestamp"), F.max("host").alias("host")
    return _counted(grouped.agg(*times)).orderBy(F.col("times").desc(), *what).limit(MAX_ROWS)


def _storms(lake: Lake) -> DataFrame:
    return _counted(lake.read("storms")).orderBy(F.col("epochs").desc()).limit(MAX_ROWS)


_QUERIES: Final[dict[str, Callable[[Lake], DataFrame]]] = {
    "groups": _groups,
    "status": _status,
    "lag": _lag,
    "epochs": _epochs,
    "storms": _storms,
    "convergence": _convergence,
    "spells": _spells,
    "expiry": _expiry,
    "hot": _hot,
    "churn": _churn,
    "audit": _audit,
    "orphans": _orphans,
    "losses": _losses,
    "denials": _denials,
}
