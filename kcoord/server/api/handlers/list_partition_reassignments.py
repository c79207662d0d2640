# SPDX-License-Identifier: Apache-2.0
"""ListPartitionReassignments (KIP-455): always empty, since a reassignment is complete when its response leaves."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse

API_KEY = ApiKey.LIST_PARTITION_REASSIGNMENTS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE)
    return ListPartitionReassignmentsResponse(error_message=None)


def error_response(
    request: ListPartitionReassignmentsRequest, error: KafkaError, version: int
) -> ListPartitionReassignmentsResponse:
    return ListPartitionReassignmentsResponse(error_code=error.error, error_message=error.message)
