# SPDX-License-Identifier: Apache-2.0
"""The tables of the data source: every column with its Arrow type and its meaning.

This is the contract between the source and the jobs that use it. docs/pipeline-tables.md is generated from it. Names
and values are Kafka's own, in snake_case. Uuids are in Kafka's text form (22 letters of URL-safe base64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


def list_of(dtype: pa.DataType) -> pa.DataType:
    """Returns a list type whose element has Spark's name for it. Spark compares all names in two schemas."""
    return pa.list_(pa.field("element", dtype))


ASSIGNED: Final = list_of(
    pa.struct(
        [
            pa.field("topic", pa.string()),
            pa.field("topic_id", pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("epoch", pa.int32()),
        ]
    )
)
"""One element per partition. KIP-848 groups name topics by id, classic groups by name; the other field is null.
`epoch` is the member epoch in which the member got the partition. Only Kafka 4.3 and kcoord write it; else it is
null."""

CLIENT_ASSIGNORS: Final = list_of(
    pa.struct(
        [
            pa.field("name", pa.string()),
            pa.field("minimum_version", pa.int32()),
            pa.field("maximum_version", pa.int32()),
            pa.field("reason", pa.int32()),
            pa.field("metadata_version", pa.int32()),
            pa.field("metadata", pa.binary()),
        ]
    )
)
PROTOCOLS: Final = list_of(pa.struct([pa.field("name", pa.string()), pa.field("metadata", pa.binary())]))

CLASSIC_MEMBERS: Final = list_of(
    pa.struct(
        [
            pa.field("member_id", pa.string()),
            pa.field("instance_id", pa.string()),
            pa.field("client_id", pa.string()),
            pa.field("client_host", pa.string()),
            pa.field("rebalance_timeout_ms", pa.int32()),
            pa.field("session_timeout_ms", pa.int32()),
            pa.field("subscribed_topics", list_of(pa.string())),
            pa.field("assigned", ASSIGNED),
            pa.field("subscription", pa.binary()),
            pa.field("assignment", pa.binary()),
        ]
    )
)
"""`subscribed_topics` and `assigned` are null if the protocol type is not `consumer`, or if the bytes are not such a
message. `subscription` and `assignment` are the bytes themselves."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table. `required` columns are never null."""

    name: str
    type: pa.DataType
    doc: str
    required: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """One table. The columns `key` identify a row. `readStream` supports the table if `is_stream`."""

    name: str
    doc: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    is_stream: bool = True

    def schema(self) -> pa.Schema:
        return pa.schema([pa.field(column.name, column.type, not column.required) for column in self.columns])


_PLACE: Final = (
    Column("log_partition", pa.int32(), "Partition of `__consumer_offsets` that holds the record.", True),
    Column(
        "log_offset", pa.int64(), "Offset of the record in that partition. It never changes; cleaning keeps it.", True
    ),
)
_TIMESTAMP: Final = Column("timestamp", TIMESTAMP, "When the record was written; null for a record without a time.")
_EFFECTIVE_OFFSET: Final = Column(
    "effective_offset",
    pa.int64(),
    "Log offset from which the record counts: that of the commit marker for a record of a transaction, else "
    "`log_offset`. The newest state of a key is the row with the greatest `(effective_offset, log_offset)`.",
)
_MARKER_TIMESTAMP: Final = Column(
    "marker_timestamp",
    TIMESTAMP,
    "When the commit marker from which the record counts was written. Null if the record counts from its own offset "
    "on, or never counts.",
)
_GROUP: Final = Column("group", pa.string(), "Group id.")
_TOMBSTONE: Final = (
    Column("is_tombstone", pa.bool_(), "True if the record deletes the state of its key.", True),
    Column(
        "tombstone_reason",
        pa.string(),
        "Why the tombstone was written: `expired`, `offset-delete`, `group-delete`, `topic-delete`, `leave`, `fenced`, "
        "`replaced`, `unsubscribed` or `migration`. Only kcoord writes it, so it is null in Kafka's logs.",
    ),
    Column(
        "tombstone_principal",
        pa.string(),
        "Principal whose OffsetDelete or DeleteGroups request wrote the tombstone. Null in all other tombstones and in "
        "Kafka's logs.",
    ),
)
_GROUP_END: Final = Column(
    "group_end",
    pa.bool_(),
    "True on the tombstone that ends the group. False on a tombstone that only moves the group between the classic, "
    "the consumer and the streams protocol; the group's new record follows in the same batch. Null on all other "
    "records.",
)
_OFFSET: Final = (
    Column("topic", pa.string(), "Topic whose offset is committed."),
    Column("partition", pa.int32(), "Partition of that topic."),
    Column("topic_id", pa.string(), "Id of the topic; null if the committing client did not send it."),
    Column("committed_offset", pa.int64(), "Offset of the next record to consume; null in a tombstone."),
    Column("committed_leader_epoch", pa.int32(), "Leader epoch of the last consumed record; null if unknown."),
    Column("metadata", pa.string(), "Text committed with the offset."),
    Column("commit_timestamp", TIMESTAMP, "When the offset was committed, by the coordinator's clock."),
    Column("expire_timestamp", TIMESTAMP, "When the offset expires; only clients before KIP-211 set it."),
)
_MEMBER_ID: Final = Column("member_id", pa.string(), "Member id.")
_MEMBER: Final = (
    Column("instance_id", pa.string(), "Name of a static member (KIP-345); null for a dynamic one."),
    Column("rack_id", pa.string(), "Rack of the member."),
    Column("client_id", pa.string(), "Client id."),
    Column("client_host", pa.string(), "Address from which the member connects."),
    Column("subscribed_topics", list_of(pa.string()), "Topics to which the member subscribes by name."),
    Column(
        "subscribed_regex", pa.string(), "Regular expression to which the member subscribes; null if there is none."
    ),
    Column("rebalance_timeout_ms", pa.int32(), "Time that the member has to revoke partitions, in ms."),
    Column("session_timeout_ms", pa.int32(), "Session timeout of a member that uses the classic protocol, in ms."),
    Column("server_assignor", pa.string(), "Server-side assignor that the member requests."),
    Column("classic_protocols", PROTOCOLS, "Protocols of a member that uses the classic protocol in a KIP-848 group."),
    Column(
        "client_assignors",
        CLIENT_ASSIGNORS,
        "Client-side assignors that the member offers, the best first; null if it has none. Only kcoord writes them.",
    ),
)
_CLASSIC: Final = (
    Column("protocol_type", pa.string(), "Kind of the group: `consumer`, `connect`, ..., or empty."),
    Column("generation", pa.int32(), "Generation of the group."),
    Column("protocol", pa.string(), "Protocol that the members agreed on, such as an assignor."),
    Column("leader", pa.string(), "Member id of the leader."),
    Column("state_timestamp", TIMESTAMP, "When the group entered its state."),
    Column("members", CLASSIC_MEMBERS, "All members of that generation."),
)
_CONSUMER_GROUP: Final = (
    Column("epoch", pa.int32(), "Group epoch."),
    Column(
        "epoch_reason",
        pa.string(),
        "Why the epoch was bumped: `join`, `leave`, `fenced`, `subscription`, `metadata`, `assignor`, `rack` or "
        "`migration`. Only kcoord writes it.",
    ),
    Column("metadata_hash", pa.int64(), "Hash of the metadata of the subscribed topics."),
    Column("creation_timestamp", TIMESTAMP, "When the group was created (KIP-1327). Only kcoord writes it."),
    Column("empty_since", TIMESTAMP, "When the group became empty (KIP-211). Only kcoord writes it."),
)
_COMPUTED: Final = (
    Column(
        "client_assignor",
        pa.string(),
        "Client-side assignor that computed the target assignment; null if the broker did. Only kcoord writes it.",
    ),
    Column("assigned_by", pa.string(), "Member id of the member that computed it; null if the broker did."),
)
_ASSIGNMENT_EPOCH: Final = (
    Column("assignment_epoch", pa.int32(), "Group epoch for which the target assignment was computed."),
    Column("assignment_timestamp", TIMESTAMP, "When the target assignment was computed."),
    *_COMPUTED,
)
_ASSIGNOR_METADATA: Final = (
    Column(
        "assignor_error",
        pa.int32(),
        "Error that the client-side assignor reported with the member's assignment; null for none.",
    ),
    Column(
        "assignor_metadata_version", pa.int32(), "Version of the metadata of a client-side assignor; null for none."
    ),
    Column("assignor_metadata", pa.binary(), "Metadata that a client-side assignor gave to the member; null for none."),
)
_CURRENT: Final = (
    Column("member_epoch", pa.int32(), "Epoch of the member."),
    Column("previous_member_epoch", pa.int32(), "Previous epoch of the member."),
    Column(
        "state",
        pa.string(),
        "`stable`, `unrevoked_partitions`, `unreleased_partitions`, or the number of another state.",
    ),
    Column("assigned", ASSIGNED, "Partitions that the member owns."),
    Column("pending_revocation", ASSIGNED, "Partitions that the member still has to revoke."),
    *_ASSIGNOR_METADATA,
)
_REGEX: Final = (
    Column("regex", pa.string(), "The regular expression."),
    Column("topics", list_of(pa.string()), "Topics that the regular expression matched."),
    Column("metadata_version", pa.int64(), "Version of the metadata image against which the expression was resolved."),
    Column("resolved_timestamp", TIMESTAMP, "When the expression was resolved."),
)


def _struct(columns: tuple[Column, ...]) -> pa.StructType:
    return pa.struct([pa.field(column.name, column.type) for column in columns])


@dataclass(frozen=True, slots=True)
class Value:
    """The type of the entries of `value_json` for one record type. JSON has times in ISO 8601 and bytes in base64."""

    name: str
    type: pa.DataType
    doc: str


VALUES: Final = {
    2: Value("classic_group", _struct(_CLASSIC), "A classic group."),
    3: Value("consumer_group", _struct(_CONSUMER_GROUP), "A KIP-848 group."),
    5: Value("member", _struct(_MEMBER), "A member of a KIP-848 group."),
    6: Value("target", _struct(_ASSIGNMENT_EPOCH), "The target assignment of a KIP-848 group."),
    7: Value("target_assignment", ASSIGNED, "Target assignment of a member of a KIP-848 group."),
    8: Value("current_assignment", _struct(_CURRENT), "Current assignment of a member of a KIP-848 group."),
    16: Value("regular_expression", _struct(_REGEX), "A resolved regular expression; `regex` comes from the key."),
}
"""By record type. These are JSON in one column because nearly all records are offset commits, and each of them would
pay for a column per type."""

_TRANSACTION: Final = Column(
    "transaction",
    pa.string(),
    "Null outside of transactions. Otherwise the outcome of the record's transaction, or the type of the marker: "
    "`committed`, `aborted`, `open` (no marker yet), or `superseded` (committed, but a later commit or a tombstone of "
    "the same key precedes the marker and counts instead).",
)

RECORDS: Final = Table(
    "records",
    "Every record of the log: all types, control records, and records of aborted transactions. Columns that a record "
    "type does not have are null. A record of an unknown type or version has only its bytes. A damaged batch is one "
    "row with an `error`, at the first offset that it can have had, with its bytes as `value`.",
    ("log_partition", "log_offset"),
    (
        *_PLACE,
        _TIMESTAMP,
        Column("leader_epoch", pa.int32(), "Leader epoch of the batch."),
        Column("producer_id", pa.int64(), "Producer id of the batch; null if it has none."),
        Column("producer_epoch", pa.int32(), "Epoch of the producer."),
        Column("sequence", pa.int32(), "Sequence number of the record; null if the batch has none."),
        _TRANSACTION,
        Column(
            "effective_offset",
            pa.int64(),
            _EFFECTIVE_OFFSET.doc + " Null for a record that does not count: aborted, open, superseded, damaged.",
        ),
        _MARKER_TIMESTAMP,
        Column(
            "control_type",
            pa.string(),
            "`commit` or `abort` for a marker; other control records by Kafka's name or number.",
        ),
        Column("record_type", pa.int32(), "Type of the record: the first int16 of its key; null for a control record."),
        Column(
            "record_name",
            pa.string(),
            "Name of the type: `offset_commit`, `group_metadata`, `consumer_group_metadata`, ...; null if unknown.",
        ),
        Column("value_version", pa.int32(), "Version of the value; null in a tombstone."),
        *_TOMBSTONE,
        Column(
            "headers",
            list_of(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
            "Record headers; null if there are none.",
        ),
        Column("key", pa.binary(), "Bytes of the key."),
        Column("value", pa.binary(), "Bytes of the value; null in a tombstone."),
        Column("error", pa.string(), "Why the record, or the whole batch, could not be read; else null."),
        Column("group", pa.string(), "Group id, for unknown record types too; null in control records."),
        *_OFFSET,
        Column("member_id", pa.string(), "Member id, in record types 5, 7 and 8."),
        _GROUP_END,
        Column(
            "value_json",
            pa.string(),
            "The value of a group record (types 2, 3, 5, 6, 7, 8 and 16) as JSON. Null in all other records, and if "
            "the value cannot be read. docs/pipeline-tables.md has the fields.",
        ),
    ),
)

COMMITS: Final = Table(
    "commits",
    "Committed offsets and their tombstones, with transactions resolved. A record has a row if and only if the "
    "coordinator applied it. Aborted, open and superseded commits are only in `records`.",
    ("log_partition", "log_offset"),
    (
        *_PLACE,
        _TIMESTAMP,
        Column("effective_offset", pa.int64(), _EFFECTIVE_OFFSET.doc, True),
        _MARKER_TIMESTAMP,
        Column(
            "producer_id",
            pa.int64(),
            "Producer id of the transaction that has the commit; null outside of transactions.",
        ),
        Column("producer_epoch", pa.int32(), "Epoch of the producer."),
        _GROUP,
        *_OFFSET,
        *_TOMBSTONE,
    ),
)

CURRENT_OFFSETS: Final = Table(
    "current_offsets",
    "The committed offset of each partition of each group at the end of the log, as `kafka-consumer-groups --describe` "
    "shows it.",
    ("group", "topic", "partition"),
    (
        _GROUP,
        *_OFFSET,
        *_PLACE,
        Column("effective_offset", pa.int64(), _EFFECTIVE_OFFSET.doc, True),
    ),
    is_stream=False,
)

MEMBERS: Final = Table(
    "members",
    "Metadata of members. KIP-848 groups have a row per change of a member, and its tombstone. Classic groups have a "
    "row per member of each generation. A member that is not in the next generation has left; all members have left if "
    "the next record is the group's tombstone.",
    ("log_partition", "log_offset", "member_id"),
    (
        *_PLACE,
        _TIMESTAMP,
        _GROUP,
        _MEMBER_ID,
        Column("kind", pa.string(), "`consumer` or `classic`, the type of the group.", True),
        Column("generation", pa.int32(), "Generation of a classic group; null for a KIP-848 group."),
        *_MEMBER,
        *_TOMBSTONE,
    ),
)

ASSIGNMENTS: Final = Table(
    "assignments",
    "Target and current assignments. Each row has the whole assignment of one member, which may be an empty list. It "
    "is valid until the next row of the same kind and member.",
    ("log_partition", "log_offset", "kind", "member_id"),
    (
        *_PLACE,
        _TIMESTAMP,
        _GROUP,
        _MEMBER_ID,
        Column(
            "kind",
            pa.string(),
            "`target` (what the assignor assigned, KIP-848), `current` (what the member owns, KIP-848), `classic` "
            "(assignment of one generation).",
            True,
        ),
        Column("epoch", pa.int32(), "Member epoch (`current`) or generation (`classic`); null for `target`."),
        Column("previous_epoch", pa.int32(), "Previous member epoch (`current`)."),
        Column("state", pa.string(), "`stable`, `unrevoked_partitions`, `unreleased_partitions` (`current`)."),
        Column("assigned", ASSIGNED, "The partitions; null in a tombstone."),
        Column("pending_revocation", ASSIGNED, "Partitions that the member still has to revoke (`current`)."),
        *(replace(column, doc=f"{column.doc} Only in `current`.") for column in _ASSIGNOR_METADATA),
        *_TOMBSTONE,
    ),
)

GROUP_EPOCHS: Final = Table(
    "group_epochs",
    "Each epoch of each group: group epochs and target assignments of KIP-848 groups, generations of classic groups, "
    "and the tombstones of their records.",
    ("log_partition", "log_offset"),
    (
        *_PLACE,
        _TIMESTAMP,
        _GROUP,
        Column(
            "kind", pa.string(), "`consumer` (group epoch), `target` (target assignment), `classic` (generation).", True
        ),
        Column("epoch", pa.int32(), "Group epoch, epoch of the target assignment, or generation; null in a tombstone."),
        *_CONSUMER_GROUP[1:],
        Column("assignment_timestamp", TIMESTAMP, "When the target assignment was computed (`target`)."),
        *_COMPUTED,
        Column("members", pa.int32(), "Number of members (`classic`)."),
        *_TOMBSTONE,
        _GROUP_END,
    ),
)

CLASSIC_GROUPS: Final = Table(
    "classic_groups",
    "Each record of a classic group, with all members of its generation.",
    ("log_partition", "log_offset"),
    (*_PLACE, _TIMESTAMP, _GROUP, *_CLASSIC, *_TOMBSTONE, _GROUP_END),
)

REGULAR_EXPRESSIONS: Final = Table(
    "regular_expressions",
    "The topics that the regular expressions of KIP-848 groups matched.",
    ("log_partition", "log_offset"),
    (*_PLACE, _TIMESTAMP, _GROUP, *_REGEX, *_TOMBSTONE),
)

TABLES: Final = {
    table.name: table
    for table in (
        RECORDS,
        COMMITS,
        CURRENT_OFFSETS,
        MEMBERS,
        ASSIGNMENTS,
        GROUP_EPOCHS,
        CLASSIC_GROUPS,
        REGULAR_EXPRESSIONS,
    )
}
