# SPDX-License-Identifier: Apache-2.0
"""DescribeQuorum (KIP-595, KIP-836): the broker with the metadata log is the only voter; other workers are observers.

A change of the metadata is answered when every worker has applied it. So an observer in service is at the end of the
log, and no request has to ask it.
"""

from __future__ import annotations

from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.messages import DescribeQuorumRequest, DescribeQuorumResponse

API_KEY = ApiKey.DESCRIBE_QUORUM
VERSIONS = range(0, 3)

FIRST_VERSION_WITH_NODES: Final = 2
LEADER_EPOCH: Final = 0
"""The leader epoch in the batches of the metadata log: the leader never changes."""

Topic = DescribeQuorumResponse.TopicData
Partition = DescribeQuorumResponse.PartitionData


def handle(broker: Broker, context: RequestContext, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    asked = {
        topic.topic_name: [partition.partition_index for partition in topic.partitions] for topic in request.topics
    }
    if len(request.topics) != 1 or asked != {CLUSTER_METADATA_TOPIC: [0]}:
        # Kafka describes one partition in a request and refuses anything else as a whole.
        return DescribeQuorumResponse(topics=[_refused(topic) for topic in request.topics])
    voter, end_offset = broker.metadata_broker_id, broker.metadata.end_offset
    partition = Partition(
        leader_id=voter,
        leader_epoch=LEADER_EPOCH,
        high_watermark=end_offset,
        current_voters=[_replica(voter, end_offset, context.now_ms)],
        observers=[
            _replica(broker_id, end_offset, context.now_ms)
            for broker_id in sorted(broker.image.alive_brokers() - {voter})
        ],
    )
    response = DescribeQuorumResponse(topics=[Topic(topic_name=CLUSTER_METADATA_TOPIC, partitions=[partition])])
    if context.api_version >= FIRST_VERSION_WITH_NODES:
        response.nodes = _nodes(broker)
    return response


def _refused(topic: DescribeQuorumRequest.TopicData) -> Topic:
    error = Errors.UNKNOWN_TOPIC_OR_PARTITION
    return Topic(
        topic_name=topic.topic_name,
        partitions=[
            Partition(partition_index=partition.partition_index, error_code=error, error_message=error.description)
            for partition in topic.partitions
        ],
    )


def _replica(broker_id: int, end_offset: int, now_ms: int) -> DescribeQuorumResponse.ReplicaState:
    return DescribeQuorumResponse.ReplicaState(
        replica_id=broker_id, log_end_offset=end_offset, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
    )


def _nodes(broker: Broker) -> list[DescribeQuorumResponse.Node]:
    """The voter with its listeners of brokers: there are no others."""
    voter = broker.image.brokers.get(broker.metadata_broker_id)
    if voter is None:
        return []
    return [
        DescribeQuorumResponse.Node(
            node_id=voter.broker_id,
            listeners=[
                DescribeQuorumResponse.Listener(name=name, host=host, port=port)
                for name, host, port, _ in voter.endpoints
            ],
        )
    ]


def error_response(request: DescribeQuorumRequest, error: KafkaError, version: int) -> DescribeQuorumResponse:
    return DescribeQuorumResponse(error_code=error.error, error_message=error.message)
