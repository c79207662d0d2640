# SPDX-License-Identifier: Apache-2.0
"""The one object that handlers see: configuration, metadata image, topic data, groups, clock and tasks of a running
process.

It holds references and answers questions; the machinery behind it lives in `worker` and `listener`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar, cast

from kcoord.config import BrokerConfig, Listener
from kcoord.metadata.features import GROUP_VERSION
from kcoord.metadata.image import MetadataImage
from kcoord.server.random_uuids import RandomUuids
from kcoord.server.shards.fetch_service import FetchService
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.metadata_operations import MetadataService
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.server.shards.transactional_produce import TransactionalProduce
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.server.api.api_table import ApiTable
    from kcoord.server.observe.client_telemetry import ClientTelemetry
    from kcoord.server.observe.telemetry_exporter import TelemetryExporter

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class Broker:
    """See the module's text. `image` is replaced as a whole at each committed metadata change."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        cluster_id: str,
        apis: ApiTable,
        image: MetadataImage,
        topics: TopicStore,
        fetches: FetchService,
        metadata: MetadataService,
        groups: GroupService,
        transactions: TransactionService,
        now_ms: Callable[[], int],
        controller_id: int | None = None,
        uuids: RandomUuids | None = None,
    ) -> None:
        self.config = config
        self.node_id = config.node_id
        self.metadata_broker_id = config.node_id if controller_id is None else controller_id
        """The broker whose process has the metadata log, whether it is in service or not."""
        self.cluster_id = cluster_id
        self.apis = apis
        self.image = image
        self.topics = topics
        self.fetches = fetches
        self.metadata = metadata
        self.groups = groups
        self.transactions = transactions
        self.now_ms = now_ms
        self.uuids = uuids or RandomUuids()
        self.transactional_produce = TransactionalProduce()
        self.endpoints: dict[str, Listener] = {}
        self._client_telemetry: ClientTelemetry | None = None
        self._exporter: TelemetryExporter | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def controller_id(self) -> int:
        """The broker that clients are to ask for changes; any passes them on. It is one that is in service."""
        alive = self.image.alive_brokers()
        if self.metadata_broker_id in alive:
            return self.metadata_broker_id
        return min(alive, default=self.metadata_broker_id)

    @property
    def client_telemetry(self) -> ClientTelemetry:
        """Made when the first client asks."""
        if self._client_telemetry is None:
            from kcoord.server.observe.client_telemetry import ClientTelemetry
            from kcoord.server.observe.telemetry_exporter import TelemetryExporter

            if self.config.kcoord_client_telemetry_endpoint:
                self._exporter = TelemetryExporter(self.config.kcoord_client_telemetry_endpoint)
            receive = self._exporter.export if self._exporter is not None else _drop_metrics
            self._client_telemetry = ClientTelemetry(self.config, self.uuids.take, receive)
        return self._client_telemetry

    def endpoint(self, listener_name: str) -> Listener:
        """The advertised address of this broker for clients of a listener."""
        return self.endpoints[listener_name]

    def check_consumer_protocol(self) -> None:
        """KIP-848 can be switched off by feature level or setting; as in Kafka the APIs stay listed and answer so,
        without a text.
        """
        enabled = "consumer" in self.config.group_coordinator_rebalance_protocols
        if not enabled or self.image.features.get(GROUP_VERSION, 0) < 1:
            raise KafkaError(Errors.UNSUPPORTED_VERSION)

    def spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Starts a task that is neither lost to the garbage collector nor able to fail unseen."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(cast("asyncio.Task[object]", task))
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(cast("asyncio.Task[object]", task))
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, KafkaError):
            _logger.error("A background task failed", exc_info=error)

    def cancel_tasks(self) -> None:
        """Ends what still runs at shutdown."""
        for task in list(self._tasks):
            task.cancel()
        if self._exporter is not None:
            self._exporter.close()


def _drop_metrics(metrics: bytes) -> None:
    """Where only a reporter is named, which cannot be loaded here."""
