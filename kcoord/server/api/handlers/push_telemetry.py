# SPDX-License-Identifier: Apache-2.0
"""PushTelemetry (KIP-714): accepts metrics of a client."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import PushTelemetryRequest, PushTelemetryResponse

API_KEY = ApiKey.PUSH_TELEMETRY
VERSIONS = range(0, 1)


def handle(broker: Broker, context: RequestContext, request: PushTelemetryRequest) -> PushTelemetryResponse:
    return broker.client_telemetry.push(request, context.client_facts(), broker.image, context.now_ms)


def error_response(request: PushTelemetryRequest, error: KafkaError, version: int) -> PushTelemetryResponse:
    return PushTelemetryResponse(error_code=error.error)
