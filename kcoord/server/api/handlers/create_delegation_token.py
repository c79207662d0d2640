# SPDX-License-Identifier: Apache-2.0
"""CreateDelegationToken (KIP-48), decided by the metadata machine.

Anyone who has logged in may create tokens of its own. Tokens of another owner need the right CREATE_TOKENS on it.
"""

from __future__ import annotations

from kcoord.metadata.delegation_tokens import has_users_only, owner_of, rejected_creation
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.token_requests import allows_token_requests
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateDelegationTokenRequest, CreateDelegationTokenResponse

API_KEY = ApiKey.CREATE_DELEGATION_TOKEN
VERSIONS = range(1, 4)


def handle(
    broker: Broker, context: RequestContext, request: CreateDelegationTokenRequest
) -> Reply[CreateDelegationTokenResponse]:
    owner, requester, rights = owner_of(request, context.client.principal), context.client.principal, context.rights
    if not allows_token_requests(broker, context):
        return rejected_creation(Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, owner, requester)
    if (
        rights is not None
        and owner != requester
        and not rights.allows(AclOperation.CREATE_TOKENS, ResourceType.USER, owner)
    ):
        return rejected_creation(Errors.DELEGATION_TOKEN_AUTHORIZATION_FAILED, owner, requester)
    if not has_users_only(request):
        return rejected_creation(Errors.INVALID_PRINCIPAL_TYPE, owner, requester)
    token_id = broker.uuids.take_text()

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateDelegationTokenRequest
    ) -> CoordinatorResult[CreateDelegationTokenResponse]:
        return machine.create_delegation_token(context, request, token_id)

    return broker.metadata.call(create, request, context.operation_context())


def error_response(
    request: CreateDelegationTokenRequest, error: KafkaError, version: int
) -> CreateDelegationTokenResponse:
    return rejected_creation(error.error, owner_of(request, ""), "")
