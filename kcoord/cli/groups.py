# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups`: explain and watch groups, list when offsets expire, restore offsets.

This module has `restore`. It reads the records that the group's partition of `__consumer_offsets` still has, from the
broker or from a folder such as a backup. Then it commits the old offsets through the broker. It commits nothing if the
group has members, and it deletes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kcoord.cli.old_forms import add_old_format
from kcoord.cli.table import current_time_ms, format_time, parse_time
from kcoord.cli.terminal import print_table
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC

if TYPE_CHECKING:
    from kcoord.cli.blocking_client import BlockingClient
    from kcoord.logtools.restore import KnownTopic, RestoreRow

DEFAULT_ADDRESS = "127.0.0.1:9092"
_COMMIT_PARTITIONS = 1000


def main(arguments: Sequence[str]) -> int:
    from kcoord.cli.blocking_client import RequestFailed
    from kcoord.storage.errors import StorageError
    from kcoord_protocol.errors import DecodeError

    options = make_parser().parse_args(arguments)
    try:
        code = options.run(options)
    except (RequestFailed, StorageError, OSError, DecodeError, ValueError) as error:
        print(f"kcoord groups: {error}", file=sys.stderr)
        return 1
    assert isinstance(code, int)
    return code


def make_parser() -> argparse.ArgumentParser:
    from kcoord.cli.group_expiry import add_command as add_expiry
    from kcoord.cli.group_views import add_commands

    parser = argparse.ArgumentParser(
        prog="kcoord groups", description="Explain and watch groups, list when offsets expire, restore offsets."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    restore = commands.add_parser(
        "restore",
        help="restore the offsets that a group had at a given time",
        description="Restores the offsets that a group had at a given time and that were deleted, expired or "
        "overwritten since. It reads __consumer_offsets from the broker, or from a folder such as a backup, and "
        "commits through the broker. Offsets whose records compaction has removed are lost.",
    )
    restore.add_argument("--group", required=True, metavar="GROUP")
    restore.add_argument(
        "--to",
        required=True,
        metavar="TIME",
        help="ISO 8601 (UTC by default), ms since 1970, or an age such as 15m, 2h",
    )
    restore.add_argument(
        "--bootstrap-server",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"brokers to connect to, separated by commas (default {DEFAULT_ADDRESS})",
    )
    restore.add_argument("--from-folder", metavar="DIR", help="read the records from a data folder or a backup")
    restore.add_argument("--dry-run", action="store_true", help="only show the actions")
    restore.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="timeout of each request (default 30)"
    )
    restore.add_argument(
        "--json", dest="format", action="store_const", const="json", default="table", help="print an object per line"
    )
    add_old_format(restore, "format")
    restore.set_defaults(run=_restore)
    add_commands(commands)
    add_expiry(commands)
    return parser


def _restore(options: argparse.Namespace) -> int:
    from kcoord.cli.blocking_client import BlockingClient
    from kcoord.logtools.restore import COMMITTING, offsets_at, plan_restore

    time_ms = parse_time(options.to, current_time_ms())
    with BlockingClient.of_first(options.bootstrap_server, options.timeout) as bootstrap:
        coordinator = bootstrap.coordinator_of(options.group)
    with BlockingClient(coordinator, options.timeout) as client:
        state = client.group_state(options.group)
        if state not in (None, "Empty", "Dead"):
            print(f"kcoord groups: group {options.group} is {state}: stop its members first", file=sys.stderr)
            return 1
        past = offsets_at(_history(options, client), options.group, time_ms)
        present = client.committed(options.group)
        names = sorted({topic for topic, _ in past.offsets})
        rows = plan_restore(past, present, _known_topics(client, names))
        failed = [] if options.dry_run else list(_commit(client, options.group, rows))
    _print(rows, options.format)
    changes = sum(row.action in COMMITTING for row in rows)
    done = "would be" if options.dry_run else "were"
    print(f"{options.group}: {changes} offsets {done} restored as of {format_time(time_ms)}", file=sys.stderr)
    for line in failed:
        print(f"kcoord groups: {line}", file=sys.stderr)
    return 1 if failed or not past.offsets else 0


def _history(options: argparse.Namespace, client: BlockingClient) -> Iterator[bytes]:
    """Returns the batches of the group's partition."""
    from kcoord.cli.blocking_client import RequestFailed
    from kcoord.logtools.restore import batches_in_folder
    from kcoord.runtime.serde import partition_for
    from kcoord.storage.file_system import RealFileSystem

    if options.from_folder is not None:
        return batches_in_folder(RealFileSystem(), os.path.abspath(options.from_folder), options.group)
    topics = client.topics([GROUP_METADATA_TOPIC])
    if not topics:
        raise RequestFailed(f"there is no topic {GROUP_METADATA_TOPIC}")
    return client.batches(GROUP_METADATA_TOPIC, partition_for(options.group, len(topics[0].partitions)))


def _known_topics(client: BlockingClient, names: list[str]) -> dict[str, KnownTopic]:
    from kcoord.logtools.restore import KnownTopic

    topics = {}
    for topic in client.topics(names) if names else ():
        assert topic.name is not None
        topics[topic.name] = KnownTopic(topic.topic_id, len(topic.partitions))
    return topics


def _commit(client: BlockingClient, group_id: str, rows: Iterable[RestoreRow]) -> Iterator[str]:
    """Commits the rows in several requests, and yields a line per failed partition."""
    from kcoord.logtools.restore import COMMITTING
    from kcoord_protocol.errors import Errors
    from kcoord_protocol.messages import OffsetCommitRequest

    committing = [row for row in rows if row.action in COMMITTING]
    for start in range(0, len(committing), _COMMIT_PARTITIONS):
        topics: dict[str, OffsetCommitRequest.OffsetCommitRequestTopic] = {}
        for row in committing[start : start + _COMMIT_PARTITIONS]:
            assert row.then is not None
            topic = topics.setdefault(row.topic, OffsetCommitRequest.OffsetCommitRequestTopic(name=row.topic))
            topic.partitions.append(
                OffsetCommitRequest.OffsetCommitRequestPartition(
                    partition_index=row.partition,
                    committed_offset=row.then.offset,
                    committed_leader_epoch=row.then.leader_epoch,
                    committed_metadata=row.then.metadata,
                )
            )
        for name, partition, error in client.commit(group_id, list(topics.values())):
            if error is not Errors.NONE:
                yield f"{name}-{partition} was not committed: {error.name}"


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
        deleted = " ".join(filter(None, (format_time(row.deletion.written_ms), row.deletion.why)))
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
        "action": row.action.name.lower(),
    }
