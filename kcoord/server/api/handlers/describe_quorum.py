# SPDX-License-Identifier: Apache-2.0
"""DescribeQuorum (KIP-595, KIP-836): the broker with the metadata log is the only voter; other workers are observers.

The response to a change of the metadata leaves when every worker has applied the change. So every observer in service
is reported at the end of the log, without asking it.
"""

from __future__ import annotations

from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.messages import DescribeQuorumRequest, DescribeQuorumResponse

API_KEY = ApiKey.DESCRIBE_QUORUM
VERSIONS = range(0, 3)

FIRST_VERSION_WITH_NODES: Final = 2
LEADER_EPOCH: Final = 0
"""The leader epoch in all batches of the metadata log, since its leader never changes."""

Topic = DescribeQuorumResponse.TopicData
Partition = DescribeQuorumResponse.PartitionData


def handle(broker: Broker, context: RequestContext, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE)
    asked = {
        topic.topic_name: [partition.partition_index for partition in topic.partitions] for topic in request.topics
    }
    if len(request.topics) != 1 or asked != {CLUSTER_METADATA_TOPIC: [0]}:
        # Kafka describes exactly this partition and rejects any other request as a whole.
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
    """Returns the voter with its listeners. They are listeners of a broker; a controller has no other."""
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
