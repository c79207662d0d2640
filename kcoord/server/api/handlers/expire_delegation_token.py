# SPDX-License-Identifier: Apache-2.0
"""ExpireDelegationToken (KIP-48), decided by the metadata machine. It is open to the owner and the renewers."""

from __future__ import annotations

from kcoord.metadata.delegation_tokens import UNKNOWN_TIME
from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.token_requests import allows_token_requests
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ExpireDelegationTokenRequest, ExpireDelegationTokenResponse

API_KEY = ApiKey.EXPIRE_DELEGATION_TOKEN
VERSIONS = range(1, 3)


def handle(
    broker: Broker, context: RequestContext, request: ExpireDelegationTokenRequest
) -> Reply[ExpireDelegationTokenResponse]:
    if not allows_token_requests(broker, context):
        raise KafkaError(Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED)
    return broker.metadata.call(MetadataMachine.expire_delegation_token, request, context.operation_context())


def error_response(
    request: ExpireDelegationTokenRequest, error: KafkaError, version: int
) -> ExpireDelegationTokenResponse:
    return ExpireDelegationTokenResponse(error_code=error.error, expiry_timestamp_ms=UNKNOWN_TIME)
