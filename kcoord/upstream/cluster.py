# SPDX-License-Identifier: Apache-2.0
"""The upstream as kcoord's own connections see it: its brokers, their API versions, its topics.

Theory of operation. Everything runs in one event loop. `connect` finds the cluster once, at the start. After that, one
task at a time calls `look`, which asks three kinds of questions:

1. Metadata about all topics, to any broker.
2. ApiVersions, to each broker, because versions and features change with the broker's software.
3. If topics that kcoord knows are missing, or have another id: Metadata about these topics, to each broker. A topic is
   `gone` only if every broker that answers says so, and at least one does. So neither a broker with older metadata nor
   a missing right to describe a topic makes kcoord delete committed offsets.

A broker that does not answer keeps its address and versions until it does. A broker that the last Metadata response
lacks is not in `nodes`.

`open_connection` opens a connection for a client. All connections log in as kcoord's own principal, unless the client
logs in itself (`kcoord.upstream.authentication=pass-through`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from kcoord.client.cluster import Cluster
from kcoord.client.config import AdminConfig
from kcoord.client.connection import Connection, ExpectedBroker, open_connection
from kcoord.client.errors import ClientException, DisconnectException, TimeoutException
from kcoord.client.security_properties import PLAINTEXT, SECURITY_PROTOCOL, security_of
from kcoord.client.tasks import stop
from kcoord.client.types import Node
from kcoord.config import BrokerConfig
from kcoord.config.broker_settings import UPSTREAM_KEY
from kcoord.config.upstream import UPSTREAM_PREFIX, upstream_security
from kcoord.metadata.upstream import UpstreamBroker, UpstreamPartition, UpstreamSnapshot, UpstreamTopic
from kcoord.server.errors import StartError
from kcoord.upstream.own_topics import OWN_TOPICS
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import INTERNAL_TOPICS
from kcoord_protocol.messages import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse
from kcoord_protocol.uuid import ZERO_UUID

CONNECT_SECONDS: Final = 15.0
"""The time in which a start has to reach the upstream. A supervisor of processes may start both at once."""
ANSWER_SECONDS: Final = 3.0
"""The time in which a broker has to answer `look`. One broker that hangs does not keep others from being seen."""
FIRST_VERSION_WITH_TOPIC_IDS: Final = 10
HIGHEST_VERSION: Final = 13
"""The highest version of Metadata that Apache Kafka has. The next version is kcoord's own."""
HIGHEST_API_VERSIONS: Final = 4
"""From v5 on ApiVersions checks the cluster, which connections do when they are opened."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerVersions:
    """What a broker of the upstream lists in ApiVersions."""

    ranges: Mapping[int, range]
    supported_features: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    finalized_features: Mapping[str, int] = field(default_factory=dict)
    features_epoch: int = -1

    @classmethod
    def of(cls, response: ApiVersionsResponse) -> BrokerVersions:
        return cls(
            {api.api_key: range(api.min_version, api.max_version + 1) for api in response.api_keys},
            {feature.name: (feature.min_version, feature.max_version) for feature in response.supported_features},
            {feature.name: feature.max_version_level for feature in response.finalized_features},
            response.finalized_features_epoch,
        )


class UpstreamCluster:
    """The connections to the upstream; the module describes what they ask. Raises StartError for bad settings."""

    def __init__(self, config: BrokerConfig) -> None:
        self._servers = ",".join(config.kcoord_upstream_bootstrap_servers)
        security = upstream_security(config)
        try:
            self._transport_security: Final = security_of(_without_login(security))
            self.settings: Final = AdminConfig(
                bootstrap_servers=config.kcoord_upstream_bootstrap_servers,
                client_id=f"kcoord-{config.node_id}",
                kip_1327_revision="off",
                request_timeout_ms=config.kcoord_upstream_request_timeout_ms,
                socket_connection_setup_timeout_ms=config.kcoord_upstream_socket_connection_setup_timeout_ms,
                security=security_of(security),
            )
        except ClientException as error:
            raise StartError(f"{UPSTREAM_PREFIX}{error}") from None
        self.connections: Final = Cluster(self.settings)
        self.cluster_id = ""
        self.nodes: Mapping[int, Node] = {}
        self.versions: dict[int, BrokerVersions] = {}
        """The versions by node id, also of brokers that are out of service now."""
        self.nameless: set[str] = set()
        """Topics without a topic id, which groups cannot consume."""

    @property
    def client_id(self) -> str:
        """The client id of kcoord in the upstream."""
        return self.settings.client_id

    async def connect(self) -> None:
        """Finds the cluster. Raises StartError if no broker of `bootstrap.servers` can be used."""
        try:
            response = await self._first_metadata()
        except (KafkaError, ClientException) as error:
            reason = error.__cause__ if isinstance(error, TimeoutException) else error
            raise StartError(f"{UPSTREAM_KEY}={self._servers}: the cluster cannot be reached: {reason}") from None
        self.cluster_id = response.cluster_id or ""
        if not self.cluster_id:
            raise StartError(f"{UPSTREAM_KEY}={self._servers}: the cluster has no cluster id")

    async def _first_metadata(self) -> MetadataResponse:
        deadline = self.connections.deadline(CONNECT_SECONDS * 1000)
        request = MetadataRequest(topics=[], allow_auto_topic_creation=False)

        async def ask() -> MetadataResponse:
            connection = await self.connections.any_connection()
            response = await connection.call(
                request, MetadataResponse, lowest=FIRST_VERSION_WITH_TOPIC_IDS, highest=HIGHEST_VERSION
            )
            self._take_brokers(response)
            await self._reach_a_broker()
            return response

        return await self.connections.retry("find the upstream", deadline, ask)

    async def _reach_a_broker(self) -> None:
        """Connects to a broker at the address that it advertises.

        Raises KafkaError if none can be reached, or if one refuses kcoord, such as by its certificate.
        """
        nodes = {asyncio.create_task(self._connect(node_id)): node for node_id, node in self.nodes.items()}
        failure = DisconnectException("it names no broker")
        pending = set(nodes)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                errors = {nodes[attempt]: attempt.exception() for attempt in done}
                if None in errors.values():
                    return
                for node, error in errors.items():
                    if isinstance(error, KafkaError) and error.error.retriable:
                        address = f"{node.host}:{node.port}"
                        failure = DisconnectException(f"broker {node.node_id} advertises {address}: {error.message}")
                    elif error is not None:
                        raise error
            raise failure
        finally:
            await stop(pending)

    async def _connect(self, node_id: int) -> None:
        await self.connections.connection(node_id)

    def _take_brokers(self, response: MetadataResponse) -> None:
        # Topics are in the metadata image. The client would keep a copy of all of them, deleted ones too.
        self.connections.metadata.merge_brokers(response)
        # The client also learns of brokers as coordinators, which may be out of service already.
        self.nodes = dict(self.connections.metadata.brokers)

    async def look(self, topic_ids: Mapping[str, bytes]) -> UpstreamSnapshot:
        """Asks the upstream. Raises KafkaError if no broker answers. `topic_ids`: the ids of the image's topics."""
        connection = await self.connections.any_connection()
        request = MetadataRequest(topics=None, allow_auto_topic_creation=False)
        response = await connection.call(
            request, MetadataResponse, lowest=FIRST_VERSION_WITH_TOPIC_IDS, highest=HIGHEST_VERSION
        )
        if response.cluster_id != self.cluster_id:
            raise KafkaError(Errors.INCONSISTENT_CLUSTER_ID, f"the upstream is another cluster: {response.cluster_id}")
        self._take_brokers(response)
        topics = [_topic(topic) for topic in response.topics if self._is_usable(topic)]
        ids = {topic.name: topic.id for topic in topics}
        doubtful = {name for name, topic_id in topic_ids.items() if ids.get(name) != topic_id}
        answers = await asyncio.gather(*(self._ask_node(node_id, doubtful) for node_id in self.nodes))
        gone = {
            name
            for name in doubtful
            if any(answer is not None for answer in answers)
            and all(_lacks(answer, name, topic_ids[name]) for answer in answers if answer is not None)
        }
        brokers = [UpstreamBroker(node.node_id, node.host, node.port, node.rack) for node in self.nodes.values()]
        return UpstreamSnapshot(brokers, topics, gone)

    def _is_usable(self, topic: MetadataResponse.MetadataResponseTopic) -> bool:
        if topic.error_code or topic.name is None or topic.name in INTERNAL_TOPICS or topic.name in OWN_TOPICS:
            return False
        if topic.topic_id == ZERO_UUID:
            if topic.name not in self.nameless:
                self.nameless.add(topic.name)
                _logger.warning("Topic %s of the upstream has no topic id, so no group can consume it", topic.name)
            return False
        return [partition.partition_index for partition in sorted_partitions(topic)] == list(
            range(len(topic.partitions))
        )

    async def _ask_node(self, node_id: int, names: Collection[str]) -> MetadataResponse | None:
        """Asks one broker for its versions and for topics. Returns None if it does not answer."""
        connection: Connection | None = None
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                connection = await self.connections.connection(node_id)
                return await self._questions(connection, node_id, names)
        except TimeoutError:
            _logger.debug("Broker %d of the upstream does not answer", node_id)
            if connection is not None:
                # The broker may be at another address now. At the old one, nobody may ever end the connection.
                connection.end("no answer to a look at the upstream")
        except KafkaError as error:
            _logger.debug("Broker %d of the upstream does not answer: %s", node_id, error)
        return None

    async def _questions(self, connection: Connection, node_id: int, names: Collection[str]) -> MetadataResponse | None:
        versions = await connection.call(
            ApiVersionsRequest(client_software_name="kcoord", client_software_version="1"),
            ApiVersionsResponse,
            highest=HIGHEST_API_VERSIONS,
        )
        if not versions.error_code:
            self.versions[node_id] = BrokerVersions.of(versions)
        if not names:
            return None
        request = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(names)],
            allow_auto_topic_creation=False,
        )
        return await connection.call(request, MetadataResponse, highest=HIGHEST_VERSION)

    async def open_connection(self, node_id: int, *, logs_in: bool) -> Connection:
        """Opens a connection to a broker for one client, which kcoord logs in if `logs_in`. Raises KafkaError."""
        node = self.nodes.get(node_id)
        if node is None:
            raise KafkaError(Errors.BROKER_NOT_AVAILABLE, f"broker {node_id} of the upstream is not in service")
        settings = self.settings
        return await open_connection(
            node.host,
            node.port,
            client_id=settings.client_id,
            request_timeout_ms=settings.request_timeout_ms,
            connect_timeout_ms=settings.socket_connection_setup_timeout_ms,
            max_frame_bytes=settings.receive_message_max_bytes,
            security=settings.security if logs_in else self._transport_security,
            expected=ExpectedBroker(self.cluster_id, node_id),
        )

    async def close(self) -> None:
        """Closes kcoord's own connections."""
        await self.connections.close()


