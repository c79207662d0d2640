# SPDX-License-Identifier: Apache-2.0
"""CreateAcls: kcoord has no authorizer, so it answers as Kafka does without one."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import NO_AUTHORIZER
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateAclsRequest, CreateAclsResponse

API_KEY = ApiKey.CREATE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    raise KafkaError(Errors.SECURITY_DISABLED, NO_AUTHORIZER)


def error_response(request: CreateAclsRequest, error: KafkaError, version: int) -> CreateAclsResponse:
    result = CreateAclsResponse.AclCreationResult(error_code=error.error, error_message=error.message)
    return CreateAclsResponse(results=[result] * len(request.creations))
