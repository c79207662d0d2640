# SPDX-License-Identifier: Apache-2.0
"""What the client knows about the cluster: brokers, topics, partition leaders and creation times. Pure; each answer to
a Metadata request is merged into it.
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
    """A topic as a broker described it; with an error there are no partitions."""

    name: str
    topic_id: bytes
    is_internal: bool
    error: Errors
    partitions: dict[int, PartitionMetadata]


@dataclass(slots=True)
class ClusterMetadata:
    """The merged answers."""

    cluster_id: str | None = None
    controller_id: int = NO_NODE
    brokers: dict[int, Node] = field(default_factory=dict)
    topics: dict[str, TopicMetadata] = field(default_factory=dict)
    names_by_id: dict[bytes, str] = field(default_factory=dict)

    def merge(self, response: MetadataResponse, *, all_topics: bool = False) -> None:
        """Takes an answer; one about all topics also says which are gone."""
        self.cluster_id = response.cluster_id
        self.controller_id = response.controller_id
        if response.brokers:
            self.brokers = {
                broker.node_id: Node(broker.node_id, broker.host, broker.port, broker.rack)
                for broker in response.brokers
            }
        if all_topics:
            self.topics.clear()
            self.names_by_id.clear()
        for topic in response.topics:
            self._merge_topic(topic)

    def forget_cluster(self) -> None:
        """Forgets which cluster it was and its brokers. Topics stay as those to ask about."""
        self.cluster_id = None
        self.controller_id = NO_NODE
        self.brokers = {}

    def _merge_topic(self, topic: MetadataResponse.MetadataResponseTopic) -> None:
        error = error_of(topic.error_code)
        name = topic.name or self.names_by_id.get(topic.topic_id)
        if name is None:
            return
        known = self.topics.pop(name, None)
        if known is not None:
            self.names_by_id.pop(known.topic_id, None)
        self.topics[name] = TopicMetadata(
            name,
            topic.topic_id,
            topic.is_internal,
            error,
            {
                each.partition_index: PartitionMetadata(
                    each.partition_index,
                    each.leader_id,
                    each.leader_epoch,
                    each.replica_nodes,
                    each.isr_nodes,
                    each.offline_replicas,
                    each.creation_time_ms,
                    error_of(each.error_code),
                )
                for each in topic.partitions
            },
        )
        if topic.topic_id != ZERO_UUID:
            self.names_by_id[topic.topic_id] = name

    def partition(self, partition: TopicPartition) -> PartitionMetadata | None:
        topic = self.topics.get(partition.topic)
        return topic.partitions.get(partition.partition) if topic is not None else None

    def leader(self, partition: TopicPartition) -> int | None:
        """The node that leads the partition, None where none is known."""
        found = self.partition(partition)
        return found.leader if found is not None and found.leader != NO_NODE else None

    def leader_epoch(self, partition: TopicPartition) -> int:
        found = self.partition(partition)
        return found.leader_epoch if found is not None else -1

    def topic_id(self, name: str) -> bytes:
        """The id of a topic, zeros where it is not known."""
        topic = self.topics.get(name)
        return topic.topic_id if topic is not None else ZERO_UUID

    def creation_time_ms(self, partition: TopicIdPartition) -> int | None:
        """-1 where the broker does not know it, None where the partition itself is not known yet."""
        name = self.names_by_id.get(partition.topic_id)
        found = self.topics[name].partitions.get(partition.partition) if name is not None else None
        return found.creation_time_ms if found is not None else None
