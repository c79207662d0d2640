# SPDX-License-Identifier: Apache-2.0
"""Delegation tokens in the admin client: requests, results and errors."""

from __future__ import annotations

import pytest

from kcoord.client import ConfigException, DelegationToken, Errors, KafkaError
from kcoord.client.security_properties import security_of
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    ExpireDelegationTokenResponse,
    RenewDelegationTokenRequest,
    RenewDelegationTokenResponse,
)
from tests.unit.client.fake_broker import Answer
from tests.unit.client.test_admin import admin_of, canned

TOKEN = DelegationToken("id", "User:bob", "User:alice", ("User:carol", "User:d:e"), 1, 2, 3, b"secret")


async def test_a_token_is_created() -> None:
    failures = [Errors.NOT_CONTROLLER]

    def create(request: Message, version: int) -> Answer:
        if failures:
            return CreateDelegationTokenResponse(error_code=failures.pop())
        return CreateDelegationTokenResponse(
            principal_type="User",
            principal_name="bob",
            token_requester_principal_type="User",
            token_requester_principal_name="alice",
            issue_timestamp_ms=1,
            expiry_timestamp_ms=2,
            max_timestamp_ms=3,
            token_id="id",
            hmac=b"secret",
        )

    async with canned({ApiKey.CREATE_DELEGATION_TOKEN: create}) as broker, admin_of(broker) as admin:
        created = await admin.create_delegation_token(
            owner="User:bob", renewers=["User:carol", "User:d:e"], max_life_time_ms=5
        )
        requests = broker.requests_of(ApiKey.CREATE_DELEGATION_TOKEN)
        with pytest.raises(ValueError, match="expected a string in format principalType:principalName but got bob"):
            await admin.create_delegation_token(owner="bob")
    assert created == TOKEN
    assert created.hmac_as_base64 == "c2VjcmV0"
    assert "secret" not in repr(created)
    renewers = [("User", "carol"), ("User", "d:e")]
    assert requests == [
        CreateDelegationTokenRequest(
            owner_principal_type="User",
            owner_principal_name="bob",
            renewers=[
                CreateDelegationTokenRequest.CreatableRenewers(principal_type=kind, principal_name=name)
                for kind, name in renewers
            ],
            max_lifetime_ms=5,
        )
    ] * len(requests)


async def test_renewals_and_ends() -> None:
    def renew(request: Message, version: int) -> Answer:
        assert isinstance(request, RenewDelegationTokenRequest)
        assert request.hmac == b"secret"
        return RenewDelegationTokenResponse(expiry_timestamp_ms=request.renew_period_ms + 100)

    def expire(request: Message, version: int) -> Answer:
        assert isinstance(request, ExpireDelegationTokenRequest)
        if request.hmac != b"secret":
            return ExpireDelegationTokenResponse(error_code=Errors.DELEGATION_TOKEN_NOT_FOUND)
        return ExpireDelegationTokenResponse(expiry_timestamp_ms=request.expiry_time_period_ms + 200)

    answers = {ApiKey.RENEW_DELEGATION_TOKEN: renew, ApiKey.EXPIRE_DELEGATION_TOKEN: expire}
    async with canned(answers) as broker, admin_of(broker) as admin:
        assert await admin.renew_delegation_token(b"secret") == 99
        assert await admin.renew_delegation_token(b"secret", renew_time_period_ms=7) == 107
        assert await admin.expire_delegation_token(b"secret") == 199
        assert await admin.expire_delegation_token(b"secret", expiry_time_period_ms=7) == 207
        with pytest.raises(KafkaError) as failed:
            await admin.expire_delegation_token(b"other")
    assert failed.value.error is Errors.DELEGATION_TOKEN_NOT_FOUND


async def test_descriptions() -> None:
    described = DescribeDelegationTokenResponse.DescribedDelegationToken
    renewer = DescribeDelegationTokenResponse.DescribedDelegationTokenRenewer

    def describe(request: Message, version: int) -> Answer:
        token = described(
            principal_type="User",
            principal_name="bob",
            token_requester_principal_type="User",
            token_requester_principal_name="alice",
            issue_timestamp=1,
            expiry_timestamp=2,
            max_timestamp=3,
            token_id="id",
            hmac=b"secret",
            renewers=[renewer(principal_type="User", principal_name=name) for name in ("carol", "d:e")],
        )
        return DescribeDelegationTokenResponse(tokens=[token])

    async with canned({ApiKey.DESCRIBE_DELEGATION_TOKEN: describe}) as broker, admin_of(broker) as admin:
        assert await admin.describe_delegation_tokens() == [TOKEN]
        assert await admin.describe_delegation_tokens(["User:bob"]) == [TOKEN]
        requests = broker.requests_of(ApiKey.DESCRIBE_DELEGATION_TOKEN)
    owner = DescribeDelegationTokenRequest.DescribeDelegationTokenOwner(principal_type="User", principal_name="bob")
    assert requests == [DescribeDelegationTokenRequest(owners=None), DescribeDelegationTokenRequest(owners=[owner])]


def test_a_token_needs_a_mechanism_of_scram() -> None:
    properties = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": 'x required username="id" password="secret" tokenauth="true";',
    }
    with pytest.raises(ConfigException, match="needs a mechanism of SCRAM"):
        security_of(properties)
    assert security_of(properties | {"sasl.mechanism": "SCRAM-SHA-256"}) is not None
