# SPDX-License-Identifier: Apache-2.0
"""gold.losses: committed offsets that were removed, reset or set back, and by whom.

A tombstone of kcoord has the principal in its header. The audit log has more: the client and its address, the requests
that set offsets, and the deletions of topics. A request belongs to a change of the log if it is about the same place,
and if the record of the change was written within `_NEAR_MS` of it; the nearest one counts. The marker of a transaction
may come much later than its records.

Kafka removes all offsets of a classic group that has been empty for the retention, with the group. A `group-delete`
that was inferred is `expired` here if the group had been empty for so long.

If a topic is deleted, each group that used it loses its offsets in the same second. So an `offset-delete` that was
inferred is a `topic-delete` here if another group lost offsets of the topic in that second.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.tables import TABLES

_NEAR_MS: Final = 10_000
_PLACE: Final = ("log_partition", "log_offset")
_WHO: Final = ("principal", "host", "client_id", "request", "request_timestamp")
_ORDER: Final = f"PARTITION BY {', '.join(KEY)} ORDER BY effective_offset, log_offset"
_IS_OLD: Final = "reason_source = 'inferred' AND reason = 'group-delete' AND empty_ms >= {retention_ms}"
_IS_GUESS: Final = "reason_source = 'inferred' AND reason = 'offset-delete'"
_REASON: Final = f"""CASE
    WHEN {_IS_OLD} THEN 'expired'
    WHEN {_IS_GUESS} AND size(collect_set(if(is_tombstone AND {_IS_GUESS}, group, NULL)) OVER (
        PARTITION BY topic, date_trunc('second', timestamp)
    )) > 1 THEN 'topic-delete'
    ELSE reason
END"""
"""The reason of a tombstone."""


def build(commits: DataFrame, changes: DataFrame, epochs: DataFrame, settings: LakeSettings) -> DataFrame:
    rows = commits.selectExpr(
        *(*_PLACE, *KEY, "incarnation", "effective_timestamp AS timestamp", "committed_offset", "is_tombstone"),
        *("reason", "reason_source", "tombstone_principal", "timestamp AS written"),
        f"last(committed_offset, true) OVER ({_ORDER} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS lost_offset",
        f"NOT lag(is_tombstone) OVER ({_ORDER}) AS was_there",
        "coalesce(was_there AND committed_offset < lost_offset, false) AS is_rewind",
    )
    rows = rows.join(F.broadcast(_requests_of(rows, changes)), list(_PLACE), "left")
    rows = rows.join(_emptied(epochs), ["group", "incarnation"], "left")
    rows = rows.withColumn("empty_ms", F.unix_millis("timestamp") - F.unix_millis("empty_since"))
    reason = _REASON.format(retention_ms=settings.retention_ms)
    return TABLES["losses"].conform(
        rows.where("is_tombstone OR is_rewind OR asked.action IS NOT NULL"),
        action=f"if(is_tombstone, {reason}, coalesce(asked.action, 'rewind'))",
        new_offset="committed_offset",
        records="committed_offset - lost_offset",
        reason_source="""CASE
            WHEN is_tombstone AND reason_source = 'recorded' THEN 'recorded'
            WHEN asked.action IS NOT NULL THEN 'audit'
            ELSE 'inferred'
        END""",
        principal="coalesce(tombstone_principal, asked.principal)",
        **{name: f"asked.{name}" for name in _WHO if name != "principal"},
    )


def _emptied(epochs: DataFrame) -> DataFrame:
    """Returns `empty_since` of the classic groups whose last generation has no members."""
    states = epochs.where("kind != 'target' AND NOT is_tombstone").groupBy("group", "incarnation")
    last = states.agg(F.max_by(F.struct("kind", "protocol_type", "empty_since"), "log_offset").alias("last"))
    is_empty = "last.kind = 'classic' AND last.protocol_type != '' AND last.empty_since IS NOT NULL"
    return last.where(is_empty).select("group", "incarnation", "last.empty_since")


def _requests_of(rows: DataFrame, changes: DataFrame) -> DataFrame:
    """Returns the place of each row that a request explains, and `asked`: its action and who sent it."""
    requests = changes.where("error IS NULL").select(
        "action", *KEY, "committed_offset", F.col("timestamp").alias("request_timestamp"), *_WHO[:-1]
    )
    rows = rows.select(*_PLACE, "written", *KEY, "committed_offset", "is_tombstone", "reason")
    removed = rows.where("is_tombstone AND reason != 'expired'")
    matches = [
        _match(removed, requests, "group-delete", ["group"]),
        _match(removed, requests, "topic-delete", ["topic"]),
        _match(removed, requests, "offset-delete", [*KEY]),
        _match(rows.where("NOT is_tombstone"), requests, "reset", [*KEY, "committed_offset"]),
    ]
    distance_ms = "abs(unix_millis(written) - unix_millis(request_timestamp))"
    nearest = F.expr(f"min_by(struct(action, {', '.join(_WHO)}), {distance_ms}) AS asked")
    near = reduce(DataFrame.unionByName, matches).where(f"{distance_ms} <= {_NEAR_MS}")
    return near.groupBy(*_PLACE).agg(nearest)


def _match(rows: DataFrame, requests: DataFrame, action: str, key: list[str]) -> DataFrame:
    """Returns the rows and the requests with the same key."""
    requests = requests.where(f"action = '{action}'").select("action", *_WHO, *key)
    return rows.join(F.broadcast(requests), key)
