# SPDX-License-Identifier: Apache-2.0
"""DescribeAcls, from the metadata image."""

from __future__ import annotations

from kcoord.metadata.acl_changes import describe_acls
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeAclsRequest, DescribeAclsResponse

API_KEY = ApiKey.DESCRIBE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE)
    if broker.authorizer is None:
        raise KafkaError(Errors.SECURITY_DISABLED, "No Authorizer is configured on the broker")
    return describe_acls(broker.image, request)


def error_response(request: DescribeAclsRequest, error: KafkaError, version: int) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=error.error, error_message=error.message)
