# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups expiry`: lists when committed offsets expire, and why (KIP-211).

No response of a broker contains the time of a commit, or the time at which a group became empty. The log contains both.
So the command reads the partitions of the log, and applies the rules of the coordinator with the settings of the
broker.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from kcoord.cli.log_reader import LogReader, instance_in_front, offsets_topic
from kcoord.cli.output import OutputColumn, Row, plain_text, print_rows
from kcoord.cli.session import CommandError, add_connection_options, add_json_option, run_with_admin
from kcoord.cli.table import current_time_ms, format_time
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, TopicDescription
from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.logtools.expiry import ExpiryRow
    from kcoord.metadata.image import MetadataImage

_RETENTION: Final = "offsets.retention.minutes"
_POLICY: Final = "kcoord.offsets.expiration.policy"
_KAFKAS_POLICY: Final = "kafka"
_MS_PER_SECOND: Final = 1000

_WHY: Final = {
    "subscribed": "kept: a member of the group subscribes to the topic",
    "between generations": "kept: the group is between two generations",
    "topics unknown": "kept: the topics that the members read are unknown",
    "pending transaction": "kept: an open transaction commits this offset again",
    "group empty": "{retention} after the group became empty, or a later commit",
    "group empty, unknown since when": "kept: the time the group became empty is unknown; the next check sets it",
    "never had members": "{retention} after the commit: the group never had members",
    "not subscribed": "{retention} after the commit: no member subscribes to the topic",
    "policy kafka": "{retention} after the commit: kcoord.offsets.expiration.policy=kafka",
    "retention of the commit": "{retention} after the commit, which requested this retention (OffsetCommit v2 to v4)",
    "with its last offset": "the group is deleted with its last offset",
    "without offsets": "the group is empty and has no offsets: the next check deletes it",
}

_COLUMNS: Final = (
    OutputColumn("GROUP", "group"),
    OutputColumn("TOPIC", "topic"),
    OutputColumn("PARTITION", "partition"),
    OutputColumn("OFFSET", "offset"),
    OutputColumn("SINCE", "since_ms", lambda value: _time_text(value)),
    OutputColumn("EXPIRES", "expires_ms", lambda value: _time_text(value)),
    OutputColumn("IN", "expires_in_ms", lambda value: _span_text(value)),
    OutputColumn("WHY", "why"),
)
_JSON_COLUMNS: Final = (*_COLUMNS, OutputColumn("", "because"), OutputColumn("", "retention_ms"))


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "expiry",
        help="list when offsets expire, and why",
        description="Lists committed offsets, when they expire, and by which rule of KIP-211. The first check after "
        "that time removes them (offsets.retention.check.interval.ms).",
    )
    parser.add_argument("--group", metavar="GROUP", help="one group (default: all)")
    add_connection_options(parser)
    add_json_option(parser)
    parser.set_defaults(run=lambda options: run_with_admin("kcoord groups expiry", options, _expiry))


async def _expiry(admin: AdminClient, options: argparse.Namespace) -> int:
    instance = await instance_in_front(admin.config)
    topic = await offsets_topic(admin, instance)
    rows: list[Row] = []
    now_ms = current_time_ms()
    for row in await _forecasts(admin, topic, instance, options) if topic is not None else ():
        rows.append(_row(row, now_ms))
    if not rows and options.group is not None:
        raise CommandError(f"group {options.group} does not exist, or has no committed offsets")
    rows.sort(key=lambda row: str(row["group"]))
    print_rows(_JSON_COLUMNS if options.json else _COLUMNS, rows, as_json=options.json)
    return 0


async def _forecasts(
    admin: AdminClient, topic: TopicDescription, instance: int | None, options: argparse.Namespace
) -> list[ExpiryRow]:
    """Returns the rows of the partition of --group, or of all partitions, which are read in order.

    The settings are those of `instance`, or else of the leader, which coordinates the groups of the partition.
    """
    from kcoord.logtools.expiry import forecast, read_groups
    from kcoord.runtime.loader import LoadError
    from kcoord.runtime.serde import partition_for

    image = await _overrides(admin)
    settings: dict[int, BrokerConfig] = {}
    rows: list[ExpiryRow] = []
    count = len(topic.partitions)
    async with LogReader(admin.config) as reader:
        for number in range(count) if options.group is None else [partition_for(options.group, count)]:
            leader = topic.partitions[number].leader
            partition = TopicPartition(topic.name, number)
            if leader is None:
                raise CommandError(f"{partition} has no leader now")
            coordinator = leader.node_id if instance is None else instance
            if coordinator not in settings:
                settings[coordinator] = await _settings(admin, coordinator)
            try:
                history = await reader.read(partition, read_groups)
            except LoadError as error:
                raise CommandError(f"{partition}: {error}") from error
            rows += forecast(history, settings[coordinator], image, options.group)
    return rows


async def _settings(admin: AdminClient, node_id: int) -> BrokerConfig:
    """Returns the broker's settings of expiration. A broker without the policy setting has Kafka's policy."""
    from kcoord.config import BrokerConfig

    broker = ConfigResource(ConfigResourceType.BROKER, str(node_id))
    entries = (await admin.describe_configs({broker: [_RETENTION, _POLICY]}))[broker]
    values = {key: entry.value for key, entry in entries.items() if entry.value is not None}
    return BrokerConfig.from_properties({_POLICY: _KAFKAS_POLICY} | values)


async def _overrides(admin: AdminClient) -> MetadataImage:
    """Returns an image with the retentions that single groups have."""
    from kcoord.coordinator.group.offsets.expiration import GROUP_RETENTION_KEY
    from kcoord.metadata.image import GROUP_RESOURCE, MetadataImage

    groups = await _groups_with_configs(admin)
    configs = (await admin.describe_configs({key: [GROUP_RETENTION_KEY] for key in groups})).values if groups else {}
    image = MetadataImage.empty()
    image.configs = {
        (GROUP_RESOURCE, group.name): {GROUP_RETENTION_KEY: entry.value}
        for group, entries in configs.items()
        if (entry := entries.get(GROUP_RETENTION_KEY)) is not None and entry.value is not None and not entry.is_default
    }
    return image


async def _groups_with_configs(admin: AdminClient) -> list[ConfigResource]:
    try:
        return await admin.list_config_resources([ConfigResourceType.GROUP])
    except KafkaError as error:
        # A broker before Kafka 4.1 cannot list them, and has no retention per group either.
        if error.error is Errors.UNSUPPORTED_VERSION:
            return []
        raise


def _row(row: ExpiryRow, now_ms: int) -> Row:
    return {
        **asdict(row),
        "expires_in_ms": None if row.expires_ms is None else max(row.expires_ms - now_ms, 0),
        "why": _WHY[row.because].format(retention=_span_text(row.retention_ms)),
    }


def _time_text(value: object) -> str:
    return format_time(value) if isinstance(value, int) and value > 0 else "-"


def _span_text(value: object) -> str:
    """Formats a time span: `7 d`, `6 d 23:15:00`, `0:01:30`, or `now`."""
    if not isinstance(value, int):
        return plain_text(value)
    if value <= 0:
        return "now"
    span = timedelta(seconds=-(-value // _MS_PER_SECOND))
    rest = timedelta(seconds=span.seconds)
    days = f"{span.days} d" if span.days else ""
    return " ".join(filter(None, (days, str(rest) if rest or not days else "")))
