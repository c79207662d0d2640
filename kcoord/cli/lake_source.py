# SPDX-License-Identifier: Apache-2.0
"""Where the jobs of `kcoord lake` get their log from: folders, or the brokers of a cluster, which also give samples."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from kcoord.cli.options import key_value
from kcoord.cli.session import add_connection_options, client_properties, error_text, warn
from kcoord.client.config import AdminConfig, CommonConfig

if TYPE_CHECKING:
    from kcoord.client.admin.client import AdminClient
    from kcoord.pipeline.lake.samples import Retention, Sample
    from kcoord.pipeline.lake.storage import Lake
    from kcoord.pipeline.options import SourceOptions

T = TypeVar("T")

_PREFIX: Final = "kafka."
_TIMEOUT_MS: Final = CommonConfig.default_api_timeout_ms
"""Longer than that of other commands: the leaders of a cluster that restarts are away for up to a minute."""


def add_broker_options(parser: argparse.ArgumentParser) -> None:
    add_connection_options(parser, timeout_ms=_TIMEOUT_MS)


def broker_properties(options: argparse.Namespace) -> dict[str, str]:
    """Returns the settings of the client of a job. Without others they are those of the data source `kcoord`."""
    from kcoord.pipeline.wire.client import CLIENT_ID

    return client_properties(options, CLIENT_ID, _TIMEOUT_MS)


def add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log", metavar="URI", help="folder that holds __consumer_offsets-N; copied first")
    add_broker_options(parser)
    parser.add_argument("--topic", metavar="NAME", help="the topic of the log (default __consumer_offsets)")
    parser.add_argument(
        "--audit",
        action="append",
        default=[],
        metavar="FILE",
        help="an audit log of kcoord, with its older files; copied too. May be repeated",
    )
    parser.add_argument(
        "--option", action="append", type=key_value, default=[], metavar="KEY=VALUE", help="option of the data source"
    )


@dataclass(frozen=True, slots=True)
class LakeSource:
    """The log of a command. `brokers` has the settings of the client if the log is read from brokers."""

    options: SourceOptions
    brokers: AdminConfig | None

    def check(self, *, may_be_missing: bool) -> None:
        """Raises an error if the log cannot be read: no broker answers, a right is missing, or there is no log yet.

        If the log `may_be_missing`, that is a warning: a broker creates it for its first group, or its name is wrong.
        """
        from kcoord.pipeline.log_files import NoLogError
        from kcoord.pipeline.planning import list_folders

        try:
            if self.brokers is None:
                list_folders(self.options)
            else:
                from kcoord.pipeline.wire.planning import check_rights

                check_rights(self.options)
        except NoLogError as error:
            if not may_be_missing:
                raise
            warn(f"{error}; waiting for it")

    def sample(self, lake: Lake, *, with_groups: bool) -> Sample | None:
        """Asks the brokers for the next sample of a lake. Returns None with a warning if they do not answer."""
        from kcoord.pipeline.lake.samples import seen_topics, take_sample

        seen = seen_topics(lake)
        return self._ask(
            "no sample of the brokers", lambda admin: take_sample(admin, seen=seen, with_groups=with_groups)
        )

    def warn_of_gateway(self, sample: Sample) -> None:
        """Warns before the first copy if the cluster has a second log of groups, and this one may not be meant."""
        from kcoord.upstream.own_topics import OFFSETS_TOPIC
        from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC

        topics = set() if sample.topics is None else {*sample.topics.listed.values()}
        if self.options.topic == GROUP_METADATA_TOPIC and OFFSETS_TOPIC in topics:
            warn(
                f"the lake gets the groups of the cluster itself. Those of kcoord in front of it are in {OFFSETS_TOPIC}"
                " (--topic), and need a lake of their own"
            )

    def retention(self) -> Retention | None:
        """Returns the retention of the brokers, None if they do not tell it."""
        from kcoord.pipeline.lake.samples import retention

        if self.brokers is None:
            return None
        topic = self.options.topic
        return self._ask("offsets.retention.minutes of the brokers is unknown", lambda admin: retention(admin, topic))

    def _ask(self, failure: str, question: Callable[[AdminClient], Awaitable[T]]) -> T | None:
        from kcoord.client.admin.client import AdminClient
        from kcoord_protocol.errors import KafkaError

        config = self.brokers
        assert config is not None

        async def ask() -> T:
            async with AdminClient(config) as admin:
                return await question(admin)

        try:
            return asyncio.run(ask())
        except KafkaError as error:
            print(f"warning: {failure}: {error_text(error)}", file=sys.stderr)
            return None


def source_of(options: argparse.Namespace) -> LakeSource | None:
    """Returns the source that the options name, None if they name none. Raises ValueError for bad options."""
    from kcoord.pipeline.options import SourceOptions

    given: dict[str, str] = dict(options.option)
    if any(name.lower() == "table" for name in given):
        raise ValueError("--option table: a lake is made from the records alone")
    if options.topic is not None:
        given["topic"] = options.topic
    from_brokers = options.bootstrap_server is not None or options.command_config is not None
    if options.log is None and not from_brokers:
        return None
    if not from_brokers:
        return LakeSource(SourceOptions.parse({**given, "path": options.log}), None)
    properties = broker_properties(options)
    config = AdminConfig.from_properties(properties, warn)
    kafka = {f"{_PREFIX}{name}": value for name, value in properties.items()}
    path = {} if options.log is None else {"path": options.log}
    return LakeSource(SourceOptions.parse({**kafka, **given, **path}), config)
