# SPDX-License-Identifier: Apache-2.0
"""UnregisterBroker (KIP-631): the metadata machine decides. The broker is registered again when it is started again."""

from __future__ import annotations

from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.replies import Reply, map_reply
from kcoord.server.broker import Broker
from kcoord.server.shards.metadata_operations import UnregisterBroker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import UnregisterBrokerRequest, UnregisterBrokerResponse

API_KEY = ApiKey.UNREGISTER_BROKER
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: UnregisterBrokerRequest
) -> Reply[UnregisterBrokerResponse]:
    removed = broker.metadata.run(UnregisterBroker(request), context.operation_context())
    return map_reply(removed, lambda _: UnregisterBrokerResponse())


def error_response(request: UnregisterBrokerRequest, error: KafkaError, version: int) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=error.error, error_message=error.message)
