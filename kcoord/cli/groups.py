# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups`: explain, watch and simulate groups, list when offsets expire, restore offsets.

This module has `restore`. It reads the records that the group's partition of the log still has, from the broker or
from a folder such as a backup. Then it commits the old offsets through the broker. It commits nothing if the
group has members, and it deletes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kcoord.cli.log_reader import LogReader, instance_in_front, offsets_topic
from kcoord.cli.old_forms import add_old_format
from kcoord.cli.options import moment
from kcoord.cli.session import CommandError, add_connection_options, error_text, report_failure, run_with_admin
from kcoord.cli.table import format_time
from kcoord.cli.terminal import print_table
from kcoord.client.admin.client import AdminClient
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord_protocol.errors import DecodeError, Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.logtools.restore import KnownTopic, PartitionKey, PastOffsets, RestoreRow

_COMMIT_PARTITIONS: Final = 1000
_WITHOUT_MEMBERS: Final = ("Empty", "Dead")
_NO_TOPIC: Final = (Errors.UNKNOWN_TOPIC_OR_PARTITION, Errors.INVALID_TOPIC_EXCEPTION)


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    code = options.run(options)
    assert isinstance(code, int)
    return code


def make_parser() -> argparse.ArgumentParser:
    from kcoord.cli.group_expiry import add_command as add_expiry
    from kcoord.cli.group_simulation import add_command as add_simulation
    from kcoord.cli.group_views import add_commands

    parser = argparse.ArgumentParser(
        prog="kcoord groups",
        description="Explain, watch and simulate groups, list when offsets expire, restore offsets.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    restore = commands.add_parser(
        "restore",
        help="restore the offsets that a group had at a given time",
        description="Restores the offsets that a group had at a given time and that were deleted, expired or "
        "overwritten since. It reads the log of the groups from the broker, or from a folder such as a backup, and "
        "commits through the broker. Offsets whose records compaction has removed are lost.",
    )
    restore.add_argument("--group", required=True, metavar="GROUP")
    restore.add_argument(
        "--to",
        required=True,
        type=moment,
        metavar="TIME",
        help="ISO 8601 (UTC by default), ms since 1970, or an age such as 15m, 2h",
    )
    restore.add_argument("--from-folder", metavar="DIR", help="read the records from a data folder or a backup")
    restore.add_argument("--dry-run", action="store_true", help="only show the actions")
    add_connection_options(restore)
    restore.add_argument(
        "--json", dest="format", action="store_const", const="json", default="table", help="print an object per line"
    )
    add_old_format(restore, "format")
    restore.set_defaults(run=lambda options: run_with_admin("kcoord groups restore", options, _restore))
    add_commands(commands)
    add_simulation(commands)
    add_expiry(commands)
    return parser


async def _restore(admin: AdminClient, options: argparse.Namespace) -> int:
    from kcoord.logtools.restore import COMMITTING, plan_restore

    time_ms = round(options.to.timestamp() * 1000)
    state = await _state(admin, options.group)
    if state not in _WITHOUT_MEMBERS:
        raise CommandError(f"group {options.group} is {state}: stop its members first")
    past = await _offsets_at(admin, options, time_ms)
    committed = (await admin.list_consumer_group_offsets([options.group]))[options.group]
    present: dict[PartitionKey, int] = {key: offset.offset for key, offset in committed.items() if offset is not None}
    rows = plan_restore(past, present, await _known_topics(admin, {topic for topic, _ in past.offsets}))
    failed = {} if options.dry_run else await _commit(admin, options.group, rows)
    _print(rows, options.format)
    changes = sum(row.action in COMMITTING for row in rows)
    done = "would be" if options.dry_run else "were"
    print(f"{options.group}: {changes} offsets {done} restored as of {format_time(time_ms)}", file=sys.stderr)
    for key, failure in failed.items():
        report_failure(f"{key} was not committed: {error_text(failure)}")
    return 1 if failed or not past.offsets else 0


