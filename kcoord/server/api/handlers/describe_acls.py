# SPDX-License-Identifier: Apache-2.0
"""DescribeAcls: kcoord has no authorizer, so it answers as Kafka does without one."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeAclsRequest, DescribeAclsResponse

API_KEY = ApiKey.DESCRIBE_ACLS
VERSIONS = range(1, 4)


def handle(broker: Broker, context: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    raise KafkaError(Errors.SECURITY_DISABLED, "No Authorizer is configured on the broker")


def error_response(request: DescribeAclsRequest, error: KafkaError, version: int) -> DescribeAclsResponse:
    return DescribeAclsResponse(error_code=error.error, error_message=error.message)
