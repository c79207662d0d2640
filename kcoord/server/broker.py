# SPDX-License-Identifier: Apache-2.0
"""The one object that handlers see: configuration, metadata image, topic data, coordinators, clock and tasks.

It is also what is common to every life of a broker, whatever brings its requests: `composition.compose` makes it,
`begin` takes it into service, `publish` spreads each new metadata image, `close` ends it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig, Listener, TopicConfig
from kcoord.metadata.image import MetadataImage
from kcoord.server.api.api_table import ApiTable
from kcoord.server.api.transactional_produce import TransactionalProduce
from kcoord.server.environment import Environment
from kcoord.server.shards.fetch_service import FetchService
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.shards.shard_service import Pump
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.topics.store import TopicStore
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from kcoord.server.observe.client_telemetry import ClientTelemetry
    from kcoord.server.observe.telemetry_exporter import TelemetryExporter

_logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 1.0
WRITER_SECONDS: Final = 1.5
"""How long the end of a broker waits for writes that are under way."""
_CHECK_SECONDS: Final = 0.01


class Broker:
    """See the module's text. `image` is replaced as a whole at each committed metadata change."""

    apis: ApiTable
    topics: TopicStore
    fetches: FetchService
    metadata: MetadataService
    groups: GroupService
    transactions: TransactionService
    transactional_produce: TransactionalProduce
    pump: Pump
    """These are set once, by `compose`."""

    def __init__(
        self, config: BrokerConfig, environment: Environment, cluster_id: str, controller_id: int | None = None
    ) -> None:
        self.config = config
        self.node_id = config.node_id
        self.metadata_broker_id = config.node_id if controller_id is None else controller_id
        """The broker whose process has the metadata log, whether it is in service or not."""
        self.cluster_id = cluster_id
        self.image = MetadataImage.empty()
        self.image_observers: list[Callable[[MetadataImage], None]] = []
        """Called in order with each new image, after it has become `image`."""
        self.now_ms = environment.now_ms
        self.spawn = environment.spawn
        self.uuids = environment.uuids
        self.endpoints: dict[str, Listener] = {}
        self._environment = environment
        self.has_begun = False
        self._tick_timer: asyncio.TimerHandle | None = None
        self._client_telemetry: ClientTelemetry | None = None
        self._exporter: TelemetryExporter | None = None

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

    # Its life.

    def begin(self) -> None:
        """Publishes the first image, which names all brokers of today, and begins the periodic work."""
        self.has_begun = True
        self.publish(self.metadata.image)
        self._tick()

    def publish(self, image: MetadataImage) -> None:
        """A new image is durable: everybody sees it before the replies that waited for it leave."""
        if not self.has_begun:
            return
        self.image = image
        for observe in self.image_observers:
            observe(image)

    def publish_to_shards(self, image: MetadataImage) -> None:
        """The coordinators take over the shards that this broker leads now, and give up the others."""
        to_load = self.groups.follow(image.topics.get(GROUP_METADATA_TOPIC), self.node_id)
        if to_load:
            self.spawn(self._load_groups(to_load))
        self.groups.publish(image)
        self.transactions.follow(image.topics.get(TRANSACTION_STATE_TOPIC), self.node_id)
        self.transactions.publish(image)

    async def _load_groups(self, shard_ids: list[int]) -> None:
        started_ms = self.now_ms()
        # Only what lives long is made now: the collector need not look at it again and again.
        if self._environment.owns_heap:
            gc.disable()
        try:
            await self.groups.loaded()
        finally:
            if self._environment.owns_heap:
                gc.enable()
                gc.freeze()
        _logger.info("Loaded %d shards of the group coordinator in %d ms", len(shard_ids), self.now_ms() - started_ms)

    def _tick(self) -> None:
        self._tick_timer = self._environment.loop.call_later(TICK_SECONDS, self._tick)
        self.tick()

    def tick(self) -> None:
        """The periodic work on topics and shards: what is due, in small steps."""
        try:
            self.topics.tick(self.now_ms())
            self.groups.note_clock_gain(self._environment.clock_gain_ms())
            self.groups.tick()
            self.transactions.tick()
        except Exception:
            _logger.exception("The periodic work on topics and shards failed")

    def stop_waiting(self) -> None:
        """Ends the periodic work, and answers the requests that wait for data."""
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self.fetches.close()

    async def close(self) -> bool:
        """Ends the coordinators. Returns True if everything that was answered is written."""
        self.transactions.close()
        self.groups.close()
        self.metadata.close()
        self._environment.cancel_tasks()
        if self._exporter is not None:
            self._exporter.close()
        await until(self._environment.loop, lambda: self.pump.is_quiet, WRITER_SECONDS)
        written = self.pump.close(WRITER_SECONDS)
        if written:
            self.groups.finish()
            self.transactions.finish()
        return written

    # What the coordinators ask.

    def tombstones_kept_ms(self) -> int:
        """`delete.retention.ms` of the coordinators' logs."""
        configs = self.image.topic_configs(GROUP_METADATA_TOPIC)
        return TopicConfig.resolve(self.config, configs).delete_retention_ms


async def until(loop: asyncio.AbstractEventLoop, condition: Callable[[], bool], seconds: float) -> None:
    """Waits until the condition holds, or the time is over."""
    deadline = loop.time() + seconds
    while not condition() and loop.time() < deadline:
        await asyncio.sleep(_CHECK_SECONDS)


def _drop_metrics(metrics: bytes) -> None:
    """Where only a reporter is named, which cannot be loaded here."""
