# SPDX-License-Identifier: Apache-2.0
"""AlterClientQuotas and DescribeClientQuotas: what they store and find, and the texts of their errors."""

from __future__ import annotations

import pytest

from kcoord.metadata.client_quotas import records_of_quotas
from kcoord.metadata.image import ImageBuilder, QuotaEntity, quota_entity
from kcoord.metadata.records import new_client_quota_record
from kcoord.server.api.handlers import alter_client_quotas, describe_client_quotas
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AlterClientQuotasRequest, DescribeClientQuotasRequest
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, context, settle

ALICE: QuotaEntity = (("user", "alice"),)
DEFAULT_USER: QuotaEntity = (("user", None),)
ALICE_APP: QuotaEntity = (("client-id", "app"), ("user", "alice"))
IP: QuotaEntity = (("ip", "192.0.2.1"),)
APP: QuotaEntity = (("client-id", "app"),)
RATE = "producer_byte_rate"

Entry = AlterClientQuotasRequest.EntryData
Outcome = tuple[int, str | None]


def entry(entity: QuotaEntity, **values: float | None) -> Entry:
    """Returns an entry that sets values, and removes those that are None."""
    return Entry(
        entity=[AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name) for kind, name in entity],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in values.items()
        ],
    )


async def alter(cluster: Cluster, *entries: Entry, validate_only: bool = False) -> list[Outcome]:
    request = AlterClientQuotasRequest(entries=list(entries), validate_only=validate_only)
    asked = context(ApiKey.ALTER_CLIENT_QUOTAS, 1)
    response = await settle(alter_client_quotas.handle(broker_of(cluster), asked, request), 1)
    return [(result.error_code, result.error_message) for result in response.entries]


async def described(
    cluster: Cluster, *filters: tuple[str, int, str | None], strict: bool = False
) -> dict[QuotaEntity, dict[str, float]]:
    request = DescribeClientQuotasRequest(
        components=[
            DescribeClientQuotasRequest.ComponentData(entity_type=kind, match_type=match_type, match=match)
            for kind, match_type, match in filters
        ],
        strict=strict,
    )
    asked = context(ApiKey.DESCRIBE_CLIENT_QUOTAS, 1)
    response = await settle(describe_client_quotas.handle(broker_of(cluster), asked, request), 1)
    return {
        quota_entity((part.entity_type, part.entity_name) for part in described_entry.entity): {
            value.key: value.value for value in described_entry.values
        }
        for described_entry in response.entries or ()
    }


async def test_quotas_are_set_changed_and_removed(cluster: Cluster) -> None:
    assert await alter(cluster, entry(ALICE, producer_byte_rate=1000.0, consumer_byte_rate=5.0)) == [(0, None)]
    assert await described(cluster) == {ALICE: {RATE: 1000.0, "consumer_byte_rate": 5.0}}
    before = cluster.image
    assert await alter(cluster, entry(ALICE, producer_byte_rate=2000.0, consumer_byte_rate=None)) == [(0, None)]
    assert await described(cluster) == {ALICE: {RATE: 2000.0}}
    assert before.client_quotas[ALICE] == {RATE: 1000.0, "consumer_byte_rate": 5.0}
    assert await alter(cluster, entry(ALICE, producer_byte_rate=None)) == [(0, None)]
    assert cluster.image.client_quotas == {}


