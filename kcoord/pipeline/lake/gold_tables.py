# SPDX-License-Identifier: Apache-2.0
"""The gold tables: the answers. Times that look ahead or back count from `now`, the newest moment that the lake knows
unless it is told another.
"""

from __future__ import annotations

from typing import Final

from kcoord.pipeline.lake.tables import (
    ASSIGNMENTS,
    COMMITS,
    ENDS,
    GROUP_EPOCHS,
    MEMBERS,
    RECORDS,
    REGEXES,
    Column,
    Table,
)

_KEY = ("group", "topic", "partition")
_PARTITION_OF_GROUP = (
    Column("group", "string", "Group id."),
    Column("topic", "string", "Topic."),
    Column("partition", "int", "Partition of the topic."),
)
_GROUP = Column("group", "string", "Group id.")
_INCARNATION = Column("incarnation", "int", "Which of the groups of this name, from 0.")
_HOUR = Column("hour", "timestamp", "Begin of the hour.")

CURRENT_OFFSETS: Final = Table(
    "gold",
    "current_offsets",
    "The committed offset of each partition of each group now.",
    _KEY,
    (
        *_PARTITION_OF_GROUP,
        Column("incarnation", "int", "Which of the groups of this name, from 0."),
        Column("topic_id", "string", "Id of the topic, where known."),
        Column("committed_offset", "bigint", "Offset of the next record to consume."),
        Column("committed_leader_epoch", "int", "Leader epoch of the last consumed record."),
        Column("metadata", "string", "Text committed with the offset."),
        Column("commit_timestamp", "timestamp", "When it was committed."),
        Column("expire_timestamp", "timestamp", "When it expires by itself; from old clients alone."),
        Column("log_partition", "int", "Partition of `__consumer_offsets`."),
        Column("log_offset", "bigint", "Offset of the record."),
        Column("effective_offset", "bigint", "Log offset from which it counts."),
    ),
)

LAG: Final = Table(
    "gold",
    "lag",
    "How far each group was behind at each sample of `ends`.",
    (*_KEY, "timestamp"),
    (
        *_PARTITION_OF_GROUP,
        Column("timestamp", "timestamp", "When the broker was asked."),
        Column("committed_offset", "bigint", "What was committed then."),
        Column("end_offset", "bigint", "Where the partition ended."),
        Column("lag", "bigint", "Records between the two."),
        Column("seconds_behind", "double", "How long before the partition ended there, in s, between two samples."),
        Column("is_lower_bound", "boolean", "Whether that was before the first sample: it is longer than it says."),
    ),
)

STATUS: Final = Table(
    "gold",
    "status",
    "Burrow's rules over the last ten commits of each partition.",
    _KEY,
    (
        *_PARTITION_OF_GROUP,
        Column("status", "string", "`OK`, `WARN`, `STALL`, `STOP` or `REWIND`."),
        Column("group_status", "string", "The worst of the group: `OK`, `WARN`, or `ERR` for all that is worse."),
        Column("lag", "bigint", "Records behind at the newest sample; null without samples."),
        Column("committed_offset", "bigint", "What is committed."),
        Column("end_offset", "bigint", "Where the partition ends; null without samples."),
        Column("commits", "int", "How many commits were looked at, at most 10."),
        Column("first_commit_timestamp", "timestamp", "The first of them."),
        Column("last_commit_timestamp", "timestamp", "The last of them."),
    ),
)

STORMS: Final = Table(
    "gold",
    "storms",
    "Times in which a group rebalanced again and again.",
    ("group", "incarnation", "from_timestamp"),
    (
        _GROUP,
        _INCARNATION,
        Column("kind", "string", "`consumer` or `classic`."),
        Column("from_timestamp", "timestamp", "First epoch of the storm."),
        Column("to_timestamp", "timestamp", "Last epoch of the storm."),
        Column("duration_ms", "bigint", "Time between the two, in ms."),
        Column("epochs", "bigint", "Number of epochs or generations."),
        Column("first_epoch", "int", "The first."),
        Column("last_epoch", "int", "The last."),
        Column("reasons", "map<string,bigint>", "How many of them for which reason."),
    ),
)

CONVERGENCE: Final = Table(
    "gold",
    "convergence",
    "How long the members of a KIP-848 group took to reach each epoch.",
    ("group", "incarnation", "epoch"),
    (
        _GROUP,
        _INCARNATION,
        Column("epoch", "int", "Group epoch."),
        Column("timestamp", "timestamp", "When the epoch began."),
        Column("target_ms", "bigint", "Until the target assignment of this epoch was there, in ms."),
        Column("members", "int", "Members of the epoch."),
        Column("members_reached", "int", "How many of them were stable in this epoch before the next began."),
        Column("is_converged", "boolean", "Whether all were."),
        Column("convergence_ms", "bigint", "Until the last of them was, in ms; null where the next epoch came first."),
    ),
)