def _without_login(properties: Mapping[str, str]) -> dict[str, str]:
    """Returns security properties without SASL: TLS or nothing."""
    protocol = properties.get(SECURITY_PROTOCOL, PLAINTEXT).upper()
    kept = {name: value for name, value in properties.items() if not name.startswith("sasl.")}
    return kept | {SECURITY_PROTOCOL: protocol.removeprefix("SASL_")}


def sorted_partitions(
    topic: MetadataResponse.MetadataResponseTopic,
) -> list[MetadataResponse.MetadataResponsePartition]:
    """Returns the partitions of a topic in their order. Brokers may send them in any order."""
    return sorted(topic.partitions, key=lambda partition: partition.partition_index)


def _topic(topic: MetadataResponse.MetadataResponseTopic) -> UpstreamTopic:
    partitions = [
        UpstreamPartition(
            partition.leader_id, partition.leader_epoch, tuple(partition.replica_nodes), tuple(partition.isr_nodes)
        )
        for partition in sorted_partitions(topic)
    ]
    assert topic.name is not None
    return UpstreamTopic(topic.name, topic.topic_id, partitions)


def _lacks(answer: MetadataResponse, name: str, topic_id: bytes) -> bool:
    """Returns whether a broker says that no topic of this name has this id."""
    topic = next((topic for topic in answer.topics if topic.name == name), None)
    if topic is None or answer.error_code:
        return False
    if topic.error_code:
        return topic.error_code == Errors.UNKNOWN_TOPIC_OR_PARTITION
    return topic.topic_id not in (topic_id, ZERO_UUID)
