# SPDX-License-Identifier: Apache-2.0
"""Responses of the upstream that are decoded on their way to the client. No IO; the `Gateway` has the addresses.

Metadata, DescribeCluster and FindCoordinator have addresses of brokers: clients get those of kcoord's ports instead,
and Metadata and DescribeCluster list each instance of kcoord as one more broker, because Java's admin client looks
coordinators up by node id. A broker that no instance has a port for yet is left out. Metadata and
DescribeTopicPartitions get the creation times of partitions (KIP-1327) if the client asks in a version with them.

Responses that change or show topics name the topics that the metadata image should have when the client reads them.
Then a client that creates a topic and joins a group right away is assigned its partitions at once. In the same way a
client that has changed ACLs finds that they count for groups (`kcoord.upstream.acls`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kcoord.upstream.gateway import Gateway, ShownTopic
from kcoord.upstream.versions import CREATION_TIME_VERSIONS
from kcoord_protocol.api_keys import ApiKey, response_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_response_header, encode_response
from kcoord_protocol.messages import (
    CreateTopicsResponse,
    DescribeClusterResponse,
    DescribeTopicPartitionsResponse,
    FindCoordinatorResponse,
    Message,
    MetadataResponse,
)

NO_NODE: Final = -1
_BROKERS: Final = 1


Change: TypeAlias = Callable[[Message, Gateway, int], None]


@dataclass(slots=True)
class Rewriting:
    """A response of the upstream on its way."""

    prepare: Callable[[], Awaitable[None]] | None
    """What has to end before `finish` is called; None if the response can leave at once."""
    finish: Callable[[], bytes]
    """Returns the framed response for the client."""


def rewriting(frame: bytes, key: ApiKey, upstream_version: int, client_version: int, gateway: Gateway) -> Rewriting:
    """Decodes a response in `upstream_version`, for a client that gets `client_version`. Raises DecodeError."""
    correlation_id, position = decode_response_header(frame, key, upstream_version)
    response = response_class(key).decode(frame[position:], upstream_version)

    def finish() -> bytes:
        change = _CHANGES.get(key)
        if change is not None:
            change(response, gateway, client_version)
        return encode_response(correlation_id, key, client_version, response.encode(client_version))

    return Rewriting(_preparation(response, key, gateway), finish)


def _preparation(response: Message, key: ApiKey, gateway: Gateway) -> Callable[[], Awaitable[None]] | None:
    if key in ACL_CHANGES:
        return None if gateway.acls is None else gateway.acls.refresh
    needed = _shown_topics(response)
    if key in TOPIC_CHANGES or gateway.lacks(needed):
        return lambda: gateway.until_known(needed)
    return None


ACL_CHANGES: Final = frozenset({ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS})
TOPIC_CHANGES: Final = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})


def _shown_topics(response: Message) -> list[ShownTopic]:
    if isinstance(response, CreateTopicsResponse):
        return [
            ShownTopic(topic.name, topic.topic_id, topic.num_partitions)
            for topic in response.topics
            if not topic.error_code
        ]
    if isinstance(response, MetadataResponse | DescribeTopicPartitionsResponse):
        return [
            ShownTopic(topic.name, topic.topic_id, len(topic.partitions))
            for topic in response.topics
            if topic.name is not None and not topic.error_code
        ]
    return []


def _change_metadata(response: Message, gateway: Gateway, client_version: int) -> None:
    assert isinstance(response, MetadataResponse)
    brokers = []
    for broker in response.brokers:
        address = gateway.ownership.address_of_broker(broker.node_id)
        if address is not None:
            broker.host, broker.port = address
            brokers.append(broker)
    brokers += [
        MetadataResponse.MetadataResponseBroker(
            node_id=instance.node_id, host=instance.host, port=instance.port, rack=instance.rack
        )
        for instance in gateway.ownership.instances()
    ]
    response.brokers = brokers
    if client_version >= CREATION_TIME_VERSIONS[ApiKey.METADATA]:
        for topic in response.topics:
            for partition in topic.partitions:
                partition.creation_time_ms = gateway.creation_time_ms(topic.topic_id, partition.partition_index)


def _change_cluster(response: Message, gateway: Gateway, client_version: int) -> None:
    assert isinstance(response, DescribeClusterResponse)
    if response.error_code or response.endpoint_type != _BROKERS:
        return
    brokers = []
    for broker in response.brokers:
        address = gateway.ownership.address_of_broker(broker.broker_id)
        if address is not None:
            broker.host, broker.port = address
            brokers.append(broker)
    brokers += [
        DescribeClusterResponse.DescribeClusterBroker(
            broker_id=instance.node_id, host=instance.host, port=instance.port, rack=instance.rack
        )
        for instance in gateway.ownership.instances()
    ]
    response.brokers = brokers


def _change_coordinators(response: Message, gateway: Gateway, client_version: int) -> None:
    """Replaces addresses. A coordinator without a port here is not available yet, so clients ask again."""
    assert isinstance(response, FindCoordinatorResponse)
    # Versions before 4 have one coordinator, in the response itself.
    coordinators: Sequence[FindCoordinatorResponse | FindCoordinatorResponse.Coordinator] = response.coordinators
    for coordinator in coordinators or [response]:
        if coordinator.error_code:
            continue
        address = gateway.ownership.address_of_broker(coordinator.node_id)
        if address is not None:
            coordinator.host, coordinator.port = address
            continue
        coordinator.error_code = Errors.COORDINATOR_NOT_AVAILABLE
        coordinator.node_id, coordinator.host, coordinator.port = NO_NODE, "", NO_NODE


def _add_creation_times(response: Message, gateway: Gateway, client_version: int) -> None:
    assert isinstance(response, DescribeTopicPartitionsResponse)
    if client_version >= CREATION_TIME_VERSIONS[ApiKey.DESCRIBE_TOPIC_PARTITIONS]:
        for topic in response.topics:
            for partition in topic.partitions:
                partition.creation_time_ms = gateway.creation_time_ms(topic.topic_id, partition.partition_index)


_CHANGES: Final[dict[ApiKey, Change]] = {
    ApiKey.METADATA: _change_metadata,
    ApiKey.DESCRIBE_CLUSTER: _change_cluster,
    ApiKey.FIND_COORDINATOR: _change_coordinators,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: _add_creation_times,
}
REWRITTEN_APIS: Final = frozenset(_CHANGES) | TOPIC_CHANGES | ACL_CHANGES
"""The APIs whose responses are decoded."""
