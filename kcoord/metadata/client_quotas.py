# SPDX-License-Identifier: Apache-2.0
"""AlterClientQuotas and DescribeClientQuotas (KIP-546) as pure functions of image and request.

A quota belongs to an entity: a user, a client id, both, or an ip. A name of None is the default of its type. Any stored
key can be removed.
The entities of a request succeed or fail one by one. The error texts were observed in Kafka 4.4.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from ipaddress import IPv6Address, ip_address
from math import isfinite
from typing import Final

from kcoord.metadata.image import MetadataImage, QuotaEntity, quota_entity
from kcoord.metadata.records import new_client_quota_record, new_remove_client_quota_record
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
ENTITY_TYPES: Final = frozenset((USER, CLIENT_ID, IP))

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CLIENT_KEYS: Final = frozenset((PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, CONTROLLER_MUTATION_RATE, REQUEST_PERCENTAGE))
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"
IP_KEYS: Final = frozenset((CONNECTION_CREATION_RATE,))

_FRACTION: Final = 1e-6
_MAX_VALUES: Final = {
    PRODUCER_BYTE_RATE: (2.0**63, "a LONG"),
    CONSUMER_BYTE_RATE: (2.0**63, "a LONG"),
    CONNECTION_CREATION_RATE: (2.0**31 - 1, "an INT"),
}
"""The largest values of the keys that have an integer, and the names of their types. Other keys may have a fraction."""

AlterEntry = AlterClientQuotasRequest.EntryData
AlterResult = AlterClientQuotasResponse.EntryData
Component = DescribeClientQuotasRequest.ComponentData
DescribedEntry = DescribeClientQuotasResponse.EntryData


class MatchType(IntEnum):
    """How a filter of DescribeClientQuotas matches an entity."""

    EXACT = 0
    DEFAULT = 1
    SPECIFIED = 2


# --- alter ------------------------------------------------------------------------------------------------------------


def alter_client_quotas(
    image: MetadataImage, request: AlterClientQuotasRequest
) -> CoordinatorResult[AlterClientQuotasResponse]:
    """Sets and removes quotas. With `validate_only` nothing changes."""
    outcomes: dict[QuotaEntity, list[CoordinatorRecord] | KafkaError] = {}
    for entry in request.entries:
        entity = _entity_of(entry)
        try:
            if entity in outcomes:
                outcomes[entity] = _duplicate(entity)
            else:
                outcomes[entity] = _altered(image, entity, entry)
        except KafkaError as error:
            outcomes[entity] = error
    response = AlterClientQuotasResponse(entries=[_result(entity, outcome) for entity, outcome in outcomes.items()])
    records = [record for outcome in outcomes.values() if not isinstance(outcome, KafkaError) for record in outcome]
    return CoordinatorResult(response, [] if request.validate_only else records)


def failed_entries(request: AlterClientQuotasRequest, error: KafkaError) -> list[AlterResult]:
    """Returns the results of a request that failed as a whole."""
    return [_result(_entity_of(entry), error) for entry in request.entries]


def _entity_of(entry: AlterEntry) -> QuotaEntity:
    return quota_entity((part.entity_type, part.entity_name) for part in entry.entity)


def _result(entity: QuotaEntity, outcome: list[CoordinatorRecord] | KafkaError) -> AlterResult:
    error = outcome if isinstance(outcome, KafkaError) else None
    return AlterResult(
        error_code=Errors.NONE if error is None else error.error,
        error_message=None if error is None else error.message,
        entity=[AlterClientQuotasResponse.EntityData(entity_type=kind, entity_name=name) for kind, name in entity],
    )


def _altered(image: MetadataImage, entity: QuotaEntity, entry: AlterEntry) -> list[CoordinatorRecord]:
    """Returns the records of an entry. Raises KafkaError if the entry is invalid."""
    keys = _keys_of(entity)
    stored = image.client_quotas.get(entity, {})
    records: dict[str, CoordinatorRecord | None] = {}
    for operation in entry.ops:
        key = operation.key
        if key in records:
            raise _duplicate(entity)
        records[key] = None
        if operation.remove:
            if key in stored:
                records[key] = new_remove_client_quota_record(entity, key)
            continue
        _check_value(keys, key, operation.value)
        if stored.get(key) != operation.value:
            records[key] = new_client_quota_record(entity, key, operation.value)
    return [record for record in records.values() if record is not None]


def _keys_of(entity: QuotaEntity) -> frozenset[str]:
    """Returns the keys that an entity may have in Kafka. Raises KafkaError if the entity is invalid."""
    types = [entity_type for entity_type, _ in entity]
    for entity_type, name in entity:
        if entity_type not in ENTITY_TYPES:
            raise KafkaError(Errors.INVALID_REQUEST, f"Unhandled client quota entity type: {entity_type}")
        if name == "":
            raise KafkaError(Errors.INVALID_REQUEST, f"Empty {entity_type} not supported")
    if not types:
        raise KafkaError(Errors.INVALID_REQUEST, "Invalid empty client quota entity")
    if IP in types and len(types) > 1:
        text = "Invalid quota entity combination, IP entity shouldnot be combined with User or ClientId"
        raise KafkaError(Errors.INVALID_REQUEST, text)
    if IP not in types:
        return CLIENT_KEYS
    name = entity[0][1]
    if name is not None and address_of(name) is None:
        # Kafka also takes the name of a host. Asking the DNS would block the broker.
        text = f"{name} is not a valid IP or resolvable host: name the address of the host."
        raise KafkaError(Errors.INVALID_REQUEST, text)
    return IP_KEYS


def address_of(name: str) -> str | None:
    """Returns an ip address in its usual form, None if the name is no address. IPv4 within IPv6 becomes IPv4."""
    try:
        address = ip_address(name)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def _check_value(keys: frozenset[str], key: str, value: float) -> None:
    if key not in keys:
        raise KafkaError(Errors.INVALID_REQUEST, f"Invalid configuration key {key}")
    if not isfinite(value):
        raise KafkaError(Errors.INVALID_REQUEST, f"Quota {key} must be a finite number")
    if value <= 0:
        raise KafkaError(Errors.INVALID_REQUEST, f"Quota {key} must be greater than 0")
    if key not in _MAX_VALUES:
        return
    max_value, type_name = _MAX_VALUES[key]
    if value > max_value:
        raise KafkaError(Errors.INVALID_REQUEST, f"Proposed value for {key} is too large for {type_name}.")
    if value % 1.0 > _FRACTION:
        raise KafkaError(Errors.INVALID_REQUEST, f"{key} cannot be a fractional value.")


def _duplicate(entity: QuotaEntity) -> KafkaError:
    """Returns the error of an entity that a request names twice, or for which it names a key twice."""
    names = ", ".join(f"{entity_type}={'null' if name is None else name}" for entity_type, name in entity)
    return KafkaError(Errors.INVALID_REQUEST, f"Ignoring duplicate entity ClientQuotaEntity(entries={{{names}}})")


# --- describe ---------------------------------------------------------------------------------------------------------


def describe_client_quotas(image: MetadataImage, request: DescribeClientQuotasRequest) -> list[DescribedEntry]:
    """Returns the entities that match all components of the filter. `strict`: and have no other type."""
    filters = _checked(request.components)
    if request.strict and not filters:
        return []
    return [
        DescribedEntry(
            entity=[
                DescribeClientQuotasResponse.EntityData(entity_type=entity_type, entity_name=name)
                for entity_type, name in entity
            ],
            values=[DescribeClientQuotasResponse.ValueData(key=key, value=value) for key, value in quotas.items()],
        )
        for entity, quotas in image.client_quotas.items()
        if _matches(filters, dict(entity), is_strict=request.strict)
    ]


def _matches(filters: Mapping[str, Component], entity: Mapping[str, str | None], *, is_strict: bool) -> bool:
    if is_strict and len(entity) != len(filters):
        return False
    # The match string of MatchType.DEFAULT is None, as the name of the default is.
    return all(
        entity_type in entity
        and (component.match_type == MatchType.SPECIFIED or entity[entity_type] == component.match)
        for entity_type, component in filters.items()
    )


def _checked(components: Iterable[Component]) -> dict[str, Component]:
    """Returns the components by entity type. Raises KafkaError if one is invalid, or their combination."""
    filters: dict[str, Component] = {}
    for component in components:
        _check_component(component, filters)
        filters[component.entity_type] = component
    if IP in filters and len(filters) > 1:
        raise KafkaError(
            Errors.INVALID_REQUEST,
            "Invalid entity filter component combination. IP filter component should not be used with user or clientId "
            "filter component.",
        )
    return filters


def _check_component(component: Component, before: Mapping[str, Component]) -> None:
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


# --- other metadata logs ----------------------------------------------------------------------------------------------


def records_of_quotas(image: MetadataImage) -> Iterator[CoordinatorRecord]:
    """Yields the records of the quotas of an image, for another metadata log."""
    for entity, quotas in image.client_quotas.items():
        for key, value in quotas.items():
            yield new_client_quota_record(entity, key, value)
