# SPDX-License-Identifier: Apache-2.0
"""DescribeClientQuotas (KIP-546), answered from the published image."""

from __future__ import annotations

from kcoord.metadata.client_quotas import describe_client_quotas
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

API_KEY = ApiKey.DESCRIBE_CLIENT_QUOTAS
VERSIONS = range(0, 2)


def handle(
    broker: Broker, context: RequestContext, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE_CONFIGS)
    return DescribeClientQuotasResponse(entries=describe_client_quotas(broker.image, request))


def error_response(
    request: DescribeClientQuotasRequest, error: KafkaError, version: int
) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(error_code=error.error, error_message=error.message, entries=None)
