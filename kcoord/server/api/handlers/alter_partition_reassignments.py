# SPDX-License-Identifier: Apache-2.0
"""AlterPartitionReassignments (KIP-455), decided by the metadata machine.

The response leaves when every worker has applied the change. The old leaders have closed their logs by then.
"""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse

API_KEY = ApiKey.ALTER_PARTITION_REASSIGNMENTS
VERSIONS = range(0, 2)


def handle(
    broker: Broker, context: RequestContext, request: AlterPartitionReassignmentsRequest
) -> Reply[AlterPartitionReassignmentsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    if request.topics:
        check_timeout(request.timeout_ms)
    return broker.metadata.call(MetadataMachine.alter_partition_reassignments, request, context.operation_context())


def error_response(
    request: AlterPartitionReassignmentsRequest, error: KafkaError, version: int
) -> AlterPartitionReassignmentsResponse:
    """Repeats the error for each partition, as Kafka does."""
    return AlterPartitionReassignmentsResponse(
        error_code=error.error,
        error_message=error.message,
        responses=[
            AlterPartitionReassignmentsResponse.ReassignableTopicResponse(
                name=topic.name,
                partitions=[
                    AlterPartitionReassignmentsResponse.ReassignablePartitionResponse(
                        partition_index=partition.partition_index, error_code=error.error, error_message=error.message
                    )
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )
