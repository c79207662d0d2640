# SPDX-License-Identifier: Apache-2.0
"""`kcoord consumer-groups --list` and `--describe`.

The columns are Kafka's, in Kafka's order, plus the type and the creation time (KIP-1327).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence

from kcoord.cli.group_filters import states_of, types_of
from kcoord.cli.output import (
    OutputColumn,
    Row,
    assignment_text,
    by_topic,
    node_text,
    plain_text,
    print_json,
    print_rows,
    time_text,
)
from kcoord.cli.session import EXIT_FAILED, error_text, report_failure, warn
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConsumerGroupDescription, MemberDescription, OffsetSpec
from kcoord.client.types import OffsetAndMetadata, TopicPartition

GROUP = OutputColumn("GROUP", "group")
TYPE = OutputColumn("TYPE", "type")
STATE = OutputColumn("STATE", "state")
CONSUMER = (
    OutputColumn("CONSUMER-ID", "consumer_id"),
    OutputColumn("HOST", "host"),
    OutputColumn("CLIENT-ID", "client_id"),
)
COMMITTED_EPOCH = OutputColumn("LEADER-EPOCH", "leader_epoch")

OFFSETS = (
    GROUP,
    OutputColumn("TOPIC", "topic"),
    OutputColumn("PARTITION", "partition"),
    COMMITTED_EPOCH,
    OutputColumn("CURRENT-OFFSET", "current_offset"),
    OutputColumn("LOG-END-OFFSET", "log_end_offset"),
    OutputColumn("LAG", "lag"),
    *CONSUMER,
)
INSTANCE_ID = OutputColumn("GROUP-INSTANCE-ID", "group_instance_id")
UPGRADED = OutputColumn("UPGRADED", "upgraded", lambda value: plain_text(value).lower())


def assignors_text(value: object) -> str:
    """Formats client-side assignors as `name:0-2,other:-1-0`, and with the reason if it is not 0."""
    if not isinstance(value, list) or not value:
        return "-"
    return ",".join(
        f"{assignor['name']}:{assignor['minimum_version']}-{assignor['maximum_version']}"
        + (f" (reason {assignor['reason']})" if assignor["reason"] else "")
        for assignor in value
    )


CLIENT_ASSIGNORS = OutputColumn("CLIENT-ASSIGNORS", "client_assignors", assignors_text)
METADATA_VERSION = OutputColumn("METADATA-VERSION", "metadata_version")
ASSIGNMENT_ERROR = OutputColumn("ASSIGNMENT-ERROR", "assignment_error")
MEMBERS = (GROUP, CONSUMER[0], INSTANCE_ID, *CONSUMER[1:], OutputColumn("#PARTITIONS", "partitions"))
MEMBERS_VERBOSE = (
    *MEMBERS,
    OutputColumn("CURRENT-EPOCH", "current_epoch"),
    OutputColumn("CURRENT-ASSIGNMENT", "current_assignment", assignment_text),
    OutputColumn("TARGET-EPOCH", "target_epoch"),
    OutputColumn("TARGET-ASSIGNMENT", "target_assignment", assignment_text),
    UPGRADED,
    CLIENT_ASSIGNORS,
    METADATA_VERSION,
    ASSIGNMENT_ERROR,
)
_BEFORE_EPOCHS = (
    GROUP,
    OutputColumn("COORDINATOR (ID)", "coordinator", node_text),
    OutputColumn("ASSIGNMENT-STRATEGY", "assignment_strategy"),
    STATE,
)
MEMBER_COUNT = OutputColumn("#MEMBERS", "members")
STATES = (*_BEFORE_EPOCHS, MEMBER_COUNT)
STATES_VERBOSE = (
    *_BEFORE_EPOCHS,
    OutputColumn("GROUP-EPOCH", "group_epoch"),
    OutputColumn("TARGET-ASSIGNMENT-EPOCH", "target_assignment_epoch"),
    MEMBER_COUNT,
    OutputColumn("GROUP-CREATION-TIME", "group_creation_time_ms", time_text),
)
TYPES = (GROUP, TYPE)

_REBALANCING = ("PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling")


async def list_groups(admin: AdminClient, options: argparse.Namespace) -> int:
    groups = await admin.list_consumer_groups(states=states_of(options), types=types_of(options))
    columns = [GROUP]
    if options.type is not None or options.json:
        columns.append(TYPE)
    if options.state is not None or options.json:
        columns.append(STATE)
    rows = [{"group": group.group_id, "type": group.group_type.capitalize(), "state": group.state} for group in groups]
    if len(columns) > 1:
        print_rows(columns, rows, as_json=options.json)
    else:
        for row in rows:
            print(row["group"])
    return 0


async def describe_groups(admin: AdminClient, options: argparse.Namespace) -> int:
    group_ids = list(dict.fromkeys(options.group)) or [group.group_id for group in await admin.list_consumer_groups()]
    results = await admin.describe_consumer_groups(group_ids)
    for group_id, error in results.errors.items():
        report_failure(f"{group_id}: {error_text(error)}")
    groups = [results.values[group_id] for group_id in group_ids if group_id in results.values]
    if options.members:
        columns: Sequence[OutputColumn] = MEMBERS_VERBOSE if options.verbose or options.json else MEMBERS
        tables = [member_rows(group) for group in groups]
    elif options.state is not None:
        columns = STATES_VERBOSE if options.verbose or options.json else STATES
        tables = [[state_row(group)] for group in groups]
    elif options.type is not None:
        columns = TYPES
        tables = [[{"group": group.group_id, "type": group.group_type} for group in groups]]
    else:
        is_short = not (options.verbose or options.json)
        columns = [column for column in OFFSETS if column is not COMMITTED_EPOCH or not is_short]
        tables = await _offset_tables(admin, groups)
    _print_tables(columns, tables, groups, options)
    return EXIT_FAILED if results.errors else 0


def _print_tables(
    columns: Sequence[OutputColumn],
    tables: Iterable[Sequence[Row]],
    groups: Iterable[ConsumerGroupDescription],
    options: argparse.Namespace,
) -> None:
    """Prints one table per group, as Kafka's tool does. JSON is a single list."""
    if options.json:
        print_json([{column.key: row[column.key] for column in columns} for rows in tables for row in rows])
        return
    if options.state is None and options.type is None:
        for group in groups:
            _warn_about_state(group)
    for number, rows in enumerate(rows for rows in tables if rows):
        if number:
            print()
        print_rows([column for column in columns if _is_shown(column, rows)], rows, as_json=False)


