# SPDX-License-Identifier: Apache-2.0
"""UpdateFeatures (KIP-584), decided by the metadata machine. The response leaves when every worker uses the levels."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import UpdateFeaturesRequest, UpdateFeaturesResponse

API_KEY = ApiKey.UPDATE_FEATURES
VERSIONS = range(0, 3)


def handle(broker: Broker, context: RequestContext, request: UpdateFeaturesRequest) -> Reply[UpdateFeaturesResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    return broker.metadata.call(MetadataMachine.update_features, request, context.operation_context())


def error_response(request: UpdateFeaturesRequest, error: KafkaError, version: int) -> UpdateFeaturesResponse:
    return UpdateFeaturesResponse(error_code=error.error, error_message=error.message)
