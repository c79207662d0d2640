# SPDX-License-Identifier: Apache-2.0
"""AlterReplicaLogDirs (KIP-113).

A broker has one log folder, so a replica is either in the requested folder already or cannot move there.

As in Kafka, the path has to be equal to the one that DescribeLogDirs returns. If a request names a replica twice, the
last folder counts.
"""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.handlers.describe_log_dirs import log_folder
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse

API_KEY = ApiKey.ALTER_REPLICA_LOG_DIRS
VERSIONS = range(1, 3)

TopicResult = AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult
PartitionResult = AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult


def handle(broker: Broker, context: RequestContext, request: AlterReplicaLogDirsRequest) -> AlterReplicaLogDirsResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    folder = log_folder(broker)
    return _response(
        {
            (topic, partition): _check(broker, topic, partition) if path == folder else Errors.LOG_DIR_NOT_FOUND
            for (topic, partition), path in _paths(request).items()
        }
    )


def _paths(request: AlterReplicaLogDirsRequest) -> dict[tuple[str, int], str]:
    return {
        (topic.name, partition): folder.path
        for folder in request.dirs
        for topic in folder.topics
        for partition in topic.partitions
    }


def _check(broker: Broker, topic: str, partition: int) -> Errors:
    image = broker.image.partition(topic, partition)
    if image is None:
        return Errors.UNKNOWN_TOPIC_OR_PARTITION
    return Errors.NONE if broker.node_id in image.replicas else Errors.REPLICA_NOT_AVAILABLE


def _response(errors: dict[tuple[str, int], Errors]) -> AlterReplicaLogDirsResponse:
    topics: dict[str, TopicResult] = {}
    for (name, partition), error in errors.items():
        topic = topics.setdefault(name, TopicResult(topic_name=name))
        topic.partitions.append(PartitionResult(partition_index=partition, error_code=error))
    return AlterReplicaLogDirsResponse(results=list(topics.values()))


def error_response(request: AlterReplicaLogDirsRequest, error: KafkaError, version: int) -> AlterReplicaLogDirsResponse:
    return _response(dict.fromkeys(_paths(request), error.error))
