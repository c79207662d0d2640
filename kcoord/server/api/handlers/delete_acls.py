# SPDX-License-Identifier: Apache-2.0
"""DeleteAcls, decided by the metadata machine.

The response leaves when the deletion is durable and the authorizers of all workers have applied it.
"""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import NO_AUTHORIZER
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DeleteAclsRequest, DeleteAclsResponse

API_KEY = ApiKey.DELETE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: DeleteAclsRequest) -> Reply[DeleteAclsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    if broker.authorizer is None:
        raise KafkaError(Errors.SECURITY_DISABLED, NO_AUTHORIZER)
    return broker.metadata.call(MetadataMachine.delete_acls, request, context.operation_context())


def error_response(request: DeleteAclsRequest, error: KafkaError, version: int) -> DeleteAclsResponse:
    result = DeleteAclsResponse.DeleteAclsFilterResult(error_code=error.error, error_message=error.message)
    return DeleteAclsResponse(filter_results=[result] * len(request.filters))
