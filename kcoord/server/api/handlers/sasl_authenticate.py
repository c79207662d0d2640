# SPDX-License-Identifier: Apache-2.0
"""SaslAuthenticate outside of an authentication, which is answered before any handler (`kcoord.security.sasl`)."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import SaslAuthenticateRequest, SaslAuthenticateResponse

API_KEY = ApiKey.SASL_AUTHENTICATE
VERSIONS = range(0, 3)


def handle(broker: Broker, context: RequestContext, request: SaslAuthenticateRequest) -> SaslAuthenticateResponse:
    text = "SaslAuthenticate request received after successful authentication"
    raise KafkaError(Errors.ILLEGAL_SASL_STATE, text)


def error_response(request: SaslAuthenticateRequest, error: KafkaError, version: int) -> SaslAuthenticateResponse:
    return SaslAuthenticateResponse(error_code=error.error, error_message=error.message)
