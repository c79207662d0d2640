# SPDX-License-Identifier: Apache-2.0
"""A broker whose metadata is durable at once, for tests of handlers; answers go through their bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

from kcoord.config import Listener, SecurityProtocol
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.request_context import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    Message,
)
from tests.unit.metadata.cluster import Cluster

if TYPE_CHECKING:
    from kcoord.server.api.api_table import ApiTable
    from kcoord.server.shards.fetch_service import FetchService
    from kcoord.server.shards.group_service import GroupService
    from kcoord.server.shards.transaction_service import TransactionService
    from kcoord.topics.store import TopicStore

T = TypeVar("T")
R = TypeVar("R", bound=Message)

ALL_OF_A_TOPIC = 3576
ALL_OF_A_CLUSTER = 8096
NOT_ASKED = -(2**31)


class Metadata:
    """A metadata service without a log: an operation is durable at once."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.broker: Broker

    @property
    def image(self) -> MetadataImage:
        return self._cluster.image

    def close(self) -> None:
        """There is nothing to close."""

    @property
    def end_offset(self) -> int:
        return len(self._cluster.log)

    def run(
        self, operation: Callable[[MetadataMachine, OperationContext], CoordinatorResult[T]], context: OperationContext
    ) -> asyncio.Future[T]:
        response = self._cluster.run(operation, context.api_version)
        self.broker.image = self._cluster.image
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.set_result(response)
        return future


def broker_of(cluster: Cluster) -> Broker:
    service = Metadata(cluster)
    broker = Broker(
        config=cluster.config,
        cluster_id="the-cluster",
        apis=cast("ApiTable", None),
        image=cluster.image,
        topics=cast("TopicStore", None),
        fetches=cast("FetchService", None),
        metadata=service,
        groups=cast("GroupService", None),
        transactions=cast("TransactionService", None),
        now_ms=lambda: cluster.now_ms,
    )
    service.broker = broker
    broker.endpoints["PLAINTEXT"] = Listener("PLAINTEXT", "box", 4711, SecurityProtocol.PLAINTEXT)
    return broker


def context(api_key: ApiKey, version: int) -> RequestContext:
    return RequestContext(api_key, version, 1, "client", "/127.0.0.1", "PLAINTEXT", "User:ANONYMOUS", 1000)


async def settle(reply: R | asyncio.Future[R], version: int) -> R:
    """The answer, through its bytes."""
    response = await reply if isinstance(reply, asyncio.Future) else reply
    return type(response).decode(response.encode(version), version)
