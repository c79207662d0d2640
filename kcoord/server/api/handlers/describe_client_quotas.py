# SPDX-License-Identifier: Apache-2.0
"""DescribeClientQuotas (KIP-546): there are no quotas to match a filter. Invalid filters are refused as in Kafka."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

API_KEY = ApiKey.DESCRIBE_CLIENT_QUOTAS
VERSIONS = range(0, 2)

IP: Final = "ip"
ENTITY_TYPES: Final = frozenset(("user", "client-id", IP))


class MatchType(IntEnum):
    EXACT = 0
    DEFAULT = 1
    SPECIFIED = 2


def handle(
    broker: Broker, context: RequestContext, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    types: list[str] = []
    for component in request.components:
        _check(component, types)
        types.append(component.entity_type)
    if IP in types and len(types) > 1:
        raise KafkaError(
            Errors.INVALID_REQUEST,
            "Invalid entity filter component combination. IP filter component should not be used with user or clientId "
            "filter component.",
        )
    return DescribeClientQuotasResponse(entries=[])


def _check(component: DescribeClientQuotasRequest.ComponentData, before: list[str]) -> None:
    """Raises KafkaError if the component is invalid, or invalid after components of the types `before`."""
    entity_type = component.entity_type
    if not entity_type:
        raise KafkaError(Errors.INVALID_REQUEST, "Invalid empty entity type.")
    if entity_type in before:
        text = f"Entity type {entity_type} cannot appear more than once in the filter."
        raise KafkaError(Errors.INVALID_REQUEST, text)
    if entity_type not in ENTITY_TYPES:
        raise KafkaError(Errors.UNSUPPORTED_VERSION, f"Unsupported entity type {entity_type}")
    if component.match_type not in tuple(MatchType):
        raise KafkaError(Errors.INVALID_REQUEST, f"Unknown match type {component.match_type}")
    kind = f"Request specified MATCH_TYPE_{MatchType(component.match_type).name}"
    if component.match_type == MatchType.EXACT:
        if component.match is None:
            raise KafkaError(Errors.INVALID_REQUEST, f"{kind}, but set match string to null.")
    elif component.match is not None:
        raise KafkaError(Errors.INVALID_REQUEST, f"{kind}, but also specified a match string.")


def error_response(
    request: DescribeClientQuotasRequest, error: KafkaError, version: int
) -> DescribeClientQuotasResponse:
    return DescribeClientQuotasResponse(error_code=error.error, error_message=error.message, entries=None)
