# SPDX-License-Identifier: Apache-2.0
"""`kcoord wait --for ready|group-stable|topic`: waits for a condition of brokers, a group or a topic, for scripts.

Exit code 0: the condition is met. 1: the timeout has passed, or an error shows that waiting is useless. 2: the command
line is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kcoord.cli.options import parse_options
from kcoord.cli.output import print_json
from kcoord.cli.session import (
    EXIT_FAILED,
    add_connection_options,
    add_json_option,
    client_config,
    error_text,
    report_failure,
    run_safely,
)
from kcoord.client.admin.client import AdminClient
from kcoord.client.config import AdminConfig
from kcoord.client.errors import TimeoutException, is_retriable
from kcoord_protocol.errors import Errors, KafkaError

READY, GROUP_STABLE, TOPIC = "ready", "group-stable", "topic"
_LOOK_SECONDS: Final = 0.1
_BACKOFF_MS: Final = "200"
_PROBE_GROUP: Final = "kcoord-wait"
"""A group that does not exist. A coordinator that returns GROUP_ID_NOT_FOUND has loaded its partition."""
_STABLE_STATE: Final = "Stable"

Look = Callable[[AdminClient, argparse.Namespace, int], Awaitable[str | None]]
"""Checks a condition once, with a timeout in ms. Returns what is missing, or None if the condition is met."""


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_safely(parser.prog, lambda: _wait(options))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord wait",
        description="Waits until the condition of --for is met, for scripts. The exit code is 0 if it is met, and 1 "
        "after --timeout or if it cannot be met.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--for",
        dest="condition",
        required=True,
        choices=(READY, GROUP_STABLE, TOPIC),
        help="ready: all brokers respond and their group coordinators are active; group-stable: --group is in state "
        "Stable; topic: --topic exists and every partition has a leader",
    )
    parser.add_argument("--group", metavar="GROUP", help="the group; with ready: check the coordinator of this group")
    parser.add_argument("--members", type=int, metavar="N", help="with group-stable: the group has at least N members")
    parser.add_argument("--topic", metavar="TOPIC")
    add_connection_options(parser, "how long to wait")
    add_json_option(parser)
    return parser


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    if options.condition == GROUP_STABLE and options.group is None:
        return f"--for {GROUP_STABLE} needs --group"
    if options.condition == TOPIC and options.group is not None:
        return f"--group does not go with --for {TOPIC}"
    if (options.condition == TOPIC) != (options.topic is not None):
        return f"--topic and --for {TOPIC} go together"
    if options.members is not None and (options.condition != GROUP_STABLE or options.members < 1):
        return f"--members goes with --for {GROUP_STABLE} and is at least 1"
    return None


async def _wait(options: argparse.Namespace) -> int:
    # Often the broker is still starting. The default backoff would delay the script by up to a second.
    backoff = {"reconnect.backoff.max.ms": _BACKOFF_MS, "retry.backoff.max.ms": _BACKOFF_MS}
    config = client_config(AdminConfig, options, **backoff)
    look: Look = {READY: _look_at_brokers, GROUP_STABLE: _look_at_group, TOPIC: _look_at_topic}[options.condition]
    began = time.monotonic()
    try:
        async with AdminClient(config) as admin:
            missing = await _until(admin, look, options, began + options.timeout / 1000)
    except KafkaError as error:  # no broker could be reached
        missing = error_text(error)
    waited_ms = round((time.monotonic() - began) * 1000)
    if options.json:
        print_json({"for": options.condition, "met": missing is None, "waited_ms": waited_ms, "reason": missing})
    if missing is not None:
        report_failure(missing)
        return EXIT_FAILED
    if not options.json:
        print(f"{_subject(options)} after {waited_ms} ms")
    return 0


def _subject(options: argparse.Namespace) -> str:
    if options.condition == TOPIC:
        return f"Topic '{options.topic}' has leaders for all partitions"
    return f"Group '{options.group}' is stable" if options.condition == GROUP_STABLE else "The brokers are ready"


async def _until(admin: AdminClient, look: Look, options: argparse.Namespace, end: float) -> str | None:
    """Checks until the condition is met, the time has passed, or an error is not retriable."""
    missing: str | None = None
    while (left_ms := round((end - time.monotonic()) * 1000)) > 0:
        try:
            missing = await look(admin, options, left_ms)
            if missing is None:
                return None
        except TimeoutException as error:
            # The last check may have had too little time, so the result of an earlier one is more useful.
            missing = missing or error_text(error)
        except KafkaError as error:
            missing = error_text(error)
            if not is_retriable(error):
                return missing
        await asyncio.sleep(min(_LOOK_SECONDS, max(end - time.monotonic(), 0)))
    return f"{missing or 'the timeout was too short for a request'}, after {options.timeout} ms"


async def _look_at_brokers(admin: AdminClient, options: argparse.Namespace, left_ms: int) -> str | None:
    """Lists the groups of every broker, which fails while a broker loads a partition."""
    await admin.list_groups(timeout_ms=left_ms)
    group_id = options.group or _PROBE_GROUP
    error = (await admin.describe_consumer_groups([group_id], timeout_ms=left_ms)).error(group_id)
    if error is not None and error.error is not Errors.GROUP_ID_NOT_FOUND:
        raise error
    return None


async def _look_at_group(admin: AdminClient, options: argparse.Namespace, left_ms: int) -> str | None:
    results = await admin.describe_consumer_groups([options.group], timeout_ms=left_ms)
    error = results.error(options.group)
    if error is not None:
        if error.error is not Errors.GROUP_ID_NOT_FOUND:
            raise error
        return f"group '{options.group}' does not exist"
    group = results[options.group]
    if group.state != _STABLE_STATE:
        return f"group '{options.group}' is in state {group.state}"
    if len(group.members) < (options.members or 1):
        return f"group '{options.group}' has {len(group.members)} of {options.members} members"
    return None


async def _look_at_topic(admin: AdminClient, options: argparse.Namespace, left_ms: int) -> str | None:
    results = await admin.describe_topics([options.topic], timeout_ms=left_ms)
    error = results.error(options.topic)
    if error is not None and error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
        return f"topic '{options.topic}' does not exist"
    leaderless = [partition.partition for partition in results[options.topic].partitions if partition.leader is None]
    return f"topic '{options.topic}' has no leader for partitions {leaderless}" if leaderless else None