def _is_shown(column: OutputColumn, rows: Sequence[Row]) -> bool:
    """Whether the column is shown.

    As in Kafka's tool, instance ids are shown only for groups with static members, and UPGRADED only for groups with
    members of both protocols. The columns of client-side assignors are shown only for groups that have such values.
    """
    if column in (INSTANCE_ID, CLIENT_ASSIGNORS, ASSIGNMENT_ERROR):
        return any(row[column.key] for row in rows)
    if column is METADATA_VERSION:
        return any(row[column.key] is not None for row in rows)
    return column is not UPGRADED or {row[column.key] for row in rows} >= {True, False}


def _warn_about_state(group: ConsumerGroupDescription) -> None:
    if not group.members:
        warn(f"Consumer group '{group.group_id}' has no active members.")
    elif group.state in _REBALANCING:
        warn(f"Consumer group '{group.group_id}' is rebalancing.")


def state_row(group: ConsumerGroupDescription) -> Row:
    node = group.coordinator
    return {
        "group": group.group_id,
        "coordinator": {"id": node.node_id, "host": node.host, "port": node.port},
        "assignment_strategy": group.assignor or None,
        "state": group.state,
        "group_epoch": group.group_epoch,
        "target_assignment_epoch": group.target_assignment_epoch,
        "members": len(group.members),
        "group_creation_time_ms": group.group_creation_time_ms,
    }


def member_rows(group: ConsumerGroupDescription) -> list[Row]:
    """Returns a row per member. The target epoch of a member is that of its group; classic groups have none."""
    return [
        {
            "group": group.group_id,
            **_consumer(member),
            "group_instance_id": member.group_instance_id,
            "partitions": len(member.assignment),
            "current_epoch": member.member_epoch,
            "current_assignment": by_topic(member.assignment),
            "target_epoch": group.target_assignment_epoch,
            "target_assignment": None if member.target_assignment is None else by_topic(member.target_assignment),
            "upgraded": member.upgraded,
            "client_assignors": [
                {
                    "name": assignor.name,
                    "minimum_version": assignor.minimum_version,
                    "maximum_version": assignor.maximum_version,
                    "reason": assignor.reason,
                    "metadata_version": assignor.metadata.version,
                    "metadata_bytes": len(assignor.metadata.data),
                }
                for assignor in member.client_assignors
            ],
            "metadata_version": _metadata_version(member),
            "assignment_error": member.assignment_metadata.error,
        }
        for member in sorted(group.members, key=lambda member: (-len(member.assignment), member.member_id))
    ]


def _metadata_version(member: MemberDescription) -> int | None:
    """Returns the version of the metadata of the current assignment, None if it has none."""
    metadata = member.assignment_metadata
    return None if metadata.version < 0 and not metadata.data else metadata.version


def _consumer(member: MemberDescription | None) -> dict[str, object]:
    if member is None:
        return {"consumer_id": None, "host": None, "client_id": None}
    return {"consumer_id": member.member_id, "host": member.host, "client_id": member.client_id}


async def _offset_tables(admin: AdminClient, groups: Sequence[ConsumerGroupDescription]) -> list[list[Row]]:
    committed = (await admin.list_consumer_group_offsets([group.group_id for group in groups])).all() if groups else {}
    partitions = {partition for group in groups for partition in (*committed[group.group_id], *_assigned(group))}
    ends = await admin.list_offsets(dict.fromkeys(partitions, OffsetSpec.latest())) if partitions else None
    end_offsets = {} if ends is None else {partition: end.offset for partition, end in ends.values.items()}
    return [offset_rows(group, committed[group.group_id], end_offsets) for group in groups]


def _assigned(group: ConsumerGroupDescription) -> Iterable[TopicPartition]:
    return (partition for member in group.members for partition in member.assignment)


def offset_rows(
    group: ConsumerGroupDescription,
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    end_offsets: Mapping[TopicPartition, int],
) -> list[Row]:
    """Returns a row per partition that is assigned or has an offset, then a row per member without partitions."""
    owners = {partition: member for member in group.members for partition in member.assignment}
    rows: list[Row] = []
    with_offset = (partition for partition, offset in committed.items() if offset is not None)
    for partition in sorted({*owners, *with_offset}):
        offset = committed.get(partition)
        end = end_offsets.get(partition)
        rows.append(
            {
                "group": group.group_id,
                "topic": partition.topic,
                "partition": partition.partition,
                "leader_epoch": offset.leader_epoch if offset is not None and offset.leader_epoch >= 0 else None,
                "current_offset": None if offset is None else offset.offset,
                "log_end_offset": end,
                "lag": None if offset is None or end is None else end - offset.offset,
                **_consumer(owners.get(partition)),
            }
        )
    idle = (member for member in group.members if not member.assignment)
    nothing = dict.fromkeys(column.key for column in OFFSETS)
    rows += ({**nothing, "group": group.group_id, **_consumer(member)} for member in idle)
    return rows
