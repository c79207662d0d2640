# SPDX-License-Identifier: Apache-2.0
"""DescribeDelegationToken (KIP-48), answered from the published image, with the passwords of the tokens, as in Kafka.

Clients see their own tokens and those that they may renew. Other tokens need a right on the token or on its owner.
"""

from __future__ import annotations

from kcoord.metadata.delegation_tokens import described_tokens
from kcoord.metadata.records import DelegationTokenData
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.token_requests import allows_token_requests
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeDelegationTokenRequest, DescribeDelegationTokenResponse

API_KEY = ApiKey.DESCRIBE_DELEGATION_TOKEN
VERSIONS = range(1, 4)


def handle(
    broker: Broker, context: RequestContext, request: DescribeDelegationTokenRequest
) -> DescribeDelegationTokenResponse:
    if not allows_token_requests(broker, context):
        raise KafkaError(Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED)
    if not broker.config.delegation_token_secret_key:
        raise KafkaError(Errors.DELEGATION_TOKEN_AUTH_DISABLED)
    rights = context.rights

    def may_describe(token_id: str, token: DelegationTokenData) -> bool:
        return (
            rights is None
            or rights.allows(AclOperation.DESCRIBE, ResourceType.DELEGATION_TOKEN, token_id)
            or rights.allows(AclOperation.DESCRIBE_TOKENS, ResourceType.USER, token.owner)
        )

    tokens = described_tokens(broker.image, broker.config, request, context.client.principal, may_describe)
    return DescribeDelegationTokenResponse(tokens=list(tokens))


def error_response(
    request: DescribeDelegationTokenRequest, error: KafkaError, version: int
) -> DescribeDelegationTokenResponse:
    return DescribeDelegationTokenResponse(error_code=error.error)
