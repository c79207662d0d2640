# SPDX-License-Identifier: Apache-2.0
"""DescribeCluster (KIP-700): the cluster id and the brokers. Controllers (KIP-919) have no listener here."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import CLUSTER_OPERATIONS, NOT_ASKED
from kcoord.server.api.leader_hint import broker_addresses, fenced_addresses
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeClusterRequest, DescribeClusterResponse

API_KEY = ApiKey.DESCRIBE_CLUSTER
VERSIONS = range(0, 3)

BROKERS, CONTROLLERS = 1, 2


def handle(broker: Broker, context: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    if request.endpoint_type == CONTROLLERS:
        raise KafkaError(
            Errors.MISMATCHED_ENDPOINT_TYPE,
            "The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type CONTROLLER",
        )
    if request.endpoint_type != BROKERS:
        raise KafkaError(Errors.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {request.endpoint_type}")
    found = broker_addresses(broker, context.listener_name)
    fenced = fenced_addresses(broker, context.listener_name) if request.include_fenced_brokers else []
    return DescribeClusterResponse(
        cluster_id=broker.cluster_id,
        controller_id=broker.controller_id,
        brokers=[
            DescribeClusterResponse.DescribeClusterBroker(
                broker_id=one[0], host=one[1], port=one[2], rack=one[3], is_fenced=one in fenced
            )
            for one in sorted(found + fenced, key=lambda one: one[0])
        ],
        cluster_authorized_operations=(
            CLUSTER_OPERATIONS if request.include_cluster_authorized_operations else NOT_ASKED
        ),
    )


def error_response(request: DescribeClusterRequest, error: KafkaError, version: int) -> DescribeClusterResponse:
    return DescribeClusterResponse(error_code=error.error, error_message=error.message)
