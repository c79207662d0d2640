# SPDX-License-Identifier: Apache-2.0
"""Delegation tokens (KIP-48): create, renew, expire and describe. Principals are `Type:name`."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field

from kcoord.client.cluster import Cluster
from kcoord.client.results import error_of
from kcoord_protocol.errors import KafkaError
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

_FIRST_VERSION_WITH_OWNER = 3


@dataclass(slots=True, frozen=True)
class DelegationToken:
    """A token. Times are in milliseconds since 1970."""

    token_id: str
    """The user name of clients that log in with the token."""
    owner: str
    token_requester: str
    """The principal that created the token. Empty if the broker does not tell it, which Kafka does since 3.3."""
    renewers: tuple[str, ...]
    issue_timestamp: int
    expiry_timestamp: int
    max_timestamp: int
    hmac: bytes = field(repr=False)
    """A secret, which names the token in requests to renew or expire it."""

    @property
    def hmac_as_base64(self) -> str:
        """The password of clients that log in with the token."""
        return base64.b64encode(self.hmac).decode()


async def create_delegation_token(
    cluster: Cluster, owner: str | None, renewers: Iterable[str], max_life_time_ms: int
) -> DelegationToken:
    renewer_list = list(renewers)
    request = CreateDelegationTokenRequest(
        renewers=[
            CreateDelegationTokenRequest.CreatableRenewers(principal_type=kind, principal_name=name)
            for kind, name in map(_parts, renewer_list)
        ],
        max_lifetime_ms=max_life_time_ms,
    )
    lowest = 0
    if owner is not None:
        request.owner_principal_type, request.owner_principal_name = _parts(owner)
        lowest = _FIRST_VERSION_WITH_OWNER
    response = await cluster.call_controller(request, CreateDelegationTokenResponse, lowest=lowest)
    _check(response.error_code)
    return DelegationToken(
        response.token_id,
        _principal(response.principal_type, response.principal_name),
        _principal(response.token_requester_principal_type, response.token_requester_principal_name),
        tuple(renewer_list),
        response.issue_timestamp_ms,
        response.expiry_timestamp_ms,
        response.max_timestamp_ms,
        response.hmac,
    )


async def renew_delegation_token(cluster: Cluster, hmac: bytes, renew_time_period_ms: int) -> int:
    request = RenewDelegationTokenRequest(hmac=hmac, renew_period_ms=renew_time_period_ms)
    response = await cluster.call_controller(request, RenewDelegationTokenResponse)
    _check(response.error_code)
    return response.expiry_timestamp_ms


async def expire_delegation_token(cluster: Cluster, hmac: bytes, expiry_time_period_ms: int) -> int:
    request = ExpireDelegationTokenRequest(hmac=hmac, expiry_time_period_ms=expiry_time_period_ms)
    response = await cluster.call_controller(request, ExpireDelegationTokenResponse)
    _check(response.error_code)
    return response.expiry_timestamp_ms


async def describe_delegation_tokens(cluster: Cluster, owners: Iterable[str] | None) -> list[DelegationToken]:
    request = DescribeDelegationTokenRequest(
        owners=None
        if owners is None
        else [
            DescribeDelegationTokenRequest.DescribeDelegationTokenOwner(principal_type=kind, principal_name=name)
            for kind, name in map(_parts, owners)
        ]
    )
    response = await cluster.call_any(request, DescribeDelegationTokenResponse)
    _check(response.error_code)
    return [
        DelegationToken(
            token.token_id,
            _principal(token.principal_type, token.principal_name),
            _principal(token.token_requester_principal_type, token.token_requester_principal_name),
            tuple(_principal(renewer.principal_type, renewer.principal_name) for renewer in token.renewers),
            token.issue_timestamp,
            token.expiry_timestamp,
            token.max_timestamp,
            token.hmac,
        )
        for token in response.tokens
    ]


def _check(error_code: int) -> None:
    if error_code:
        raise KafkaError(error_of(error_code))


def _principal(kind: str, name: str) -> str:
    return f"{kind}:{name}" if kind else ""


def _parts(principal: str) -> tuple[str, str]:
    """Returns the type and the name of a principal. Raises ValueError, with Kafka's text, if it has no type or name."""
    kind, _, name = principal.partition(":")
    if not kind or not name:
        raise ValueError(f"expected a string in format principalType:principalName but got {principal}")
    return kind, name