EXPIRY: Final = Table(
    "gold",
    "expiry",
    "When offsets expire if nothing happens (KIP-211).",
    _KEY,
    (
        *_PARTITION_OF_GROUP,
        Column(
            "basis",
            "string",
            "From what it counts: `protected` (has members that are subscribed), `empty` (since the group is empty), "
            "`simple` and `unsubscribed` (since the commit), `commit-age` (Kafka's rule for empty KIP-848 groups), "
            "`own` (the client said when).",
        ),
        Column("commit_timestamp", "timestamp", "When it was committed."),
        Column("empty_since", "timestamp", "Since when the group has no members."),
        Column("expires_at", "timestamp", "When it expires; null while it is protected."),
        Column("expires_in_ms", "bigint", "Time until then from `now`, in ms; negative: it is due."),
        Column("committed_offset", "bigint", "What would be lost."),
    ),
)

ORPHANS: Final = Table(
    "gold",
    "orphans",
    "Offsets that nobody needs: candidates for `--delete-offsets` (KIP-496).",
    _KEY,
    (
        *_PARTITION_OF_GROUP,
        Column(
            "reason",
            "string",
            "`unsubscribed`: the group has members, none wants the topic. `topic-missing`: no such topic in the newest "
            "sample of `ends`.",
        ),
        Column("committed_offset", "bigint", "What is committed."),
        Column("commit_timestamp", "timestamp", "When it was committed."),
        Column("expires_at", "timestamp", "When it goes by itself; null: never."),
    ),
)

AUDIT_1327: Final = Table(
    "gold",
    "audit_1327",
    "Partitions that are younger than the group: what `auto.offset.reset=latest` lost or will lose (KIP-1327).",
    _KEY,
    (
        *_PARTITION_OF_GROUP,
        Column(
            "verdict",
            "string",
            "`at-risk`: nothing is committed yet. `skipped`: the first commit is past the end at the time of the "
            "first assignment. `safe`: it is before that. `unknown`: the log does not say when it was assigned.",
        ),
        Column(
            "records", "bigint", "Records lost (`skipped`), lost if it starts now (`at-risk`), at most (`unknown`)."
        ),
        Column("group_created", "timestamp", "When the group was made, or first seen."),
        Column("partition_created", "timestamp", "When the partition was made, or last seen missing."),
        Column("created_source", "string", "`recorded` by the broker, or `inferred` from two samples of `ends`."),
        Column("first_assigned", "timestamp", "When a member first had it."),
        Column("first_committed_offset", "bigint", "What the group committed first."),
        Column("end_offset", "bigint", "Where the partition ends."),
    ),
)

HOT_GROUPS: Final = Table(
    "gold",
    "hot_groups",
    "Commits of each group in each hour.",
    ("group", "hour"),
    (
        _GROUP,
        _HOUR,
        Column("commits", "bigint", "Committed offsets."),
        Column("tombstones", "bigint", "Removed offsets."),
        Column("partitions", "bigint", "Partitions that were committed."),
        Column("commits_per_s", "double", "Mean over the hour."),
        Column("share", "double", "Its share of all commits of the hour, 0 to 1."),
        Column("log_partition", "int", "Partition of `__consumer_offsets` that bears it."),
    ),
)

CHURN: Final = Table(
    "gold",
    "churn",
    "Comings and goings of members in each hour.",
    ("group", "hour"),
    (
        _GROUP,
        _HOUR,
        Column("joins", "bigint", "Members that came."),
        Column("leaves", "bigint", "Members that went."),
        Column("mean_lifetime_ms", "double", "How long those that went had been there, in ms."),
        Column("epochs", "bigint", "Epochs and generations."),
        Column("reasons", "map<string,bigint>", "How many of them for which reason."),
    ),
)

TABLES: Final = {
    table.name: table
    for table in (
        RECORDS,
        COMMITS,
        GROUP_EPOCHS,
        MEMBERS,
        ASSIGNMENTS,
        REGEXES,
        ENDS,
        CURRENT_OFFSETS,
        LAG,
        STATUS,
        STORMS,
        CONVERGENCE,
        EXPIRY,
        ORPHANS,
        AUDIT_1327,
        HOT_GROUPS,
        CHURN,
    )
}
