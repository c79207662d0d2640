# SPDX-License-Identifier: Apache-2.0
"""GetTelemetrySubscriptions (KIP-714): the metrics that the client has to push."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import GetTelemetrySubscriptionsRequest, GetTelemetrySubscriptionsResponse

API_KEY = ApiKey.GET_TELEMETRY_SUBSCRIPTIONS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: GetTelemetrySubscriptionsRequest
) -> GetTelemetrySubscriptionsResponse:
    return broker.client_telemetry.get_subscriptions(request, context.client_facts(), broker.image, context.now_ms)


def error_response(
    request: GetTelemetrySubscriptionsRequest, error: KafkaError, version: int
) -> GetTelemetrySubscriptionsResponse:
    return GetTelemetrySubscriptionsResponse(error_code=error.error)
