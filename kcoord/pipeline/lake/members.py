# SPDX-License-Identifier: Apache-2.0
"""silver.members, silver.assignments and silver.regexes, from the group records of some log partitions.

Each member of a KIP-848 group has records of its own. The members of a classic group change together, with the next
generation.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.spells import spells, with_next
from kcoord.pipeline.lake.tables import TABLES

CLASSIC_GROUP: Final = 2
GROUP_EPOCH: Final = 3
MEMBER: Final = 5
TARGET_EPOCH: Final = 6
TARGET_ASSIGNMENT: Final = 7
CURRENT_ASSIGNMENT: Final = 8
REGULAR_EXPRESSION: Final = 16
STREAMS_GROUP: Final = 17

_SAID = ("instance_id", "rack_id", "client_id", "client_host", "subscribed_topics", "subscribed_regex")
_PLACE = ("log_partition", "group", "incarnation")


def build_members(records: DataFrame) -> DataFrame:
    said = [*_SAID, "server_assignor"]
    own = with_next(records.where(f"record_type = {MEMBER}"), ["group", "member_id"]).where("NOT is_tombstone")
    own = own.select(*_state(), F.lit("consumer").alias("kind"), "member_id", *(f"member.{name}" for name in said))
    classic = _classic_members(records).select(
        *_state(),
        F.lit("classic").alias("kind"),
        "classic_member.member_id",
        "classic_member.instance_id",
        F.lit(None).cast("string").alias("rack_id"),
        "classic_member.client_id",
        "classic_member.client_host",
        "classic_member.subscribed_topics",
        F.lit(None).cast("string").alias("subscribed_regex"),
        F.lit(None).cast("string").alias("server_assignor"),
    )
    return TABLES["members"].conform(spells(own.unionByName(classic), [*_PLACE, "kind", "member_id", *said]))


def build_assignments(records: DataFrame, topic_names: DataFrame) -> DataFrame:
    """Makes the table. `topic_names` has `topic_id` and `topic` of the topics whose names are known."""
    states = _member_states(records).unionByName(_classic_states(records))
    exploded = states.select(
        *_state(), "kind", "member_id", "is_revoking", "epoch", F.explode("partitions").alias("place")
    ).select("*", "place.topic", "place.topic_id", "place.partition")
    key = [*_PLACE, "kind", "member_id", "topic", "topic_id", "partition", "is_revoking"]
    owned = spells(exploded, key, first=["epoch"])
    names = topic_names.select("topic_id", F.col("topic").alias("known_topic"))
    named = owned.join(F.broadcast(names), "topic_id", "left")
    return TABLES["assignments"].conform(named.withColumn("topic", F.coalesce("topic", "known_topic")))


def build_regexes(records: DataFrame) -> DataFrame:
    rows = records.where(f"record_type = {REGULAR_EXPRESSION}").select(
        "log_partition", "group", "key", "log_offset", "is_tombstone", "regular_expression.*"
    )
    # A tombstone has the expression in its key only.
    newest = rows.groupBy("log_partition", "group", "key").agg(
        F.max_by(F.struct("is_tombstone", "regex", "topics", "resolved_timestamp"), "log_offset").alias("newest")
    )
    return TABLES["regexes"].conform(newest.where("NOT newest.is_tombstone").select("*", "newest.*"))


def _state() -> tuple[str, ...]:
    return (*_PLACE, "n", "timestamp", "log_offset", "next_timestamp", "next_offset")


def _classic_members(records: DataFrame) -> DataFrame:
    generations = with_next(records.where(f"record_type = {CLASSIC_GROUP}"), ["group"]).where("NOT is_tombstone")
    return generations.select("*", F.explode("classic_group.members").alias("classic_member"))


def _member_states(records: DataFrame) -> DataFrame:
    """Returns the target assignments of the members of KIP-848 groups, and both parts of their current ones."""
    types = f"record_type IN ({TARGET_ASSIGNMENT}, {CURRENT_ASSIGNMENT})"
    rows = with_next(records.where(types), ["record_type", "group", "member_id"])
    # The value of the other type is null, and `build_assignments` makes no rows from it.
    states = """stack(
        3,
        'target', false, CAST(null AS int), target_assignment,
        'current', false, current_assignment.member_epoch, current_assignment.assigned,
        'current', true, current_assignment.member_epoch, current_assignment.pending_revocation
    ) AS (kind, is_revoking, epoch, partitions)"""
    return rows.selectExpr(*_state(), "member_id", states)


def _classic_states(records: DataFrame) -> DataFrame:
    return _classic_members(records).select(
        *_state(),
        F.lit("classic").alias("kind"),
        "classic_member.member_id",
        F.lit(False).alias("is_revoking"),
        F.col("classic_group.generation").alias("epoch"),
        F.col("classic_member.assigned").alias("partitions"),
    )
