# SPDX-License-Identifier: Apache-2.0
"""ElectLeaders (KIP-183, KIP-460), decided by the metadata machine. In v0 only partitions can have an error."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.reassignment import FIRST_VERSION_WITH_ELECTION_TYPE
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.timeouts import check_timeout
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ElectLeadersRequest, ElectLeadersResponse

API_KEY = ApiKey.ELECT_LEADERS
VERSIONS = range(0, 3)


def handle(broker: Broker, context: RequestContext, request: ElectLeadersRequest) -> Reply[ElectLeadersResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    if request.topic_partitions != []:
        check_timeout(request.timeout_ms)
    return broker.metadata.call(MetadataMachine.elect_leaders, request, context.operation_context())


def error_response(request: ElectLeadersRequest, error: KafkaError, version: int) -> ElectLeadersResponse:
    return ElectLeadersResponse(
        error_code=error.error if version >= FIRST_VERSION_WITH_ELECTION_TYPE else Errors.NONE,
        replica_election_results=[
            ElectLeadersResponse.ReplicaElectionResult(
                topic=topic.topic,
                partition_result=[
                    ElectLeadersResponse.PartitionResult(
                        partition_id=partition_id, error_code=error.error, error_message=error.message
                    )
                    for partition_id in topic.partitions
                ],
            )
            for topic in request.topic_partitions or ()
        ],
    )
