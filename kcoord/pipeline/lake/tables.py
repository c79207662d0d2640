# SPDX-License-Identifier: Apache-2.0
"""The tables of the lake: every column with its type and meaning. docs/lake-tables.md is made from this.

Types are Spark's; timestamps are UTC. What a table's builder returns is cast to these columns, in this order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from kcoord.pipeline.schemas import RECORDS as SOURCE_RECORDS


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its type as Spark writes it, its meaning with the unit."""

    name: str
    type: str
    doc: str


@dataclass(frozen=True, slots=True)
class Table:
    """`key` names one row. Files are laid out by `partitioned_by`; empty: one table, replaced as a whole."""

    layer: str
    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    partitioned_by: tuple[str, ...] = ()

    @property
    def schema(self) -> StructType:
        found = StructType.fromDDL(", ".join(f"`{each.name}` {each.type}" for each in self.columns))
        assert isinstance(found, StructType)
        return found

    def conform(self, frame: DataFrame) -> DataFrame:
        """The frame with this table's columns and types alone. It is not analyzed for that: a declarative pipeline
        does not allow it.
        """
        return frame.select([F.col(f"`{each.name}`").cast(each.type).alias(each.name) for each in self.columns])


def _records() -> tuple[Column, ...]:
    from pyspark.sql.pandas.types import from_arrow_schema

    fields = from_arrow_schema(SOURCE_RECORDS.schema()).fields
    return tuple(
        Column(column.name, field.dataType.simpleString(), column.doc)
        for column, field in zip(SOURCE_RECORDS.columns, fields, strict=True)
    )


_LOG_PARTITION = Column("log_partition", "int", "Partition of `__consumer_offsets`.")
_GROUP = Column("group", "string", "Group id.")
_INCARNATION = Column(
    "incarnation", "int", "How often a group of this name had ended before: 0 for the first, as far as the lake knows."
)
_TOPIC = Column("topic", "string", "Topic.")
_PARTITION = Column("partition", "int", "Partition of the topic.")
_COMMITTED = Column("committed_offset", "bigint", "Offset of the next record to consume.")
_COMMIT_TIME = Column("commit_timestamp", "timestamp", "When it was committed.")
_BATCH = Column("batch", "bigint", "Number of the micro-batch of `ingest` that brought the row.")
_MEMBER = Column("member_id", "string", "Member id.")
_SPELL = (
    Column("from_timestamp", "timestamp", "Since when."),
    Column("to_timestamp", "timestamp", "Until when; null: still so."),
    Column("from_offset", "bigint", "Log offset of the record that began it."),
    Column("to_offset", "bigint", "Log offset of the record that ended it; null: still so."),
)
_REASON_SOURCE = Column(
    "reason_source", "string", "`recorded`: kcoord wrote it. `inferred` from what lies around it in the log."
)

RECORDS: Final = Table(
    "bronze",
    "records",
    "Every record as the source gave it, once. It stays when the log is cleaned.",
    ("log_partition", "log_offset"),
    (
        *_records(),
        Column("kind", "string", "`offset` (record types 0 and 1), `control`, or `group` for all others."),
        _BATCH,
    ),
    ("kind", "batch"),
)

COMMITS: Final = Table(
    "silver",
    "commits",
    "Committed offsets that counted, and their tombstones; transactions resolved.",
    ("log_partition", "log_offset"),
    (
        _LOG_PARTITION,
        Column("log_offset", "bigint", "Offset of the record."),
        Column("timestamp", "timestamp", "When the record was written."),
        Column("effective_offset", "bigint", "Log offset from which it counts: the marker's for a transaction."),
        Column("effective_timestamp", "timestamp", "When it began to count."),
        _GROUP,
        _INCARNATION,
        _TOPIC,
        _PARTITION,
        Column("topic_id", "string", "Id of the topic, where known."),
        _COMMITTED,
        Column("committed_leader_epoch", "int", "Leader epoch of the last consumed record."),
        Column("metadata", "string", "Text committed with the offset."),
        _COMMIT_TIME,
        Column("expire_timestamp", "timestamp", "When it expires by itself; from old clients alone."),
        Column("is_tombstone", "boolean", "Whether the offset was removed."),
        Column(
            "reason",
            "string",
            "`commit`, or why it was removed: `expired`, `group-delete`, `topic-delete`, `offset-delete`.",
        ),
        _REASON_SOURCE,
        Column("producer_id", "bigint", "Producer of the transaction; null outside of transactions."),
        _BATCH,
    ),
    ("batch",),
)

GROUP_EPOCHS: Final = Table(
    "silver",
    "group_epochs",
    "Each group epoch, target assignment and generation, and the ends of groups.",
    ("log_partition", "log_offset"),
    (
        Column("log_offset", "bigint", "Offset of the record."),
        Column("timestamp", "timestamp", "When the record was written."),
        _GROUP,
        _INCARNATION,
        Column("kind", "string", "`consumer` (group epoch), `target` (target assignment), `classic` (generation)."),
        Column("epoch", "int", "Epoch or generation; null where a group of this kind ends."),
        Column("since_previous_ms", "bigint", "Time since the one before of the same kind, in ms."),
        Column(
            "reason",
            "string",
            "Of an epoch: `join`, `leave`, `fenced`, `subscription`, `metadata`, `migration`; of a generation: `join`,"
            " `leave`, `rejoin`; of a tombstone: `expired`, `group-delete`, `migration`.",
        ),
        _REASON_SOURCE,
        Column("members", "int", "Number of members in that epoch."),
        Column("protocol_type", "string", "Of classic groups: `consumer`, `connect`, ..., empty for simple ones."),
        Column("protocol", "string", "Of classic groups: what the members agreed on, such as an assignor."),
        Column("state_timestamp", "timestamp", "Of classic groups: when it entered its state."),
        Column("creation_timestamp", "timestamp", "When the group was made (KIP-1327), or its first epoch here."),
        Column("empty_since", "timestamp", "Since when it has no members; null while it has some."),
        Column("is_tombstone", "boolean", "Whether the group, or this kind of it, ends here."),
        Column("group_end", "boolean", "Whether the whole group ends here."),
        _LOG_PARTITION,
    ),
    ("log_partition",),
)

MEMBERS: Final = Table(
    "silver",
    "members",
    "Members, a row per version of what they said (slowly changing dimension, type 2).",
    ("group", "member_id", "from_offset"),
    (
        _GROUP,
        _INCARNATION,
        Column("kind", "string", "`consumer` or `classic`."),
        _MEMBER,
        Column("instance_id", "string", "Name of a static member."),
        Column("rack_id", "string", "Rack."),
        Column("client_id", "string", "Client id."),
        Column("client_host", "string", "Address."),
        Column("subscribed_topics", "array<string>", "Topics subscribed to by name; null where not known."),
        Column("subscribed_regex", "string", "Regular expression subscribed to."),
        Column("server_assignor", "string", "Assignor asked for."),
        *_SPELL,
        _LOG_PARTITION,
    ),
    ("log_partition",),
)

ASSIGNMENTS: Final = Table(
    "silver",
    "assignments",
    "Who had which partition when (slowly changing dimension, type 2).",
    ("group", "kind", "member_id", "topic", "topic_id", "partition", "from_offset"),
    (
        _GROUP,
        _INCARNATION,
        Column("kind", "string", "`current` (owned, KIP-848), `target` (shall own), `classic` (of generations)."),
        _MEMBER,
        Column("topic", "string", "Topic; null where only its id is known."),
        Column("topic_id", "string", "Id of the topic; null in classic groups."),
        _PARTITION,
        Column("is_revoking", "boolean", "Whether the member had been asked to give it up, and still had it."),
        Column("epoch", "int", "Member epoch or generation with which that began."),
        *_SPELL,
        _LOG_PARTITION,
    ),
    ("log_partition",),
)

REGEXES: Final = Table(
    "silver",
    "regexes",
    "The topics for which the regular expressions of a group stand now.",
    ("group", "regex"),
    (
        _GROUP,
        Column("regex", "string", "The regular expression."),
        Column("topics", "array<string>", "The topics."),
        Column("resolved_timestamp", "timestamp", "When it was resolved."),
        _LOG_PARTITION,
    ),
    ("log_partition",),
)

ENDS: Final = Table(
    "silver",
    "ends",
    "Where the partitions of topics began and ended, sampled from a broker.",
    ("topic", "partition", "timestamp"),
    (
        _TOPIC,
        Column("topic_id", "string", "Id of the topic."),
        _PARTITION,
        Column("timestamp", "timestamp", "When the broker was asked."),
        Column("start_offset", "bigint", "Offset of the first record."),
        Column("end_offset", "bigint", "Offset of the next record."),
        Column("created_timestamp", "timestamp", "When the partition was made (KIP-1327); null where unknown."),
        Column("date", "date", "Day of the sample."),
    ),
    ("date",),
)
