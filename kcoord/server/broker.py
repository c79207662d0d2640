# SPDX-License-Identifier: Apache-2.0
"""The broker object that handlers get, and the periodic work of a broker."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar, cast

from kcoord.config import BrokerConfig, Listener
from kcoord.metadata.image import MetadataImage
from kcoord.server.api.api_table import ApiTable
from kcoord.server.api.large_metadata import LargeMetadata
from kcoord.server.api.transactional_produce import TransactionalProduce
from kcoord.server.environment import Environment
from kcoord.server.large_responses import make_encoded
from kcoord.server.shards.fetch_service import FetchService
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.metadata_service import MetadataService
from kcoord.server.shards.shard_service import Pump
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.topics.store import TopicStore
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kcoord.metrics.exposition import InstanceFigures
    from kcoord.security.authorizer import Authorizer
    from kcoord.server.client_quotas import ClientQuotas
    from kcoord.server.observe.audit_log import AuditLog
    from kcoord.server.observe.client_telemetry import ClientTelemetry
    from kcoord.server.observe.telemetry_exporter import TelemetryExporter
    from kcoord.server.request_quota import RequestQuota
    from kcoord_protocol.messages import Message

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound="Message")
T = TypeVar("T")

TICK_SECONDS: Final = 1.0
WRITER_SECONDS: Final = 1.5
"""The longest time that a shutdown waits for writes in flight."""
_CHECK_SECONDS: Final = 0.01

LARGE_RESPONSE_ITEMS: Final = 1_000
"""A response with more members, groups or partitions is large: the event loop would take more than 5 ms for it."""


class Broker:
    """A broker without its sockets: configuration, metadata image, topic data, coordinators, clock and tasks.

    `composition.compose` makes it, `begin` starts its service, `on_metadata_update` passes each new metadata image
    on, and `close` ends it. Requests come from sockets, from other workers, from a test or from the simulation.

    `image` is replaced as a whole when a metadata change is durable. An image itself never changes, so a handler sees
    one state of the metadata until it waits for something. All methods run in the event loop.
    """

    apis: ApiTable
    topics: TopicStore
    fetches: FetchService
    metadata: MetadataService
    groups: GroupService
    transactions: TransactionService
    transactional_produce: TransactionalProduce
    pump: Pump
    """`compose` sets these attributes once."""

    def __init__(
        self, config: BrokerConfig, environment: Environment, cluster_id: str, metadata_broker_id: int | None = None
    ) -> None:
        self.config = config
        self.node_id = config.node_id
        self.metadata_broker_id = config.node_id if metadata_broker_id is None else metadata_broker_id
        """The broker whose process writes the metadata log, also if that broker is out of service."""
        self.cluster_id = cluster_id
        self.image = MetadataImage.empty()
        self.authorizer: Authorizer | None = None
        """The authorizer for the ACLs of `image`; None if everyone may do everything."""
        self.quotas: ClientQuotas | None = None
        """The client quotas of `image`; None if there are none."""
        self.request_quota: RequestQuota | None = None
        """The quota on the time of requests; None if nobody has one. Request paths ask for it at each request."""
        self.audit: AuditLog | None = None
        """The audit log; None if `kcoord.audit.log` names no file."""
        self.image_observers: list[Callable[[MetadataImage], None]] = []
        """Called in this order with each new image, after it has become `image`."""
        self.now_ms = environment.now_ms
        self.spawn = environment.spawn
        self.uuids = environment.uuids
        self.endpoints: dict[str, Listener] = {}
        """The advertised addresses of this broker, by the names of its listeners."""
        self._environment = environment
        self.has_begun = False
        self.why_not_ready: Callable[[], str | None] = _none
        """Returns why a load balancer should send clients elsewhere; None if it should not."""
        self.instance_figures: Callable[[], InstanceFigures | None] = _none
        """Returns the figures of an instance in front of an upstream, for metrics; None for another broker."""
        self._tick_timer: asyncio.TimerHandle | None = None
        self._client_telemetry: ClientTelemetry | None = None
        self._exporter: TelemetryExporter | None = None
        self._threads: Executor | None = None
        self._searches: Executor | None = None
        self.large_metadata = LargeMetadata()

    @property
    def controller_id(self) -> int:
        """The broker that clients send metadata changes to. It is in service, if any broker is.

        Every broker passes such requests on to the broker that writes the metadata log.
        """
        alive = self.image.alive_brokers()
        if self.metadata_broker_id in alive:
            return self.metadata_broker_id
        return min(alive, default=self.metadata_broker_id)

    @property
    def client_telemetry(self) -> ClientTelemetry:
        """The client telemetry, which is made when the first client asks for it."""
        if self._client_telemetry is None:
            from kcoord.server.observe.client_telemetry import ClientTelemetry
            from kcoord.server.observe.telemetry_exporter import TelemetryExporter

            if self.config.kcoord_client_telemetry_endpoint:
                self._exporter = TelemetryExporter(self.config.kcoord_client_telemetry_endpoint)
            receive = self._exporter.export if self._exporter is not None else _drop_metrics
            self._client_telemetry = ClientTelemetry(self.config, self.uuids.take, receive)
        return self._client_telemetry

    async def made_in_thread(self, make: Callable[[], M], version: int) -> M:
        """Makes and encodes a large response in a thread. `make` must not depend on anything that changes.

        Returns an EncodedResponse. It has all that a request path needs of a message.
        """
        if self._threads is None:
            self._threads = self._environment.new_pool(1, "kcoord-responses")
        return cast("M", await self._environment.loop.run_in_executor(self._threads, make_encoded, make, version))

    async def found_in_thread(self, find: Callable[[], T]) -> T:
        """Runs a long search in a thread. Searches wait for each other there, and nothing else waits for them."""
        if self._searches is None:
            self._searches = self._environment.new_pool(1, "kcoord-searches")
        return await self._environment.loop.run_in_executor(self._searches, find)

    # --- start and stop -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Passes the first image on and begins the periodic work. All current brokers are registered in that image."""
        self.has_begun = True
        self.on_metadata_update(self.metadata.image)
        self._tick()

    def on_metadata_update(self, image: MetadataImage) -> None:
        """Makes a durable image the current one, and passes it to all observers.

        Responses that wait for the image leave only after that. Before `begin` this method does nothing.
        """
        if not self.has_begun:
            return
        if self.authorizer is not None and image.acls is not self.image.acls:
            self.authorizer = self.authorizer.with_acls(image.acls)
        self.image = image
        for observe in self.image_observers:
            observe(image)

    def update_coordinators(self, image: MetadataImage) -> None:
        """Makes the coordinators load the shards that this broker leads now, and release those that it does not."""
        to_load = self.groups.follow(image.topics.get(GROUP_METADATA_TOPIC), self.node_id)
        if to_load:
            self.spawn(self.await_group_load(to_load))
        self.groups.on_metadata_update(image)
        self.transactions.follow(image.topics.get(TRANSACTION_STATE_TOPIC), self.node_id)
        self.transactions.on_metadata_update(image)

    async def await_group_load(self, shard_ids: Sequence[int]) -> None:
        """Waits until the shards are loaded, which has begun, and logs the time."""
        started_ms = self.now_ms()
        # Loading makes long-lived objects only, so collections during the load would find nothing.
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
        """Does the periodic work on topics and shards that is due, in small steps."""
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
        """Ends the coordinators. Returns True if everything that they submitted is durable."""
        self.transactions.close()
        self.groups.close()
        self.metadata.close()
        self._environment.cancel_tasks()
        for pool in (self._threads, self._searches):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        if self._exporter is not None:
            self._exporter.close()
        await until(self._environment.loop, lambda: self.pump.is_quiet, WRITER_SECONDS)
        written = self.pump.close(WRITER_SECONDS)
        if written:
            self.groups.finish()
            self.transactions.finish()
        return written


async def until(loop: asyncio.AbstractEventLoop, condition: Callable[[], bool], seconds: float) -> None:
    """Waits until the condition holds, but at most `seconds`."""
    deadline = loop.time() + seconds
    while not condition() and loop.time() < deadline:
        await asyncio.sleep(_CHECK_SECONDS)


def _none() -> None:
    """Returns None: a broker that is not in front of an upstream has no such state."""


def _drop_metrics(metrics: bytes) -> None:
    """Drops pushed metrics: only a Java reporter is configured, which cannot be loaded here."""
