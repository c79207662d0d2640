# SPDX-License-Identifier: Apache-2.0
"""SCRAM credentials of users (KIP-554): describe, create, replace and delete.

The client computes the salted password, so the password itself is not sent.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.repeat import repeat
from kcoord.client.results import error_of, outcome_of
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from kcoord_protocol.scram_mechanisms import (
    MAX_ITERATIONS,
    MIN_ITERATIONS,
    SALT_SEED_BYTES,
    ScramMechanism,
    salt_of,
)


@dataclass(slots=True, frozen=True)
class ScramCredentialInfo:
    """A credential without its secrets."""

    mechanism: ScramMechanism
    iterations: int = MIN_ITERATIONS


@dataclass(slots=True)
class UserScramCredentialUpsertion:
    """Creates the credential of a user for a mechanism, or replaces it. Without `salt` it gets a random salt."""

    user: str
    info: ScramCredentialInfo
    password: str | bytes = field(repr=False)
    salt: bytes = field(default_factory=lambda: salt_of(secrets.token_bytes(SALT_SEED_BYTES)), repr=False)


@dataclass(slots=True)
class UserScramCredentialDeletion:
    """Deletes the credential of a user for a mechanism."""

    user: str
    mechanism: ScramMechanism


Alteration = UserScramCredentialUpsertion | UserScramCredentialDeletion


async def describe_user_scram_credentials(
    cluster: Cluster, users: Iterable[str]
) -> dict[str, list[ScramCredentialInfo] | KafkaError]:
    request = DescribeUserScramCredentialsRequest(
        users=[DescribeUserScramCredentialsRequest.UserName(name=user) for user in dict.fromkeys(users)]
    )
    response = await cluster.call_any(request, DescribeUserScramCredentialsResponse)
    if response.error_code:
        raise KafkaError(error_of(response.error_code), response.error_message)
    return {
        result.user: outcome_of(result.error_code, result.error_message, _infos(result)) for result in response.results
    }


def _infos(
    result: DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult,
) -> list[ScramCredentialInfo]:
    """Returns the credentials of the mechanisms that this client knows."""
    credentials = [(ScramMechanism.of_number(info.mechanism), info.iterations) for info in result.credential_infos]
    return [ScramCredentialInfo(mechanism, iterations) for mechanism, iterations in credentials if mechanism]


async def alter_user_scram_credentials(
    cluster: Cluster, deadline: Deadline, alterations: Iterable[Alteration]
) -> dict[str, KafkaError | None]:
    by_user: dict[str, list[Alteration]] = {}
    for alteration in alterations:
        by_user.setdefault(alteration.user, []).append(alteration)
    without_password = {
        alteration.user: KafkaError(Errors.UNACCEPTABLE_CREDENTIAL, "Password must not be empty")
        for changes in by_user.values()
        for alteration in changes
        if isinstance(alteration, UserScramCredentialUpsertion) and not alteration.password
    }
    # Salting costs thousands of hashes, so it is done once and not for each attempt.
    requests = {user: _request(changes) for user, changes in by_user.items() if user not in without_password}

    async def attempt(users: list[str]) -> Mapping[str, KafkaError | None]:
        request = AlterUserScramCredentialsRequest(
            deletions=[deletion for user in users for deletion in requests[user].deletions],
            upsertions=[upsertion for user in users for upsertion in requests[user].upsertions],
        )
        response = await cluster.call_controller(request, AlterUserScramCredentialsResponse)
        return {result.user: outcome_of(result.error_code, result.error_message, None) for result in response.results}

    outcomes = await repeat(cluster, deadline, requests, attempt)
    return {user: without_password.get(user) or outcomes[user] for user in by_user}


def _request(changes: Iterable[Alteration]) -> AlterUserScramCredentialsRequest:
    request = AlterUserScramCredentialsRequest()
    for change in changes:
        if isinstance(change, UserScramCredentialDeletion):
            deletion = AlterUserScramCredentialsRequest.ScramCredentialDeletion(
                name=change.user, mechanism=change.mechanism
            )
            request.deletions.append(deletion)
        else:
            request.upsertions.append(_upsertion(change))
    return request


def _upsertion(change: UserScramCredentialUpsertion) -> AlterUserScramCredentialsRequest.ScramCredentialUpsertion:
    """Returns the upsertion of the request. The broker rejects numbers of iterations that are out of bounds.

    They are not computed: a password is hashed at least once and at most `MAX_ITERATIONS` times.
    """
    info = change.info
    password = change.password.encode() if isinstance(change.password, str) else change.password
    iterations = min(max(info.iterations, 1), MAX_ITERATIONS)
    return AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name=change.user,
        mechanism=info.mechanism,
        iterations=info.iterations,
        salt=change.salt,
        salted_password=hashlib.pbkdf2_hmac(info.mechanism.hash_name, password, change.salt, iterations),
    )
