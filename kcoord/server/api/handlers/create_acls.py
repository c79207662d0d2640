# SPDX-License-Identifier: Apache-2.0
"""CreateAcls, decided by the metadata machine; the ids of the ACLs are drawn here.

The response leaves when the ACLs are durable and the authorizers of all workers use them.
"""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorized_operations import NO_AUTHORIZER
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateAclsRequest, CreateAclsResponse

API_KEY = ApiKey.CREATE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: CreateAclsRequest) -> Reply[CreateAclsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    if broker.authorizer is None:
        raise KafkaError(Errors.SECURITY_DISABLED, NO_AUTHORIZER)
    acl_ids = [broker.uuids.take() for _ in request.creations]

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateAclsRequest
    ) -> CoordinatorResult[CreateAclsResponse]:
        return machine.create_acls(context, request, acl_ids)

    return broker.metadata.call(create, request, context.operation_context())


def error_response(request: CreateAclsRequest, error: KafkaError, version: int) -> CreateAclsResponse:
    result = CreateAclsResponse.AclCreationResult(error_code=error.error, error_message=error.message)
    return CreateAclsResponse(results=[result] * len(request.creations))
