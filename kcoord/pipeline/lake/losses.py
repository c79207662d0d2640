# SPDX-License-Identifier: Apache-2.0
"""gold.losses: committed offsets that were removed, reset or set back, and by whom.

A tombstone of kcoord has the principal in its header. The audit log has more: the client and its address, the requests
that set offsets, and the deletions of topics. A request belongs to a change of the log if it is about the same place,
and if the change came within `_NEAR_MS` of it; the nearest one counts.

If a topic is deleted, each group that used it loses its offsets in the same second. So an `offset-delete` that was
inferred is a `topic-delete` here if another group lost offsets of the topic in that second.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.tables import TABLES

_NEAR_MS: Final = 10_000
_PLACE: Final = ("log_partition", "log_offset")
_WHO: Final = ("principal", "host", "client_id", "request", "request_timestamp")


def build(commits: DataFrame, changes: DataFrame) -> DataFrame:
    rows = _with_lost_offsets(commits)
    asked = _requests_of(rows, changes)
    rows = rows.join(F.broadcast(asked), list(_PLACE), "left").select("*", "asked.*")
    is_reset = F.col("action").isNotNull() & ~F.col("is_tombstone")
    source = F.when(F.col("is_tombstone") & (F.col("reason_source") == "recorded"), "recorded")
    source = source.when(F.col("action").isNotNull(), "audit").otherwise("inferred")
    rows = rows.where(F.col("is_tombstone") | F.col("is_rewind") | is_reset).withColumns(
        {
            "action": F.when(F.col("is_tombstone"), _reason()).otherwise(F.coalesce("action", F.lit("rewind"))),
            "reason_source": source,
            "records": F.col("new_offset") - F.col("lost_offset"),
            "principal": F.coalesce("tombstone_principal", "principal"),
        }
    )
    return TABLES["losses"].conform(rows)


def _reason() -> Column:
    """Returns the reason of a tombstone."""
    is_guess = (F.col("reason_source") == "inferred") & (F.col("reason") == "offset-delete")
    together = Window.partitionBy("topic", F.date_trunc("second", "timestamp"))
    groups = F.size(F.collect_set(F.when(F.col("is_tombstone") & is_guess, F.col("group"))).over(together))
    return F.when(is_guess & (groups > 1), "topic-delete").otherwise(F.col("reason"))


def _with_lost_offsets(commits: DataFrame) -> DataFrame:
    """Adds `lost_offset`, which was committed before each row, `new_offset`, and `is_rewind`."""
    order = Window.partitionBy(*KEY).orderBy("effective_offset", "log_offset")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    rows = commits.withColumns(
        {
            "timestamp": F.col("effective_timestamp"),
            "new_offset": F.col("committed_offset"),
            "lost_offset": F.last("committed_offset", ignorenulls=True).over(before),
            "was_there": ~F.lag("is_tombstone").over(order),
        }
    )
    is_rewind = F.col("was_there") & (F.col("new_offset") < F.col("lost_offset"))
    return rows.withColumn("is_rewind", F.coalesce(is_rewind, F.lit(False)))


def _requests_of(rows: DataFrame, changes: DataFrame) -> DataFrame:
    """Returns the place of each row that a request explains, and `asked`: its action and who sent it."""
    requests = changes.where("error IS NULL").select(
        "action", *KEY, "committed_offset", F.col("timestamp").alias("request_timestamp"), *_WHO[:-1]
    )
    removed = rows.where("is_tombstone AND reason != 'expired'")
    matches = [
        _match(removed, requests.where("action = 'group-delete'"), ["group"]),
        _match(removed, requests.where("action = 'topic-delete'"), ["topic"]),
        _match(removed, requests.where("action = 'offset-delete'"), [*KEY]),
        _match(rows.where("NOT is_tombstone"), requests.where("action = 'reset'"), [*KEY, "committed_offset"]),
    ]
    nearest = F.min_by(F.struct("action", *_WHO), "distance_ms").alias("asked")
    return reduce(DataFrame.unionByName, matches).groupBy(*_PLACE).agg(nearest)


def _match(rows: DataFrame, requests: DataFrame, key: list[str]) -> DataFrame:
    """Returns the places of the rows and the requests with the same key that came at about their time."""
    distance_ms = F.abs(F.unix_millis("timestamp") - F.unix_millis("request_timestamp"))
    matches = rows.select(*_PLACE, "timestamp", *key).join(F.broadcast(requests.select("action", *_WHO, *key)), key)
    matches = matches.withColumn("distance_ms", distance_ms).where(F.col("distance_ms") <= _NEAR_MS)
    return matches.select(*_PLACE, "action", *_WHO, "distance_ms")
