# SPDX-License-Identifier: Apache-2.0
"""AlterUserScramCredentials and DescribeUserScramCredentials (KIP-554) as pure functions of image and request.

A request names each user at most once, also with another mechanism. The users of a request succeed or fail one by one.
The request carries the salted password. The log gets the two keys that a server needs, from which the password cannot
be computed without trying. The error texts are those of Kafka 4.4.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from kcoord.metadata.collect import duplicates
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.records import new_remove_scram_credential_record, new_scram_credential_record
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsResponse,
)
from kcoord_protocol.scram_mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism

Deletion = AlterUserScramCredentialsRequest.ScramCredentialDeletion
Upsertion = AlterUserScramCredentialsRequest.ScramCredentialUpsertion
AlterResult = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult
DescribeResult = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult


def credential_record(
    mechanism: ScramMechanism, user: str, salt: bytes, salted_password: bytes, iterations: int
) -> CoordinatorRecord:
    """Returns the record of a credential, with the keys of RFC 5802 that are computed from the salted password."""
    # A start needs neither module, and importing them takes 2 ms.
    import hashlib
    import hmac

    client_key = hmac.digest(salted_password, b"Client Key", mechanism.hash_name)
    stored_key = hashlib.new(mechanism.hash_name, client_key).digest()
    server_key = hmac.digest(salted_password, b"Server Key", mechanism.hash_name)
    return new_scram_credential_record(mechanism, user, salt, stored_key, server_key, iterations)


def records_of_credentials(image: MetadataImage) -> list[CoordinatorRecord]:
    """Returns the records of all credentials of an image, for another metadata log."""
    mechanisms = {mechanism.mechanism_name: mechanism for mechanism in ScramMechanism}
    return [
        new_scram_credential_record(
            mechanisms[name],
            user,
            credential.salt,
            credential.stored_key,
            credential.server_key,
            credential.iterations,
        )
        for (name, user), credential in sorted(image.scram_credentials.items(), key=itemgetter(0))
    ]


def alter_user_scram_credentials(
    image: MetadataImage, request: AlterUserScramCredentialsRequest
) -> CoordinatorResult[AlterUserScramCredentialsResponse]:
    """Creates, replaces and deletes credentials. Results are in the order of deletions, upsertions and errors."""
    accepted: dict[str, Deletion | Upsertion] = {}
    errors: dict[str, KafkaError] = {}
    for change in changes_of(request):
        if change.name in errors:
            continue
        try:
            if accepted.pop(change.name, None) is not None:
                text = "A user credential cannot be altered twice in the same request"
                raise KafkaError(Errors.DUPLICATE_RESOURCE, text)
            _check(image, change)
            accepted[change.name] = change
        except KafkaError as error:
            errors[change.name] = error
    results = [AlterResult(user=name, error_message=None) for name in accepted]
    results += [
        AlterResult(user=name, error_code=error.error, error_message=error.message) for name, error in errors.items()
    ]
    records = [_record_of(change) for change in accepted.values()]
    return CoordinatorResult(AlterUserScramCredentialsResponse(results=results), records)


def parts_of(request: AlterUserScramCredentialsRequest, most_users: int) -> list[AlterUserScramCredentialsRequest]:
    """Splits a request into requests with the same result, each of which changes at most `most_users` users.

    All changes of a user are in one part. So users that occur twice fail as in the whole request.
    """
    changes = changes_of(request)
    repeated = duplicates(change.name for change in changes)
    rejected = [change for change in changes if change.name in repeated]
    single = [change for change in changes if change.name not in repeated]
    parts = [single[start : start + most_users] for start in range(0, len(single), most_users)]
    return [
        AlterUserScramCredentialsRequest(
            deletions=[change for change in part if isinstance(change, Deletion)],
            upsertions=[change for change in part if isinstance(change, Upsertion)],
        )
        for part in (*parts, rejected)
        if part
    ]


def changes_of(request: AlterUserScramCredentialsRequest) -> list[Deletion | Upsertion]:
    """Returns the changes of a request in the order in which they are checked."""
    return [*request.deletions, *request.upsertions]


def _check(image: MetadataImage, change: Deletion | Upsertion) -> None:
    """Raises KafkaError if the change is not allowed."""
    mechanism = _mechanism_of(change)
    if isinstance(change, Deletion):
        if (mechanism.mechanism_name, change.name) not in image.scram_credentials:
            raise KafkaError(Errors.RESOURCE_NOT_FOUND, "Attempt to delete a user credential that does not exist")
        return
    if change.iterations < MIN_ITERATIONS:
        raise KafkaError(Errors.UNACCEPTABLE_CREDENTIAL, "Too few iterations")
    if change.iterations > MAX_ITERATIONS:
        raise KafkaError(Errors.UNACCEPTABLE_CREDENTIAL, "Too many iterations")
    if not change.salted_password:
        raise KafkaError(Errors.UNACCEPTABLE_CREDENTIAL, "Password must not be empty")


def _record_of(change: Deletion | Upsertion) -> CoordinatorRecord:
    mechanism = ScramMechanism(change.mechanism)
    if isinstance(change, Deletion):
        return new_remove_scram_credential_record(mechanism, change.name)
    return credential_record(mechanism, change.name, change.salt, change.salted_password, change.iterations)


def _mechanism_of(change: Deletion | Upsertion) -> ScramMechanism:
    if not change.name:
        raise KafkaError(Errors.UNACCEPTABLE_CREDENTIAL, "Username must not be empty")
    mechanism = ScramMechanism.of_number(change.mechanism)
    if mechanism is None:
        raise KafkaError(Errors.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism")
    return mechanism


def describe_user_scram_credentials(image: MetadataImage, users: Iterable[str]) -> list[DescribeResult]:
    """Returns the mechanisms and iterations of the users. Without `users`, all users with credentials, sorted."""
    names = list(users)
    repeated = duplicates(names)
    return [
        _repeated(user) if user in repeated else _described(image, user)
        for user in (dict.fromkeys(names) or sorted({user for _, user in image.scram_credentials}))
    ]


def _repeated(user: str) -> DescribeResult:
    text = f"Cannot describe SCRAM credentials for the same user twice in a single request: {user}"
    return DescribeResult(user=user, error_code=Errors.DUPLICATE_RESOURCE, error_message=text)


def _described(image: MetadataImage, user: str) -> DescribeResult:
    credentials = image.scram_credentials
    infos = [
        DescribeUserScramCredentialsResponse.CredentialInfo(mechanism=mechanism, iterations=credential.iterations)
        for mechanism in ScramMechanism
        if (credential := credentials.get((mechanism.mechanism_name, user))) is not None
    ]
    if not infos:
        text = f"Attempt to describe a user credential that does not exist: {user}"
        return DescribeResult(user=user, error_code=Errors.RESOURCE_NOT_FOUND, error_message=text)
    return DescribeResult(user=user, credential_infos=infos)
