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

from typing import Final

from pyspark.sql import DataFrame

from kcoord.pipeline.lake.members import CLASSIC_GROUP, GROUP_EPOCH, MEMBER, STREAMS_GROUP, TARGET_EPOCH
from kcoord.pipeline.lake.tables import TABLES

_LIFE: Final = "PARTITION BY group, incarnation"
_KIND: Final = f"({_LIFE}, kind ORDER BY log_offset)"

_CHANGES: Final = (
    f"""CASE record_type
        WHEN {CLASSIC_GROUP} THEN 'classic'
        WHEN {GROUP_EPOCH} THEN 'consumer'
        WHEN {TARGET_EPOCH} THEN 'target'
        WHEN {STREAMS_GROUP} THEN 'streams'
    END AS kind""",
    "coalesce(consumer_group.epoch, target.assignment_epoch, classic_group.generation) AS epoch",
    f"record_type = {MEMBER} AS is_member",
    f"""is_member AND coalesce(
        NOT lag(is_tombstone) OVER ({_LIFE}, record_type, member_id ORDER BY log_offset), false
    ) AS was_there""",
    "is_member AND NOT is_tombstone AND NOT was_there AS is_join",
    "is_member AND is_tombstone AND was_there AS is_leave",
    "is_member AND NOT is_tombstone AND was_there AS is_change",
    "coalesce(transform(classic_group.members, member -> member.member_id), array()) AS ids",
)
"""What a record of a member changes, and the members of a generation."""

_BEFORE: Final = (
    f"sum(int(is_join) - int(is_leave)) OVER ({_LIFE} ORDER BY log_offset) AS member_count",
    f"sum(int(kind <=> 'consumer')) OVER ({_LIFE} ORDER BY log_offset) - int(kind <=> 'consumer') AS segment",
    f"coalesce(lag(ids) OVER {_KIND}, array()) AS ids_before",
    f"unix_millis(timestamp) - unix_millis(lag(timestamp) OVER {_KIND}) AS since_previous_ms",
)
"""`segment` has an epoch and the records since the previous one."""

_COUNTS: Final = (
    *(f"max(is_{name}) OVER ({_LIFE}, segment) AS saw_{name}" for name in ("join", "leave", "change")),
    "size(array_except(ids, ids_before)) > 0 AS came",
    "size(array_except(ids_before, ids)) > 0 AS went",
    "CASE kind WHEN 'classic' THEN size(ids) WHEN 'streams' THEN NULL ELSE member_count END AS members",
    "NOT is_tombstone AND kind != 'target' AS is_state",
)
"""What members did since the previous epoch or generation, and how many there are now."""

_TIMES: Final = (
    f"""coalesce(
        max(consumer_group.creation_timestamp) OVER ({_LIFE}), min(timestamp) OVER ({_LIFE})
    ) AS creation_timestamp""",
    f"max(if(is_state AND members > 0, log_offset, NULL)) OVER ({_LIFE} ORDER BY log_offset) AS busy_offset",
)
"""`creation_timestamp` is the time of the first record if no time is recorded."""

# The group is empty since the first row after the last row with members.
_EMPTY_SINCE: Final = f"""if(is_state AND members = 0, coalesce(
    consumer_group.empty_since,
    classic_group.state_timestamp,
    min(if(is_state AND members = 0, timestamp, NULL)) OVER ({_LIFE}, busy_offset)
), NULL)"""

_REASON: Final = """CASE
    WHEN is_tombstone THEN NULL
    WHEN kind = 'consumer' AND saw_join OR kind = 'classic' AND came THEN 'join'
    WHEN kind = 'consumer' AND saw_leave OR kind = 'classic' AND went THEN 'leave'
    WHEN kind = 'consumer' AND saw_change THEN 'subscription'
    WHEN kind = 'consumer' THEN 'metadata'
    WHEN kind = 'classic' THEN 'rejoin'
END"""
"""Infers the reason of an epoch or generation. Null for target assignments and tombstones."""


def build(records: DataFrame) -> DataFrame:
    """Makes the table from the group records of some log partitions, with their incarnations."""
    kinds = (CLASSIC_GROUP, GROUP_EPOCH, MEMBER, TARGET_EPOCH, STREAMS_GROUP)
    rows = records.where(f"record_type IN {kinds}").selectExpr("*", *_CHANGES).selectExpr("*", *_BEFORE)
    rows = rows.selectExpr("*", *_COUNTS).where(f"record_type != {MEMBER}").selectExpr("*", *_TIMES)
    recorded = "coalesce(consumer_group.epoch_reason, tombstone_reason)"
    return TABLES["group_epochs"].conform(
        rows,
        reason=f"coalesce({recorded}, {_REASON})",
        reason_source=f"nvl2({recorded}, 'recorded', nvl2({_REASON}, 'inferred', NULL))",
        group_end="coalesce(group_end, false)",
        protocol_type="classic_group.protocol_type",
        protocol="classic_group.protocol",
        state_timestamp="classic_group.state_timestamp",
        empty_since=_EMPTY_SINCE,
    )