@pytest.mark.parametrize("name", ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", None])
async def test_rates_of_connections(cluster: Cluster, name: str | None) -> None:
    entity: QuotaEntity = (("ip", name),)
    assert await alter(cluster, entry(entity, connection_creation_rate=2.0**31 - 1)) == [(0, None)]
    assert cluster.image.client_quotas == {entity: {"connection_creation_rate": 2.0**31 - 1}}


async def test_a_rate_of_partitions_may_be_a_fraction(cluster: Cluster) -> None:
    assert await alter(cluster, entry(ALICE, controller_mutation_rate=1e30)) == [(0, None)]
    assert await alter(cluster, entry(ALICE, controller_mutation_rate=0.25)) == [(0, None)]
    assert cluster.image.client_quotas == {ALICE: {"controller_mutation_rate": 0.25}}


async def test_a_change_that_changes_nothing_makes_no_record(cluster: Cluster) -> None:
    await alter(cluster, entry(ALICE, producer_byte_rate=1000.0))
    image = cluster.image
    assert await alter(cluster, entry(ALICE, producer_byte_rate=1000.0, nope=None)) == [(0, None)]
    assert cluster.image.epoch == image.epoch


async def test_validation_alone_changes_nothing(cluster: Cluster) -> None:
    assert await alter(cluster, entry(ALICE, producer_byte_rate=1000.0), validate_only=True) == [(0, None)]
    assert cluster.image.client_quotas == {}


async def test_entities_succeed_and_fail_one_by_one(cluster: Cluster) -> None:
    results = await alter(cluster, entry(ALICE, nope=1.0), entry(APP, producer_byte_rate=1.0))
    assert results == [(42, "Invalid configuration key nope"), (0, None)]
    assert set(cluster.image.client_quotas) == {APP}


@pytest.mark.parametrize(
    ("invalid", "text"),
    [
        (entry((), producer_byte_rate=1.0), "Invalid empty client quota entity"),
        (entry((("group", "g"),), producer_byte_rate=1.0), "Unhandled client quota entity type: group"),
        (entry((("user", ""),), producer_byte_rate=1.0), "Empty user not supported"),
        (
            entry((("ip", "192.0.2.1"), ("user", "alice")), connection_creation_rate=1.0),
            "Invalid quota entity combination, IP entity shouldnot be combined with User or ClientId",
        ),
        (entry((("ip", "192.0.2.1"),), producer_byte_rate=1.0), f"Invalid configuration key {RATE}"),
        (entry(ALICE, connection_creation_rate=1.0), "Invalid configuration key connection_creation_rate"),
        (entry(ALICE, producer_byte_rate=0.0), f"Quota {RATE} must be greater than 0"),
        (entry(ALICE, producer_byte_rate=-1.0), f"Quota {RATE} must be greater than 0"),
        (entry(ALICE, producer_byte_rate=1.5), f"{RATE} cannot be a fractional value."),
        (entry(ALICE, producer_byte_rate=float("nan")), f"Quota {RATE} must be a finite number"),
        (entry(ALICE, producer_byte_rate=1e30), f"Proposed value for {RATE} is too large for a LONG."),
        (entry(ALICE, request_percentage=0.0), "Quota request_percentage must be greater than 0"),
        (
            entry(ALICE, request_percentage=float("inf")),
            "Quota request_percentage must be a finite number",
        ),
        (entry(ALICE, controller_mutation_rate=0.0), "Quota controller_mutation_rate must be greater than 0"),
        (entry(IP, connection_creation_rate=0.0), "Quota connection_creation_rate must be greater than 0"),
        (entry(IP, connection_creation_rate=1.5), "connection_creation_rate cannot be a fractional value."),
        (
            entry(IP, connection_creation_rate=2.0**31),
            "Proposed value for connection_creation_rate is too large for an INT.",
        ),
        (entry(IP, request_percentage=1.0), "Invalid configuration key request_percentage"),
        (
            entry((("ip", "host.example"),), connection_creation_rate=1.0),
            "host.example is not a valid IP or resolvable host: name the address of the host.",
        ),
    ],
)
async def test_invalid_changes(cluster: Cluster, invalid: Entry, text: str) -> None:
    assert await alter(cluster, invalid) == [(Errors.INVALID_REQUEST, text)]
    assert cluster.image.client_quotas == {}


async def test_an_entity_or_key_that_occurs_twice(cluster: Cluster) -> None:
    twice = entry(ALICE_APP, producer_byte_rate=1.0)
    twice.ops += twice.ops
    text = "ClientQuotaEntity(entries={client-id=app, user=alice})"
    assert await alter(cluster, twice) == [(42, f"Ignoring duplicate entity {text}")]
    once = entry(ALICE_APP, producer_byte_rate=1.0)
    assert await alter(cluster, once, once) == [(42, f"Ignoring duplicate entity {text}")]
    assert cluster.image.client_quotas == {}


async def test_filters(cluster: Cluster) -> None:
    entities = (ALICE, DEFAULT_USER, ALICE_APP, APP)
    await alter(cluster, *(entry(entity, producer_byte_rate=1.0) for entity in entities))

    async def matched(*filters: tuple[str, int, str | None], strict: bool = False) -> set[QuotaEntity]:
        return set(await described(cluster, *filters, strict=strict))

    assert await matched() == set(entities)
    assert await matched(strict=True) == set()
    assert await matched(("user", 0, "alice")) == {ALICE, ALICE_APP}
    assert await matched(("user", 0, "alice"), strict=True) == {ALICE}
    assert await matched(("user", 1, None)) == {DEFAULT_USER}
    assert await matched(("user", 2, None)) == {ALICE, DEFAULT_USER, ALICE_APP}
    assert await matched(("user", 2, None), ("client-id", 0, "app")) == {ALICE_APP}
    assert await matched(("client-id", 1, None)) == set()
    assert await matched(("ip", 2, None)) == set()


def test_a_failed_request_names_its_entities() -> None:
    request = AlterClientQuotasRequest(entries=[entry(ALICE, producer_byte_rate=1.0)])
    response = alter_client_quotas.error_response(request, KafkaError(Errors.NOT_CONTROLLER, "moved"), 1)
    (result,) = response.entries
    assert (result.error_code, result.error_message) == (Errors.NOT_CONTROLLER, "moved")
    assert [(part.entity_type, part.entity_name) for part in result.entity] == [("user", "alice")]


def test_other_logs_get_all_quotas() -> None:
    made = [
        new_client_quota_record(ALICE, RATE, 1.0),
        new_client_quota_record(ALICE, "request_percentage", 2.0),
        new_client_quota_record((("ip", None),), "connection_creation_rate", 3.0),
    ]
    assert list(records_of_quotas(ImageBuilder.of(made))) == made
