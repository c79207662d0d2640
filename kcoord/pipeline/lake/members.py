# SPDX-License-Identifier: Apache-2.0
"""silver.members, silver.assignments and silver.regexes, from the group records of some log partitions.

Each member of a KIP-848 group has records of its own. The members of a classic group change together, with the next
generation.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.spells import next_columns, spells
from kcoord.pipeline.lake.tables import TABLES

CLASSIC_GROUP: Final = 2
GROUP_EPOCH: Final = 3
MEMBER: Final = 5
TARGET_EPOCH: Final = 6
TARGET_ASSIGNMENT: Final = 7
CURRENT_ASSIGNMENT: Final = 8
REGULAR_EXPRESSION: Final = 16
STREAMS_GROUP: Final = 17

_PLACE: Final = ("log_partition", "group", "incarnation")
_STATE: Final = (*_PLACE, "n", "timestamp", "log_offset", "next_timestamp", "next_offset")
_SAID: Final = (
    "instance_id",
    "rack_id",
    "client_id",
    "client_host",
    "subscribed_topics",
    "subscribed_regex",
    "server_assignor",
)
_BY_CLASSIC: Final = ("instance_id", "client_id", "client_host", "subscribed_topics")


def build_members(records: DataFrame) -> DataFrame:
    own = _states(records, f"record_type = {MEMBER}", ["group", "member_id"], "member_id", "member")
    own = own.where("NOT is_tombstone").selectExpr(
        *_STATE, "'consumer' AS kind", "member_id", *(f"member.{name}" for name in _SAID)
    )
    classic = _classic_members(records).selectExpr(
        *_STATE, "'classic' AS kind", "member.member_id", *(f"member.{name}" for name in _BY_CLASSIC)
    )
    states = own.unionByName(classic, allowMissingColumns=True)
    return TABLES["members"].conform(spells(states, [*_PLACE, "kind", "member_id", *_SAID]))


def build_assignments(records: DataFrame, topic_names: DataFrame) -> DataFrame:
    """Makes the table. `topic_names` has `topic_id` and `topic` of the topics whose names are known."""
    states = _member_states(records).unionByName(_classic_states(records))
    exploded = states.selectExpr(
        *_STATE,
        *("kind", "member_id", "is_revoking", "epoch"),
        "inline(partitions) AS (topic, topic_id, partition, partition_epoch)",
    )
    key = [*_PLACE, "kind", "member_id", "topic", "topic_id", "partition", "is_revoking"]
    owned = spells(exploded, key, first=["epoch"])
    names = topic_names.select("topic_id", F.col("topic").alias("known_topic"))
    named = owned.join(F.broadcast(names), "topic_id", "left")
    return TABLES["assignments"].conform(named, topic="coalesce(topic, known_topic)")


def build_regexes(records: DataFrame) -> DataFrame:
    rows = records.where(f"record_type = {REGULAR_EXPRESSION}")
    # A tombstone has the expression in its key only.
    newest = rows.groupBy("log_partition", "group", "key").agg(
        F.max_by(F.struct("is_tombstone", "regular_expression"), "log_offset").alias("newest")
    )
    values = {name: f"newest.regular_expression.{name}" for name in ("regex", "topics", "resolved_timestamp")}
    return TABLES["regexes"].conform(newest.where("NOT newest.is_tombstone"), **values)


def _states(records: DataFrame, types: str, sequence: list[str], *columns: str) -> DataFrame:
    """Returns the records of some types as states of their sequence, with the columns."""
    place = (*_PLACE, "timestamp", "log_offset", "is_tombstone")
    return records.where(types).selectExpr(*place, *next_columns(*sequence), *columns)


def _classic_members(records: DataFrame) -> DataFrame:
    """Returns the members of classic groups in each generation."""
    generations = _states(records, f"record_type = {CLASSIC_GROUP}", ["group"], "classic_group")
    return generations.where("NOT is_tombstone").selectExpr(
        *_STATE, "classic_group.generation AS epoch", "explode(classic_group.members) AS member"
    )


def _member_states(records: DataFrame) -> DataFrame:
    """Returns the target assignments of the members of KIP-848 groups, and both parts of their current ones."""
    types = f"record_type IN ({TARGET_ASSIGNMENT}, {CURRENT_ASSIGNMENT})"
    columns = "member_id", "target_assignment", "current_assignment"
    rows = _states(records, types, ["record_type", "group", "member_id"], *columns)
    # The value of the other type is null, and `build_assignments` makes no rows from it.
    states = """stack(
        3,
        'target', false, CAST(null AS int), target_assignment,
        'current', false, current_assignment.member_epoch, current_assignment.assigned,
        'current', true, current_assignment.member_epoch, current_assignment.pending_revocation
    ) AS (kind, is_revoking, epoch, partitions)"""
    return rows.selectExpr(*_STATE, "member_id", states)


def _classic_states(records: DataFrame) -> DataFrame:
    return _classic_members(records).selectExpr(
        *_STATE,
        "'classic' AS kind",
        "member.member_id",
        "false AS is_revoking",
        "epoch",
        "member.assigned AS partitions",
    )
