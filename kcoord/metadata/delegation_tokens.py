# SPDX-License-Identifier: Apache-2.0
"""Delegation tokens (KIP-48) as pure functions of image, configuration, request and time, with Kafka's rules.

A token lets its holder log in as its owner. Theory of operation:

* Its record has an id, the owner, the requester, the renewers and three times. The HMAC of the token is its password:
  HmacSHA512 of the id with `delegation.token.secret.key`. The log never has it, so nobody can log in with what the log
  has, and all brokers with the same secret key accept the same tokens.
* A token is valid until its expiry time. The owner and the renewers may renew it, until its maximum time at most.
* The owner and the renewers may also expire it, at a later time or at once.
* The controller removes expired tokens every `delegation.token.expiry.check.interval.ms`. A token that has expired and
  is not removed yet cannot be renewed, and nobody can log in with it.

The HMAC names the token in requests to renew or expire it, so a client needs it for them, as in Kafka.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.records import (
    DelegationTokenData,
    new_delegation_token_record,
    new_remove_delegation_token_record,
)
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors
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

_logger = logging.getLogger(__name__)

USER_TYPE: Final = "User"
UNKNOWN_TIME: Final = -1
"""The times in the response to a request that the broker rejects without asking the controller."""
_FIRST_METADATA_VERSION: Final = 14
"""The first metadata.version with delegation tokens, that of Kafka 3.6."""
_LATEST_TIME: Final = 2**63 - 1
_MAX_DIGESTS: Final = 1 << 18
"""The number of HMACs that are kept: a request to renew or expire a token compares those of all tokens."""
MAX_REMOVALS: Final = 1000
"""The largest number of expired tokens that one operation removes, since its records must fit into one batch."""

DescribedToken = DescribeDelegationTokenResponse.DescribedDelegationToken
DescribedRenewer = DescribeDelegationTokenResponse.DescribedDelegationTokenRenewer


def token_hmac(config: BrokerConfig, token_id: str) -> bytes:
    """Returns the HMAC of a token. Tokens are enabled."""
    secret_key = config.delegation_token_secret_key
    assert secret_key, "delegation.token.secret.key is set"
    return _digest(secret_key, token_id)


@lru_cache(_MAX_DIGESTS)
def _digest(secret_key: str, token_id: str) -> bytes:
    return hmac.digest(secret_key.encode(), token_id.encode(), "sha512")


def records_of_tokens(image: MetadataImage) -> list[CoordinatorRecord]:
    """Returns the records of all tokens of an image, for another metadata log."""
    return [
        new_delegation_token_record(token_id, token)
        for token_id, token in sorted(image.delegation_tokens.items(), key=itemgetter(0))
    ]


# --- changes ----------------------------------------------------------------------------------------------------------


def create_delegation_token(
    image: MetadataImage,
    config: BrokerConfig,
    context: OperationContext,
    request: CreateDelegationTokenRequest,
    token_id: str,
) -> CoordinatorResult[CreateDelegationTokenResponse]:
    """Creates a token of the owner that the request names, or of the requester."""
    error = _availability(image, config)
    owner = owner_of(request, context.principal)
    if error is not Errors.NONE:
        return CoordinatorResult(creation_response(error, owner, context.principal))
    now_ms = context.now_ms
    lifetime_ms = config.delegation_token_max_lifetime_ms
    if request.max_lifetime_ms > 0:
        lifetime_ms = min(lifetime_ms, request.max_lifetime_ms)
    max_ms = _later(now_ms, lifetime_ms)
    token = DelegationTokenData(
        owner=owner,
        requester=context.principal,
        renewers=tuple(f"{renewer.principal_type}:{renewer.principal_name}" for renewer in request.renewers),
        issue_ms=now_ms,
        max_ms=max_ms,
        expiry_ms=min(max_ms, _later(now_ms, config.delegation_token_expiry_time_ms)),
    )
    response = creation_response(Errors.NONE, owner, context.principal)
    response.issue_timestamp_ms = token.issue_ms
    response.expiry_timestamp_ms = token.expiry_ms
    response.max_timestamp_ms = token.max_ms
    response.token_id = token_id
    response.hmac = token_hmac(config, token_id)
    return CoordinatorResult(response, [new_delegation_token_record(token_id, token)])


def renew_delegation_token(
    image: MetadataImage, config: BrokerConfig, context: OperationContext, request: RenewDelegationTokenRequest
) -> CoordinatorResult[RenewDelegationTokenResponse]:
    """Sets the expiry time of a token, counted from now."""
    error, token_id = _token_of(image, config, request.hmac)
    if error is Errors.NONE:
        token = image.delegation_tokens[token_id]
        if token.is_expired(context.now_ms):
            error = Errors.DELEGATION_TOKEN_EXPIRED
        elif not token.is_of(context.principal):
            error = Errors.DELEGATION_TOKEN_OWNER_MISMATCH
    if error is not Errors.NONE:
        return CoordinatorResult(RenewDelegationTokenResponse(error_code=error))
    period_ms = config.delegation_token_expiry_time_ms
    if request.renew_period_ms > 0:
        period_ms = min(period_ms, request.renew_period_ms)
    renewed = token.expiring(_later(context.now_ms, period_ms))
    response = RenewDelegationTokenResponse(expiry_timestamp_ms=renewed.expiry_ms)
    return CoordinatorResult(response, [new_delegation_token_record(token_id, renewed)])


def expire_delegation_token(
    image: MetadataImage, config: BrokerConfig, context: OperationContext, request: ExpireDelegationTokenRequest
) -> CoordinatorResult[ExpireDelegationTokenResponse]:
    """Sets the expiry time of a token, counted from now. A negative period removes it at once, even if it expired."""
    error, token_id = _token_of(image, config, request.hmac)
    now_ms, period_ms = context.now_ms, request.expiry_time_period_ms
    if error is Errors.NONE:
        token = image.delegation_tokens[token_id]
        if not token.is_of(context.principal):
            error = Errors.DELEGATION_TOKEN_OWNER_MISMATCH
        elif period_ms >= 0 and token.is_expired(now_ms):
            error = Errors.DELEGATION_TOKEN_EXPIRED
    if error is not Errors.NONE:
        return CoordinatorResult(ExpireDelegationTokenResponse(error_code=error))
    if period_ms < 0:
        response = ExpireDelegationTokenResponse(expiry_timestamp_ms=now_ms)
        return CoordinatorResult(response, [new_remove_delegation_token_record(token_id)])
    changed = token.expiring(_later(now_ms, period_ms))
    response = ExpireDelegationTokenResponse(expiry_timestamp_ms=changed.expiry_ms)
    return CoordinatorResult(response, [new_delegation_token_record(token_id, changed)])


def expired_token_records(image: MetadataImage, now_ms: int) -> list[CoordinatorRecord]:
    """Returns the records that remove the expired tokens, at most `MAX_REMOVALS`."""
    made: list[CoordinatorRecord] = []
    for token_id, token in image.delegation_tokens.items():
        if len(made) == MAX_REMOVALS:
            break
        if token.is_expired(now_ms):
            _logger.info("Delegation token expired for token: %s for owner: %s", token_id, token.owner)
            made.append(new_remove_delegation_token_record(token_id))
    return made


def _availability(image: MetadataImage, config: BrokerConfig) -> Errors:
    """Returns the error of a cluster without delegation tokens, else NONE."""
    if not config.delegation_token_secret_key:
        return Errors.DELEGATION_TOKEN_AUTH_DISABLED
    if image.features.get("metadata.version", _FIRST_METADATA_VERSION) < _FIRST_METADATA_VERSION:
        return Errors.UNSUPPORTED_VERSION
    return Errors.NONE


def _token_of(image: MetadataImage, config: BrokerConfig, digest: bytes) -> tuple[Errors, str]:
    """Returns NONE and the id of the token with this HMAC, else an error.

    The image does not have the HMACs, so that of each token is compared.
    """
    error = _availability(image, config)
    if error is Errors.NONE:
        for token_id in image.delegation_tokens:
            if hmac.compare_digest(token_hmac(config, token_id), digest):
                return error, token_id
        error = Errors.DELEGATION_TOKEN_NOT_FOUND
    return error, ""


def _later(now_ms: int, period_ms: int) -> int:
    return min(now_ms + period_ms, _LATEST_TIME)


# --- responses --------------------------------------------------------------------------------------------------------


def has_users_only(request: CreateDelegationTokenRequest) -> bool:
    """Returns whether owner and renewers are users. Only a user can log in, so other types would be misunderstood."""
    is_user = not request.owner_principal_name or request.owner_principal_type == USER_TYPE
    return is_user and all(renewer.principal_type == USER_TYPE for renewer in request.renewers)


def owner_of(request: CreateDelegationTokenRequest, requester: str) -> str:
    """Returns the principal that the request names as owner. Without one, it is the requester."""
    if not request.owner_principal_name:
        return requester
    return f"{request.owner_principal_type}:{request.owner_principal_name}"


def creation_response(error: Errors, owner: str, requester: str) -> CreateDelegationTokenResponse:
    """Returns a response without a token."""
    owner_type, owner_name = _parts(owner)
    requester_type, requester_name = _parts(requester)
    return CreateDelegationTokenResponse(
        error_code=error,
        principal_type=owner_type,
        principal_name=owner_name,
        token_requester_principal_type=requester_type,
        token_requester_principal_name=requester_name,
    )


def rejected_creation(error: Errors, owner: str, requester: str) -> CreateDelegationTokenResponse:
    """Returns the response to a request that the broker rejects without asking the controller."""
    response = creation_response(error, owner, requester)
    response.issue_timestamp_ms = response.expiry_timestamp_ms = response.max_timestamp_ms = UNKNOWN_TIME
    return response


def described_tokens(
    image: MetadataImage,
    config: BrokerConfig,
    request: DescribeDelegationTokenRequest,
    requester: str,
    may_describe: Callable[[str, DelegationTokenData], bool],
) -> Iterator[DescribedToken]:
    """Yields the tokens that the request asks for and the requester may see.

    Owners and renewers see their tokens; `may_describe` decides about the other ones. A request for owners also gets
    the tokens that they may renew.
    """
    owners = None if request.owners is None else {f"{o.principal_type}:{o.principal_name}" for o in request.owners}
    for token_id, token in image.delegation_tokens.items():
        if owners is not None and owners.isdisjoint((token.owner, *token.renewers)):
            continue
        if token.is_of(requester) or may_describe(token_id, token):
            yield _described(config, token_id, token)


def _described(config: BrokerConfig, token_id: str, token: DelegationTokenData) -> DescribedToken:
    owner_type, owner_name = _parts(token.owner)
    requester_type, requester_name = _parts(token.requester)
    return DescribedToken(
        principal_type=owner_type,
        principal_name=owner_name,
        token_requester_principal_type=requester_type,
        token_requester_principal_name=requester_name,
        issue_timestamp=token.issue_ms,
        expiry_timestamp=token.expiry_ms,
        max_timestamp=token.max_ms,
        token_id=token_id,
        hmac=token_hmac(config, token_id),
        renewers=list(_renewers(token.renewers)),
    )


def _renewers(principals: Iterable[str]) -> Iterator[DescribedRenewer]:
    for principal in principals:
        principal_type, name = _parts(principal)
        yield DescribedRenewer(principal_type=principal_type, principal_name=name)


def _parts(principal: str) -> tuple[str, str]:
    """Returns the type and the name of a principal."""
    principal_type, _, name = principal.partition(":")
    return principal_type, name
