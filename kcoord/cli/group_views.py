# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups explain` and `kcoord groups watch`: the state of a group, and its changes."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator

from kcoord.cli.group_insight import GroupInsight, InsightSettings, changes, explain
from kcoord.cli.old_forms import add_old_positional, require_group
from kcoord.cli.options import seconds
from kcoord.cli.output import print_json
from kcoord.cli.session import AdminWork, add_connection_options, add_json_option, run_with_admin
from kcoord.cli.table import current_time_ms, format_time
from kcoord.cli.terminal import console, is_terminal
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, ConsumerGroupDescription
from kcoord.config.broker_settings import KNOWN_CONSUMER_ASSIGNORS
from kcoord_protocol.errors import Errors, KafkaError

_ASSIGNORS = "group.consumer.assignors"
_SESSION_TIMEOUT = "consumer.session.timeout.ms"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explaining = commands.add_parser(
        "explain",
        help="explain the state of a group",
        description="Explains why a group has its assignor, which members delay a rebalance, and when static members "
        "expire.",
    )
    watching = commands.add_parser(
        "watch",
        help="show the changes of a group as they happen",
        description="Shows which members join and leave, why there is a new epoch, and which partitions change their "
        "owner.",
    )
    for parser in (explaining, watching):
        parser.add_argument("--group", metavar="GROUP", help="the group, of either protocol")
        add_old_positional(parser, "--group", "GROUP")
        add_connection_options(parser)
        add_json_option(parser)
    watching.add_argument(
        "--interval",
        type=seconds(may_be_0=False),
        default=1.0,
        metavar="SECONDS",
        help="time between two requests (default 1)",
    )
    watching.add_argument(
        "--duration", type=seconds(may_be_0=True), metavar="SECONDS", help="end after this time (default: Ctrl-C)"
    )
    explaining.set_defaults(run=lambda options: _run(explaining, options, _explain))
    watching.set_defaults(run=lambda options: _run(watching, options, _watch))


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace, work: AdminWork) -> int:
    require_group(parser, options)
    return run_with_admin(parser.prog, options, work)


async def _explain(admin: AdminClient, options: argparse.Namespace) -> int:
    group = (await admin.describe_consumer_groups([options.group]))[options.group]
    findings = list(explain(group, await _settings(admin, group)))
    if options.json:
        print_json([finding._asdict() for finding in findings])
        return 0
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        print(f"{finding.subject:<{width}}  {finding.text}")
    return 0


async def _settings(admin: AdminClient, group: ConsumerGroupDescription) -> InsightSettings:
    broker = ConfigResource(ConfigResourceType.BROKER, str(group.coordinator.node_id))
    own = ConfigResource(ConfigResourceType.GROUP, group.group_id)
    configs = (await admin.describe_configs([broker, own])).values
    assignors = configs[broker].get(_ASSIGNORS) if broker in configs else None
    timeout = configs[own].get(_SESSION_TIMEOUT) if own in configs else None
    return InsightSettings(
        [KNOWN_CONSUMER_ASSIGNORS.get(name.strip(), name.strip()) for name in assignors.value.split(",")]
        if assignors is not None and assignors.value
        else None,
        int(timeout.value) if timeout is not None and timeout.value else None,
    )


async def _watch(admin: AdminClient, options: argparse.Namespace) -> int:
    """Redraws a screen at a terminal, and otherwise prints a line per change."""
    if options.json or not is_terminal():
        async for _, findings in _looks(admin, options):
            for finding in findings:
                _print_finding(finding, options)
        return 0
    from rich.live import Live

    from kcoord.cli.group_screen import GroupScreen

    screen = GroupScreen(options.group)
    with Live(console=console(), auto_refresh=False, vertical_overflow="crop") as live:
        async for group, findings in _looks(admin, options):
            screen.look(group, findings, current_time_ms())
            live.update(screen.show(current_time_ms()), refresh=True)
    return 0


async def _looks(
    admin: AdminClient, options: argparse.Namespace
) -> AsyncIterator[tuple[ConsumerGroupDescription | None, list[GroupInsight]]]:
    """Yields the group and its changes since the previous interval, until the duration has passed."""
    end = None if options.duration is None else time.monotonic() + options.duration
    before = await _describe(admin, options.group)
    yield before, list(changes(None, before)) if before is not None else [GroupInsight("group", "does not exist yet")]
    while end is None or time.monotonic() + options.interval <= end:
        await asyncio.sleep(options.interval)
        after = await _describe(admin, options.group)
        yield after, list(changes(before, after))
        before = after


async def _describe(admin: AdminClient, group_id: str) -> ConsumerGroupDescription | None:
    results = await admin.describe_consumer_groups([group_id])
    error: KafkaError | None = results.error(group_id)
    if error is not None and error.error is Errors.GROUP_ID_NOT_FOUND:
        return None
    return results[group_id]


def _print_finding(finding: GroupInsight, options: argparse.Namespace) -> None:
    """Prints a change immediately, even into a pipe."""
    time_ms = current_time_ms()
    if options.json:
        print(json.dumps({"time_ms": time_ms, **finding._asdict()}, ensure_ascii=False), flush=True)
    else:
        print(f"{format_time(time_ms)}  {finding.subject:<7}  {finding.text}", flush=True)
