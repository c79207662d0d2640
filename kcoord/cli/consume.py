# SPDX-License-Identifier: Apache-2.0
"""`kcoord consume TOPIC...`: prints the records of topics, until --max-messages, --idle-timeout or Ctrl-C.

With --group the command joins a group and prints the records of its assigned partitions. Without --group it prints all
partitions, or one with --partition.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from kcoord.cli.options import MOST_LONG, add_topics, parse_options, whole_number
from kcoord.cli.session import CommandError, add_connection_options, client_config, run_safely
from kcoord.client.config import ConsumerConfig
from kcoord.client.consumer.client import Consumer
from kcoord.client.types import ConsumerRecord, TopicPartition

_MAX_RECORDS_PER_POLL = 500
_POSITIONS = ("earliest", "latest")


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_safely(parser.prog, lambda: _consume(options))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord consume", description=__doc__, allow_abbrev=False)
    add_connection_options(parser)
    add_topics(parser)
    parser.add_argument(
        "--include",
        metavar="REGEX",
        help="subscribe to matching topics instead of names, in a group (RE2, whole names)",
    )
    parser.add_argument(
        "--group",
        metavar="GROUP",
        help="join this group and commit offsets; default: group.id of --command-config",
    )
    parser.add_argument("--from-beginning", action="store_true", help="begin with the first record instead of the end")
    parser.add_argument(
        "--partition", type=whole_number(0), metavar="N", help="print one partition of one topic, without --group"
    )
    parser.add_argument(
        "--offset", metavar="OFFSET", help="start offset in that partition: earliest, latest or a number"
    )
    parser.add_argument("--max-messages", type=whole_number(0), metavar="N", help="end after N records")
    parser.add_argument("--idle-timeout", type=whole_number(0), metavar="MS", help="end after MS without a record")
    parser.add_argument(
        "--isolation-level",
        choices=("read_uncommitted", "read_committed"),
        help="(default: isolation.level of --command-config, else read_uncommitted)",
    )
    parser.add_argument("--key-separator", metavar="TEXT", help="print the key, then TEXT, then the value")
    parser.add_argument("--json", action="store_true", help="print a JSON object per line, with all fields of a record")
    return parser


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    if bool(options.topics) == (options.include is not None):
        return "a TOPIC or --include is needed, not both"
    if options.include is not None and options.group is None and options.command_config is None:
        return "--include needs --group"
    if options.partition is not None and (options.group is not None or len(options.topics) != 1):
        return "--partition goes with one TOPIC, without --group"
    if options.offset is not None:
        if options.partition is None or options.from_beginning:
            return "--offset goes with --partition, without --from-beginning"
        if options.offset not in _POSITIONS and not _is_offset(options.offset):
            return f"--offset: {options.offset!r} is not {', '.join(_POSITIONS)} or a number from 0 to {MOST_LONG}"
    return None


def _is_offset(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(MOST_LONG)) and int(text) <= MOST_LONG


async def _consume(options: argparse.Namespace) -> int:
    config = _config(options)
    if options.partition is None:
        options.group = config.group_id
    async with Consumer(config) as consumer:
        await _choose(consumer, options)
        left = options.max_messages
        while left is None or left > 0:
            most = _MAX_RECORDS_PER_POLL if left is None else min(left, _MAX_RECORDS_PER_POLL)
            records = await consumer.poll(options.idle_timeout, max_records=most)
            if not records:
                break
            for record in records:
                print(record_line(record, options))
            sys.stdout.flush()
            left = None if left is None else left - len(records)
    return 0


def _config(options: argparse.Namespace) -> ConsumerConfig:
    settings = {}
    if options.from_beginning or options.offset in _POSITIONS:
        settings["auto.offset.reset"] = "latest" if options.offset == "latest" else "earliest"
    if options.isolation_level is not None:
        settings["isolation.level"] = options.isolation_level
    if options.group is not None:
        settings["group.id"] = options.group
    if options.partition is not None:
        # The group.id of the file must not get offsets from a command that only prints a partition.
        settings["enable.auto.commit"] = "false"
    return client_config(ConsumerConfig, options, **settings)


async def _choose(consumer: Consumer, options: argparse.Namespace) -> None:
    if options.group is not None:
        consumer.subscribe(options.topics, pattern=options.include)
        return
    if options.include is not None:
        raise CommandError("--include needs --group, or a group.id in the file of --command-config")
    partitions = [
        TopicPartition(topic, partition)
        for topic in options.topics
        for partition in await consumer.partitions_for(topic)
        if options.partition in (None, partition)
    ]
    if not partitions:
        raise CommandError(f"{options.topics[0]} has no partition {options.partition}")
    consumer.assign(partitions)
    if options.offset is not None and options.offset.isdecimal():
        consumer.seek(partitions[0], int(options.offset))


def record_line(record: ConsumerRecord, options: argparse.Namespace) -> str:
    """Returns the output line of a record. Bytes that are not UTF-8 are escaped, so that the line is text."""
    if options.json:
        return json.dumps(
            {
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "timestamp_ms": record.timestamp_ms,
                "key": _json_text(record.key),
                "value": _json_text(record.value),
                "headers": {name: _json_text(value) for name, value in record.headers},
            },
            ensure_ascii=False,
        )
    if options.key_separator is None:
        return _text(record.value)
    return f"{_text(record.key)}{options.key_separator}{_text(record.value)}"


def _text(data: bytes | None) -> str:
    return "null" if data is None else data.decode("utf-8", "backslashreplace")


def _json_text(data: bytes | None) -> str | None:
    return None if data is None else _text(data)