async def _state(admin: AdminClient, group_id: str) -> str:
    """Returns the state of a group, Dead if it does not exist."""
    results = await admin.describe_consumer_groups([group_id])
    error: KafkaError | None = results.error(group_id)
    return "Dead" if error is not None and error.error is Errors.GROUP_ID_NOT_FOUND else results[group_id].state


async def _offsets_at(admin: AdminClient, options: argparse.Namespace, time_ms: int) -> PastOffsets:
    """Returns the offsets that the group's partition has for that time, in the broker or in --from-folder."""
    from kcoord.logtools.restore import batches_in_folder, offsets_at
    from kcoord.runtime.serde import partition_for
    from kcoord.storage.errors import StorageError
    from kcoord.storage.file_system import RealFileSystem

    read = partial(offsets_at, group_id=options.group, time_ms=time_ms)
    try:
        if options.from_folder is not None:
            return read(batches_in_folder(RealFileSystem(), os.path.abspath(options.from_folder), options.group))
        topic = await offsets_topic(admin, await instance_in_front(admin.config))
        if topic is None:
            raise CommandError("the brokers have no committed offsets: there is no topic __consumer_offsets")
        async with LogReader(admin.config) as reader:
            partition = TopicPartition(topic.name, partition_for(options.group, len(topic.partitions)))
            return await reader.read(partition, read)
    except (StorageError, DecodeError, ValueError) as error:
        raise CommandError(str(error)) from error


async def _known_topics(admin: AdminClient, names: Iterable[str]) -> dict[str, KnownTopic]:
    """Returns those of the topics that exist. Raises the error if that is not known of a topic."""
    from kcoord.logtools.restore import KnownTopic

    results = await admin.describe_topics(names)
    for error in results.errors.values():
        if error.error not in _NO_TOPIC:
            raise error
    return {name: KnownTopic(topic.topic_id, len(topic.partitions)) for name, topic in results.values.items()}


async def _commit(admin: AdminClient, group_id: str, rows: Iterable[RestoreRow]) -> dict[TopicPartition, KafkaError]:
    """Commits the rows in several requests. Returns the error of each partition that failed."""
    from kcoord.logtools.restore import COMMITTING

    failed: dict[TopicPartition, KafkaError] = {}
    committing = [row for row in rows if row.action in COMMITTING]
    for start in range(0, len(committing), _COMMIT_PARTITIONS):
        offsets: dict[TopicPartition, OffsetAndMetadata | int] = {}
        for row in committing[start : start + _COMMIT_PARTITIONS]:
            assert row.then is not None
            offsets[TopicPartition(row.topic, row.partition)] = OffsetAndMetadata(
                row.then.offset, row.then.metadata, row.then.leader_epoch
            )
        failed |= (await admin.alter_consumer_group_offsets(group_id, offsets)).errors
    return failed


def _print(rows: Sequence[RestoreRow], form: str) -> None:
    if form == "json":
        for row in rows:
            print(json.dumps(_json_row(row)))
        return
    titles = ("TOPIC", "PARTITION", "THEN", "NOW", "COMMITTED", "DELETED", "ACTION")
    print_table(titles, map(_table_row, rows))


def _table_row(row: RestoreRow) -> tuple[object, ...]:
    then = row.then.offset if row.then is not None else None
    committed = format_time(row.then.written_ms) if row.then is not None else None
    deleted = None
    if row.deletion is not None:
        by = f"by {row.deletion.principal}" if row.deletion.principal else ""
        deleted = " ".join(filter(None, (format_time(row.deletion.written_ms), row.deletion.why, by)))
    return row.topic, row.partition, then, row.now, committed, deleted, row.action.value


def _json_row(row: RestoreRow) -> dict[str, object]:
    return {
        "topic": row.topic,
        "partition": row.partition,
        "then": row.then.offset if row.then is not None else None,
        "now": row.now,
        "committedMs": row.then.written_ms if row.then is not None else None,
        "deletedMs": row.deletion.written_ms if row.deletion is not None else None,
        "deletedBecause": row.deletion.why if row.deletion is not None else None,
        "deletedBy": row.deletion.principal if row.deletion is not None else None,
        "action": row.action.name.lower(),
    }
