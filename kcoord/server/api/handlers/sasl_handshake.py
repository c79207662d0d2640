# SPDX-License-Identifier: Apache-2.0
"""SaslHandshake outside of an authentication, which is answered before any handler (`kcoord.security.sasl`)."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import SaslHandshakeRequest, SaslHandshakeResponse

API_KEY = ApiKey.SASL_HANDSHAKE
VERSIONS = range(0, 2)


def handle(broker: Broker, context: RequestContext, request: SaslHandshakeRequest) -> SaslHandshakeResponse:
    raise KafkaError(Errors.ILLEGAL_SASL_STATE)


def error_response(request: SaslHandshakeRequest, error: KafkaError, version: int) -> SaslHandshakeResponse:
    return SaslHandshakeResponse(error_code=error.error)
