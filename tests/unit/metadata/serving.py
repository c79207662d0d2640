# SPDX-License-Identifier: Apache-2.0
"""A broker whose metadata is durable at once, for tests of handlers. Responses are encoded and decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

from kcoord.config import Listener, SecurityProtocol
from kcoord.config.kip1327 import Kip1327Form
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.broker import Broker
from kcoord.server.environment import Environment
from kcoord.server.shards.group_service import GroupService
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    Message,
)
from tests.unit.metadata.cluster import Cluster

T = TypeVar("T")
R = TypeVar("R", bound=Message)

ALL_OF_A_TOPIC = 3576
ALL_OF_A_CLUSTER = 8096
NOT_ASKED = -(2**31)


class Metadata:
    """A metadata service without a log: an operation is durable at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.publishers: list[Callable[[MetadataImage], None]] = []
        self.broker: Broker

    @property
    def image(self) -> MetadataImage:
        return self._cluster.image

    def close(self) -> None:
        """Does nothing: there is no log to close."""

    @property
    def end_offset(self) -> int:
        return len(self._cluster.log)

    def call(
        self,
        operation: Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> asyncio.Future[T]:
        principal = context.principal
        response = self._cluster.run(
            lambda machine, context: operation(machine, replace(context, principal=principal), request),
            context.api_version,
        )
        self.broker.image = self._cluster.image
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.set_result(response)
        return future


def broker_of(cluster: Cluster) -> Broker:
    loop = cast("asyncio.AbstractEventLoop", asyncio._get_running_loop())  # none where nothing waits
    broker = Broker(cluster.config, Environment(loop, lambda: cluster.now_ms), "the-cluster")
    broker.image = cluster.image
    service = broker.metadata = Metadata(cluster)
    service.broker = broker
    broker.groups = cast("GroupService", None)
    broker.endpoints["PLAINTEXT"] = Listener("PLAINTEXT", "box", 4711, SecurityProtocol.PLAINTEXT)
    return broker


def context(api_key: ApiKey, version: int) -> RequestContext:
    client = Client(Kip1327Form.OFF, "PLAINTEXT", "127.0.0.1")
    return RequestContext(api_key, version, 1, "client", client, 1000, rights=None)


async def settle(reply: R | asyncio.Future[R], version: int) -> R:
    """Returns the response after encoding and decoding it."""
    response = await reply if isinstance(reply, asyncio.Future) else reply
    return type(response).decode(response.encode(version), version)
