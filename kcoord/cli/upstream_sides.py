# SPDX-License-Identifier: Apache-2.0
"""Connections to kcoord in front of an existing cluster and to that cluster itself, the upstream."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from kcoord.cli.session import CommandError, client_properties, error_text, warn
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.configs import Config
from kcoord.client.admin.model import ConfigResource, ConfigResourceType
from kcoord.client.cluster import Cluster
from kcoord.client.config import AdminConfig
from kcoord.client.types import Node
from kcoord.config.broker_settings import PASS_THROUGH
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError

PREFIX: Final = "kcoord.upstream."
SERVERS: Final = "kcoord.upstream.bootstrap.servers"
AUTHENTICATION: Final = "kcoord.upstream.authentication"
_OF_BOTH: Final = ("client.id", "default.api.timeout.ms")
"""The settings of connections to kcoord that connections to the upstream have, too."""
GROUPS_AT_A_TIME: Final = 100
"""The groups of one request."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sides:
    """Connections to both sides. `instances` are the brokers of `kcoord` that coordinate groups."""

    kcoord: AdminClient
    upstream: AdminClient
    cluster: Cluster
    """For requests to single instances, which AdminClient does not have."""
    instances: Sequence[Node]
    config: Config
    """The configuration of an instance."""


@asynccontextmanager
async def connect(options: argparse.Namespace) -> AsyncIterator[Sides]:
    """Connects to both sides. Raises CommandError if --bootstrap-server is not kcoord in front of a cluster.

    If clients log in at the upstream, the user of this command can log in at both sides.
    """
    properties = client_properties(options)
    own = {name: value for name, value in properties.items() if not name.startswith(PREFIX)}
    config = AdminConfig.from_properties(own, warn)
    cluster = Cluster(config)
    try:
        async with AdminClient(config) as kcoord:
            await cluster.start(cluster.deadline())
            instances = await instances_of(cluster)
            if not instances:
                raise CommandError(f"{own['bootstrap.servers']} is not kcoord in front of an existing cluster")
            resource = ConfigResource(ConfigResourceType.BROKER, str(instances[0].node_id))
            described = (await kcoord.describe_configs([resource]))[resource]
            theirs = own if described[AUTHENTICATION].value == PASS_THROUGH else {key: own[key] for key in _OF_BOTH}
            theirs = {
                **theirs,
                "bootstrap.servers": described[SERVERS].value or "",
                **{name.removeprefix(PREFIX): value for name, value in properties.items() if name.startswith(PREFIX)},
            }
            upstream = AdminClient(AdminConfig.from_properties(theirs, warn))
            try:
                await upstream.start()
                yield Sides(kcoord, upstream, cluster, instances, described)
            finally:
                await upstream.close()
    finally:
        await cluster.close()


async def instances_of(cluster: Cluster) -> list[Node]:
    """Returns the brokers that import groups. Ports of the upstream's brokers do not."""
    instances = []
    for node_id, node in sorted(cluster.metadata.brokers.items()):
        try:
            connection = await cluster.connection(node_id)
        except KafkaError as error:
            warn(f"broker {node_id} at {node.host}:{node.port} cannot be reached: {error_text(error)}")
            continue
        if connection.versions.offers(ApiKey.IMPORT_GROUPS):
            instances.append(node)
    return instances


def portions(items: Iterable[T]) -> Iterator[list[T]]:
    """Yields the items in lists of at most GROUPS_AT_A_TIME."""
    portion: list[T] = []
    for item in items:
        portion.append(item)
        if len(portion) == GROUPS_AT_A_TIME:
            yield portion
            portion = []
    if portion:
        yield portion
