# SPDX-License-Identifier: Apache-2.0
"""DescribeCluster (KIP-700): the cluster id and the brokers. There are no listeners of controllers (KIP-919)."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import NOT_ASKED, operations_on_cluster
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
    in_service = broker_addresses(broker, context.client.listener_name)
    fenced = fenced_addresses(broker, context.client.listener_name) if request.include_fenced_brokers else []
    return DescribeClusterResponse(
        cluster_id=broker.cluster_id,
        controller_id=broker.controller_id,
        brokers=[
            DescribeClusterResponse.DescribeClusterBroker(
                broker_id=address[0], host=address[1], port=address[2], rack=address[3], is_fenced=address in fenced
            )
            for address in sorted(in_service + fenced, key=lambda address: address[0])
        ],
        cluster_authorized_operations=(
            operations_on_cluster(context.rights) if request.include_cluster_authorized_operations else NOT_ASKED
        ),
    )


def error_response(request: DescribeClusterRequest, error: KafkaError, version: int) -> DescribeClusterResponse:
    return DescribeClusterResponse(error_code=error.error, error_message=error.message)
