# SPDX-License-Identifier: Apache-2.0
"""UnregisterBroker (KIP-631): the metadata machine decides. The broker is registered again when it is started again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcoord.server.broker import map_reply
from kcoord.server.metadata_operations import UnregisterBroker
from protocol.api_keys import ApiKey
from protocol.errors import KafkaError
from protocol.messages import UnregisterBrokerRequest, UnregisterBrokerResponse

if TYPE_CHECKING:
    from kcoord.server.broker import Broker, Reply
    from kcoord.server.request_context import RequestContext

API_KEY = ApiKey.UNREGISTER_BROKER
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: UnregisterBrokerRequest
) -> Reply[UnregisterBrokerResponse]:
    removed = broker.metadata.run(UnregisterBroker(request), context.operation_context(candidate=False))
    return map_reply(removed, lambda _: UnregisterBrokerResponse())


def error_response(request: UnregisterBrokerRequest, error: KafkaError, version: int) -> UnregisterBrokerResponse:
    return UnregisterBrokerResponse(error_code=error.error, error_message=error.message)
