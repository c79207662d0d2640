# SPDX-License-Identifier: Apache-2.0
"""The metadata of the cluster: brokers, topics, partition leaders and creation times. Pure.

`ClusterMetadata.merge` adds each Metadata response to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kcoord.client.results import error_of
from kcoord.client.types import Node, TopicIdPartition, TopicPartition
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import MetadataResponse
from kcoord_protocol.uuid import ZERO_UUID

NO_NODE: Final = -1
_UNKNOWN_TOPIC: Final = frozenset({Errors.UNKNOWN_TOPIC_OR_PARTITION, Errors.UNKNOWN_TOPIC_ID})
UNKNOWN_TIME_MS: Final = -1


@dataclass(slots=True)
class PartitionMetadata:
    """A partition as a broker described it."""

    partition: int
    leader: int
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    offline_replicas: list[int]
    creation_time_ms: int
    error: Errors


@dataclass(slots=True)
class TopicMetadata:
    """A topic as a broker described it. A topic with an error has no partitions."""

    name: str
    topic_id: bytes
    is_internal: bool
    error: Errors
    partitions: dict[int, PartitionMetadata]


@dataclass(slots=True)
class ClusterMetadata:
    """The merged Metadata responses."""

    cluster_id: str | None = None
    controller_id: int = NO_NODE
    brokers: dict[int, Node] = field(default_factory=dict)
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    names_by_id: dict[bytes, str] = field(default_factory=dict)

    def merge(self, response: MetadataResponse, *, all_topics: bool = False) -> None:
        """Merges a response. Removes the topics that it reports as unknown.

        A response about all topics also removes the topics that it does not have.
        """
        self.merge_brokers(response)
        if all_topics:
            self.topics.clear()
            self.names_by_id.clear()
        for topic in response.topics:
            self._merge_topic(topic)

    def merge_brokers(self, response: MetadataResponse) -> None:
        """Merges a response without its topics."""
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        if response.brokers:
            self.brokers = {
                broker.node_id: Node(broker.node_id, broker.host, broker.port, broker.rack)
                for broker in response.brokers
            }

    def move_broker(self, node_id: int, host: str, port: int) -> Node:
        """Sets the address of a broker that FindCoordinator returned. It may be newer than the last Metadata response.

        Returns the broker.
        """
        before = self.brokers.get(node_id)
        node = self.brokers[node_id] = Node(node_id, host, port, before.rack if before is not None else None)
        return node

    def forget_cluster(self) -> None:
        """Drops the cluster id and the brokers. Topics stay, because the client still needs their metadata."""
        self.cluster_id = None
        self.controller_id = NO_NODE
        self.brokers = {}

    def _merge_topic(self, topic: MetadataResponse.MetadataResponseTopic) -> None:
        error = error_of(topic.error_code)
        name = topic.name if topic.name is not None else self.names_by_id.get(topic.topic_id)
        if name is None:
            return
        previous = self.topics.pop(name, None)
        if previous is not None:
            self.names_by_id.pop(previous.topic_id, None)
        if error in _UNKNOWN_TOPIC:
            # Otherwise each periodic refresh would ask for the topic again, as long as the client lives.
            self.names_by_id.pop(topic.topic_id, None)
            return
        self.topics[name] = TopicMetadata(
            name,
            topic.topic_id,
            topic.is_internal,
            error,
            {
                partition.partition_index: PartitionMetadata(
                    partition.partition_index,
                    partition.leader_id,
                    partition.leader_epoch,
                    partition.replica_nodes,
                    partition.isr_nodes,
                    partition.offline_replicas,
                    partition.creation_time_ms,
                    error_of(partition.error_code),
                )
                for partition in topic.partitions
            },
        )
        if topic.topic_id != ZERO_UUID:
            self.names_by_id[topic.topic_id] = name

    def partition(self, partition: TopicPartition) -> PartitionMetadata | None:
        topic = self.topics.get(partition.topic)
        return topic.partitions.get(partition.partition) if topic is not None else None

    def leader(self, partition: TopicPartition) -> int | None:
        """Returns the node id of the partition's leader, None if no leader is known."""
        metadata = self.partition(partition)
        return metadata.leader if metadata is not None and metadata.leader != NO_NODE else None

    def leader_epoch(self, partition: TopicPartition) -> int:
        metadata = self.partition(partition)
        return metadata.leader_epoch if metadata is not None else -1

    def topic_id(self, name: str) -> bytes:
        """Returns the id of a topic, the zero id if it is unknown."""
        topic = self.topics.get(name)
        return topic.topic_id if topic is not None else ZERO_UUID

    def topic_error(self, name: str) -> Errors:
        """Returns the error with which the broker described a topic, NONE if there was none.

        It is UNKNOWN_TOPIC_OR_PARTITION if the metadata does not have the topic.
        """
        topic = self.topics.get(name)
        return topic.error if topic is not None else Errors.UNKNOWN_TOPIC_OR_PARTITION

    def creation_time_ms(self, partition: TopicIdPartition) -> int | None:
        """Returns the partition's creation time.

        -1 means that the broker does not know the time; None means that the metadata does not have the partition.
        """
        # The topic is absent if an error has dropped its metadata. Its id is known all the same.
        topic = self.topics.get(self.names_by_id.get(partition.topic_id, ""))
        metadata = topic.partitions.get(partition.partition) if topic is not None else None
        return metadata.creation_time_ms if metadata is not None else None
