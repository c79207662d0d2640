# SPDX-License-Identifier: Apache-2.0
"""Client quotas (KIP-546): describe and alter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)


@dataclass(frozen=True, slots=True)
class ClientQuotaEntity:
    """Whom a quota is for: pairs of entity type (`user`, `client-id`, `ip`) and name, by type.

    The name None is the default of its type. `ClientQuotaEntity.of({"user": "alice"})` makes one from a mapping.
    """

    names: tuple[tuple[str, str | None], ...]

    @classmethod
    def of(cls, names: Mapping[str, str | None]) -> ClientQuotaEntity:
        """Returns the entity with these names by type."""
        return cls(tuple((entity_type, names[entity_type]) for entity_type in sorted(names)))


async def describe_client_quotas(cluster: Cluster) -> dict[ClientQuotaEntity, dict[str, float]]:
    response = await cluster.call_any(DescribeClientQuotasRequest(), DescribeClientQuotasResponse)
    if response.error_code:
        raise KafkaError(error_of(response.error_code), response.error_message)
    return {
        ClientQuotaEntity.of({part.entity_type: part.entity_name for part in entry.entity}): {
            value.key: value.value for value in entry.values
        }
        for entry in response.entries or ()
    }


async def alter_client_quotas(
    cluster: Cluster,
    deadline: Deadline,
    alterations: Mapping[ClientQuotaEntity, Mapping[str, float | None]],
    *,
    validate_only: bool,
) -> dict[ClientQuotaEntity, KafkaError | None]:
    async def attempt(entities: Iterable[ClientQuotaEntity]) -> Mapping[ClientQuotaEntity, KafkaError | None]:
        request = AlterClientQuotasRequest(
            entries=[_entry(entity, alterations[entity]) for entity in entities], validate_only=validate_only
        )
        response = await cluster.call_controller(request, AlterClientQuotasResponse)
        return {
            ClientQuotaEntity.of({part.entity_type: part.entity_name for part in result.entity}): outcome_of(
                result.error_code, result.error_message, None
            )
            for result in response.entries
        }

    return await repeat(cluster, deadline, alterations, attempt)


def _entry(entity: ClientQuotaEntity, values: Mapping[str, float | None]) -> AlterClientQuotasRequest.EntryData:
    return AlterClientQuotasRequest.EntryData(
        entity=[
            AlterClientQuotasRequest.EntityData(entity_type=entity_type, entity_name=name)
            for entity_type, name in entity.names
        ],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in values.items()
        ],
    )
