# SPDX-License-Identifier: Apache-2.0
"""DeleteAcls: kcoord has no authorizer, so it answers as Kafka does without one."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import NO_AUTHORIZER
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DeleteAclsRequest, DeleteAclsResponse

API_KEY = ApiKey.DELETE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    raise KafkaError(Errors.SECURITY_DISABLED, NO_AUTHORIZER)


def error_response(request: DeleteAclsRequest, error: KafkaError, version: int) -> DeleteAclsResponse:
    result = DeleteAclsResponse.DeleteAclsFilterResult(error_code=error.error, error_message=error.message)
    return DeleteAclsResponse(filter_results=[result] * len(request.filters))
