# SPDX-License-Identifier: Apache-2.0
"""AlterClientQuotas (KIP-546), decided by the metadata machine."""

from __future__ import annotations

from kcoord.metadata.client_quotas import failed_entries
from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterClientQuotasRequest, AlterClientQuotasResponse

API_KEY = ApiKey.ALTER_CLIENT_QUOTAS
VERSIONS = range(0, 2)


def handle(
    broker: Broker, context: RequestContext, request: AlterClientQuotasRequest
) -> Reply[AlterClientQuotasResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER_CONFIGS)
    return broker.metadata.call(MetadataMachine.alter_client_quotas, request, context.operation_context())


def error_response(request: AlterClientQuotasRequest, error: KafkaError, version: int) -> AlterClientQuotasResponse:
    return AlterClientQuotasResponse(entries=failed_entries(request, error))
