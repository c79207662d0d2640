# SPDX-License-Identifier: Apache-2.0
"""silver.group_epochs: every epoch and generation, its number of members, and the reason for it.

kcoord writes the reason of an epoch into its record. Kafka does not; then the member records since the previous epoch
show it. The reason is the first that holds:

* `join`: a new member has a record.
* `leave`: a member has a tombstone. A fenced member looks the same.
* `subscription`: the record of a member has changed.
* `metadata`: no member record was written, so the topics changed.

The values of streams groups (KIP-1071) are not read, so their rows say only that there is such a group.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from kcoord.pipeline.lake.members import CLASSIC_GROUP, GROUP_EPOCH, MEMBER, STREAMS_GROUP, TARGET_EPOCH
from kcoord.pipeline.lake.tables import TABLES


def build(records: DataFrame) -> DataFrame:
    """Makes the table from the group records of some log partitions, with their incarnations."""
    kinds = (CLASSIC_GROUP, GROUP_EPOCH, MEMBER, TARGET_EPOCH, STREAMS_GROUP)
    rows = _with_member_changes(records.where(F.col("record_type").isin(*kinds))).where(f"record_type != {MEMBER}")
    rows = _with_classic_changes(rows.withColumns({"kind": _kind(), "epoch": _epoch()}))
    order = Window.partitionBy("group", "incarnation", "kind").orderBy("log_offset")
    moment = F.unix_millis("timestamp")
    rows = _with_times(rows.withColumn("since_previous_ms", moment - F.lag(moment).over(order)))
    recorded = F.coalesce(F.col("consumer_group.epoch_reason"), F.col("tombstone_reason"))
    rows = rows.withColumns(
        {
            "reason": F.coalesce(recorded, _reason()),
            "reason_source": F.when(recorded.isNotNull(), "recorded").when(_reason().isNotNull(), "inferred"),
            "group_end": F.coalesce("group_end", F.lit(False)),
        }
    )
    classic = ("classic_group.protocol_type", "classic_group.protocol", "classic_group.state_timestamp")
    return TABLES["group_epochs"].conform(rows.select("*", *classic))


def _with_member_changes(rows: DataFrame) -> DataFrame:
    """Adds `member_count` after each row, and `saw_join`, `saw_leave`, `saw_change` since the previous epoch."""
    is_member = F.col("record_type") == MEMBER
    by_member = Window.partitionBy("group", "incarnation", "record_type", "member_id").orderBy("log_offset")
    was_there = F.coalesce(~F.lag("is_tombstone").over(by_member), F.lit(False))
    rows = rows.withColumn("was_there", is_member & was_there)
    is_there = is_member & ~F.col("is_tombstone")
    rows = rows.withColumns(
        {
            "is_join": is_there & ~F.col("was_there"),
            "is_leave": is_member & F.col("is_tombstone") & F.col("was_there"),
            "is_change": is_there & F.col("was_there"),
        }
    )
    order = Window.partitionBy("group", "incarnation").orderBy("log_offset")
    delta = F.col("is_join").cast("int") - F.col("is_leave").cast("int")
    is_epoch = (F.col("record_type") == GROUP_EPOCH).cast("int")
    rows = rows.withColumns(
        {"member_count": F.sum(delta).over(order), "segment": F.sum(is_epoch).over(order) - is_epoch}
    )
    segment = Window.partitionBy("group", "incarnation", "segment")
    return rows.withColumns({f"saw_{name}": F.max(f"is_{name}").over(segment) for name in ("join", "leave", "change")})


def _with_classic_changes(rows: DataFrame) -> DataFrame:
    """Adds `members`, `came` and `went`: the number of members, and whether members joined or left a generation."""
    ids = F.transform(F.col("classic_group.members"), lambda member: member.getField("member_id"))
    order = Window.partitionBy("group", "incarnation", "kind").orderBy("log_offset")
    rows = rows.withColumn("ids", F.coalesce(ids, F.array().cast("array<string>")))
    before = F.coalesce(F.lag("ids").over(order), F.array().cast("array<string>"))
    rows = rows.withColumn("ids_before", before)
    is_classic = F.col("kind") == "classic"
    return rows.withColumns(
        {
            "came": F.size(F.array_except("ids", "ids_before")) > 0,
            "went": F.size(F.array_except("ids_before", "ids")) > 0,
            "members": F.when(is_classic, F.size("ids")).when(F.col("kind") != "streams", F.col("member_count")),
        }
    )


def _with_times(rows: DataFrame) -> DataFrame:
    """Adds `creation_timestamp` and `empty_since`: recorded, or else the time of the first record that shows it."""
    life = Window.partitionBy("group", "incarnation")
    until = life.orderBy("log_offset").rowsBetween(Window.unboundedPreceding, Window.currentRow)
    recorded = F.max("consumer_group.creation_timestamp").over(life)
    is_state = ~F.col("is_tombstone") & (F.col("kind") != "target")
    with_members = F.max(F.when(is_state & (F.col("members") > 0), F.col("log_offset"))).over(until)
    created = F.coalesce(recorded, F.min("timestamp").over(life))
    rows = rows.withColumns({"creation_timestamp": created, "busy_offset": with_members})
    # The group is empty since the first row after the last row with members.
    stretch = Window.partitionBy("group", "incarnation", "busy_offset")
    seen = F.min(F.when(is_state & (F.col("members") == 0), F.col("timestamp"))).over(stretch)
    recorded_time = F.coalesce("consumer_group.empty_since", "classic_group.state_timestamp")
    return rows.withColumn("empty_since", F.when(is_state & (F.col("members") == 0), F.coalesce(recorded_time, seen)))


def _kind() -> Column:
    names = {CLASSIC_GROUP: "classic", GROUP_EPOCH: "consumer", TARGET_EPOCH: "target", STREAMS_GROUP: "streams"}
    kind = F.lit(None).cast("string")
    for record_type, name in names.items():
        kind = F.when(F.col("record_type") == record_type, name).otherwise(kind)
    return kind


def _epoch() -> Column:
    return F.coalesce("consumer_group.epoch", "target.assignment_epoch", "classic_group.generation")


def _reason() -> Column:
    """Infers the reason of an epoch or generation. Null for target assignments and tombstones."""
    consumer = (
        F.when(F.col("saw_join"), "join")
        .when(F.col("saw_leave"), "leave")
        .when(F.col("saw_change"), "subscription")
        .otherwise("metadata")
    )
    classic = F.when(F.col("came"), "join").when(F.col("went"), "leave").otherwise("rejoin")
    return F.when(
        ~F.col("is_tombstone"),
        F.when(F.col("kind") == "consumer", consumer).when(F.col("kind") == "classic", classic),
    )
