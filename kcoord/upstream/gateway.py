# SPDX-License-Identifier: Apache-2.0
"""What the connections of clients share: addresses of brokers as clients see them, API versions, fresh metadata.

Clients see the upstream's cluster with its node ids, and each instance of kcoord as one more broker without partitions.
Each broker has a port of its own: `main` is kcoord's, and `ports` has those that stand for the upstream's brokers.
Every instance has a port for every broker of the upstream. Responses name one of the instances for each of them, and
all instances name the same.

`look` keeps the metadata image like the upstream. One look runs at a time; a call while one runs waits for the next
one, because the running one may have asked before the change that the caller knows of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Final, NamedTuple

from kcoord.config import Listener
from kcoord.runtime.shard_map import Instance
from kcoord.server.api.api_table import ApiTable, RequestContext
from kcoord.server.api.handlers import find_coordinator
from kcoord.server.broker import Broker
from kcoord.upstream.acls import UpstreamAcls
from kcoord.upstream.cluster import BrokerVersions, UpstreamCluster
from kcoord.upstream.group_imports import GroupImports
from kcoord.upstream.instance_metadata import InstanceMetadata
from kcoord.upstream.own_topics import OWN_TOPICS
from kcoord.upstream.ownership import Ownership
from kcoord.upstream.transactions import TransactionalOffsets
from kcoord.upstream.versions import GroupSide, common_versions, port_tables
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import INTERNAL_TOPICS
from kcoord_protocol.messages import (
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from kcoord_protocol.uuid import ZERO_UUID

KNOWN_SECONDS: Final = 2.0
"""The longest time that a response waits until the image has the topics that it names."""
_NEXT_LOOK_SECONDS: Final = 0.02

_logger = logging.getLogger(__name__)


class ShownTopic(NamedTuple):
    """A topic as a response of the upstream shows it. Old versions of responses have no id (zero), or no partitions."""

    name: str
    id: bytes
    partitions: int
    """The number of partitions in the response. It may have only a part of them."""


class Gateway:
    """The state that all client connections share; the module describes it. `main` is set before clients come."""

    main: Listener

    def __init__(
        self,
        broker: Broker,
        upstream: UpstreamCluster,
        ownership: Ownership,
        imports: GroupImports,
        metadata: InstanceMetadata,
        acls: UpstreamAcls | None = None,
    ) -> None:
        self.broker = broker
        self.metadata = metadata
        self.upstream = upstream
        self.ownership = ownership
        self._imports = imports
        broker.groups.must_ask_first = imports.must_wait
        self.ports: dict[int, int] = {}
        """The ports of this instance, by the node ids of the upstream's brokers."""
        self.acls = acls
        """The ACLs of the upstream that decide about groups; None if clients log in at kcoord."""
        self.passes_logins = broker.config.passes_logins
        """Whether clients log in at the upstream, each with its own connection."""
        self._transactions = TransactionalOffsets(upstream)
        self.on_brokers: Callable[[], Awaitable[None]] | None = None
        """Called after each look, to open the ports of new brokers."""
        self._unseen: set[ShownTopic] = set()
        """Topics that clients see and kcoord's user does not. Responses do not wait for them again."""
        self._tables: dict[int | None, ApiTable] = {}
        self._turn = 0
        self._failure: Errors | None = None
        """Why the last look failed, None if it did not."""
        self._running: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    # --- addresses and versions ---------------------------------------------------------------------------------------

    def instance(self) -> Instance:
        """Returns this instance as clients see it."""
        return Instance(
            self.broker.node_id, self.main.host, self.main.port, self.broker.config.broker_rack, dict(self.ports)
        )

    def any_node(self) -> int | None:
        """Returns brokers of the upstream in turn, None if there is none."""
        nodes = [node_id for node_id in sorted(self.ports) if node_id in self.upstream.nodes]
        if not nodes:
            return None
        self._turn += 1
        return nodes[self._turn % len(nodes)]

    def versions_of(self, node_id: int | None) -> BrokerVersions:
        """Returns the versions of a broker of the upstream; for None, those that all its brokers have."""
        versions = self.upstream.versions
        if node_id is not None:
            return versions[node_id]
        return common_versions([versions[node_id] for node_id in self.ports if node_id in versions])

    def login_version(self, node_id: int | None, request: SaslHandshakeRequest | SaslAuthenticateRequest) -> int:
        """Returns the version in which a request of a login is passed on: the highest that both sides have."""
        theirs, ours = self.versions_of(node_id).ranges.get(request.api_key, range(1)), type(request).valid_versions
        return min(theirs.stop, ours.stop) - 1

    def table(self, node_id: int | None) -> ApiTable:
        """Returns the APIs that are answered here, for the port of a broker of the upstream or (None) for kcoord's."""
        if node_id not in self._tables:
            config = self.broker.config
            check = None if self.acls is None else self.acls.check
            groups = GroupSide(self.find_coordinator, self._imports, self._transactions.add_offsets, check)
            tables = port_tables(config, node_id, lambda: self.versions_of(node_id), groups)
            self._tables[node_id] = tables[config.kip1327_form("")]
        return self._tables[node_id]

    def find_coordinator(
        self, broker: Broker, context: RequestContext, request: FindCoordinatorRequest
    ) -> FindCoordinatorResponse:
        """Answers FindCoordinator for groups: every instance names the owner of the group's shard."""
        if request.key_type != find_coordinator.GROUP:
            raise KafkaError(Errors.INVALID_REQUEST)

        def coordinator(group_id: str) -> tuple[int, str, int] | None:
            instance = self.ownership.coordinator(broker.groups.shard_of(group_id))
            return (instance.node_id, instance.host, instance.port) if instance is not None else None

        return find_coordinator.respond(context, request, coordinator)

    def creation_time_ms(self, topic_id: bytes, partition_id: int) -> int:
        """Returns the time at which a partition was first seen (KIP-1327), -1 if it was not."""
        topic = self.broker.image.topics_by_id.get(topic_id)
        if topic is None or partition_id >= len(topic.partitions):
            return -1
        return topic.partitions[partition_id].creation_time_ms

    # --- metadata -----------------------------------------------------------------------------------------------------

    def lacks(self, topics: Collection[ShownTopic]) -> bool:
        """Returns whether the image lacks one of these topics, or partitions of it, and may have them soon.

        A topic that was deleted and created again has another id.
        """
        never = (INTERNAL_TOPICS, OWN_TOPICS, self.upstream.nameless)
        return any(
            self._is_missing(topic)
            and topic not in self._unseen
            and not any(topic.name in skipped for skipped in never)
            for topic in topics
        )

    def _is_missing(self, shown: ShownTopic) -> bool:
        topic = self.broker.image.topics.get(shown.name)
        return topic is None or shown.id not in (topic.id, ZERO_UUID) or len(topic.partitions) < shown.partitions

    async def until_known(self, topics: Collection[ShownTopic]) -> None:
        """Looks until the image has these topics, at most KNOWN_SECONDS. Always looks once."""
        # If a client changes a topic, its response waits, whatever was before.
        self._unseen.difference_update(topics)
        try:
            async with asyncio.timeout(KNOWN_SECONDS):
                await self.look()
                while self.lacks(topics):
                    await asyncio.sleep(_NEXT_LOOK_SECONDS)
                    await self.look()
        except TimeoutError:
            unseen = [topic for topic in topics if self.lacks([topic])]
            self._unseen.update(unseen)
            _logger.warning(
                "The upstream does not show topics %s to kcoord yet, so no group can consume them. If that lasts, "
                "kcoord's user lacks the right Describe on them",
                ", ".join(sorted(topic.name for topic in unseen)),
            )

    def shared_changed(self) -> None:
        """Follows what another instance has added to the log that all share."""
        self.broker.spawn(self._follow_shared())

    async def _follow_shared(self) -> None:
        await self.metadata.follow_shared()
        if self.metadata.lacks_partitions():
            await self.look()

    async def look(self) -> None:
        """Makes the image like the upstream is now. Logs a failure once; the image then stays as it is."""
        if self._next is None:
            self._next = self.broker.spawn(self._look_after(self._running))
        await asyncio.shield(self._next)

    async def _look_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running, self._next = self._next, None
        try:
            await self._look()
            self._failure = None
        except KafkaError as error:
            # The upstream may be away for long, and each look fails then.
            if self._failure is not error.error:
                self._failure = error.error
                _logger.warning("The upstream cannot be looked at: %s", error)

    async def _look(self) -> None:
        topics = self.broker.image.topics.values()
        snapshot = await self.upstream.look({topic.name: topic.id for topic in topics})
        if self.on_brokers is not None:
            await self.on_brokers()
        await self.metadata.follow_upstream(snapshot)
