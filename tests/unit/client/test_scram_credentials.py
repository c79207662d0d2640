# SPDX-License-Identifier: Apache-2.0
"""Users' SCRAM credentials in the admin client: requests without passwords, and results by user."""

from __future__ import annotations

import hashlib
import re

import pytest

from kcoord.client import (
    Errors,
    KafkaError,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from tests.unit.client.fake_broker import Answer
from tests.unit.client.test_admin import admin_of, canned

SHA_256 = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256)
SHA_512 = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
AlterResult = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult
DescribeResult = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult
Info = DescribeUserScramCredentialsResponse.CredentialInfo


def answer_of(request: Message, **codes: int) -> AlterUserScramCredentialsResponse:
    assert isinstance(request, AlterUserScramCredentialsRequest)
    users = dict.fromkeys(change.name for change in request.upsertions)
    users |= dict.fromkeys(change.name for change in request.deletions)
    return AlterUserScramCredentialsResponse(
        results=[AlterResult(user=user, error_code=codes.get(user, 0), error_message=None) for user in users]
    )


async def test_alterations_carry_the_salted_password() -> None:
    def alter(request: Message, version: int) -> Answer:
        return answer_of(request, carol=Errors.RESOURCE_NOT_FOUND)

    async with canned({ApiKey.ALTER_USER_SCRAM_CREDENTIALS: alter}) as broker, admin_of(broker) as admin:
        results = await admin.alter_user_scram_credentials(
            [
                UserScramCredentialUpsertion("alice", SHA_512, "pâss", b"salt"),
                UserScramCredentialUpsertion("bob", SHA_256, b"pass"),
                UserScramCredentialUpsertion("nobody", SHA_256, ""),
                UserScramCredentialDeletion("carol", ScramMechanism.SCRAM_SHA_256),
            ]
        )
        request = broker.requests_of(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)[0]
    assert results.values == {"alice": None, "bob": None}
    errors = {user: (error.error, error.message) for user, error in results.errors.items()}
    assert errors["nobody"] == (Errors.UNACCEPTABLE_CREDENTIAL, "Password must not be empty")
    assert errors["carol"][0] is Errors.RESOURCE_NOT_FOUND
    assert isinstance(request, AlterUserScramCredentialsRequest)
    assert [(deletion.name, deletion.mechanism) for deletion in request.deletions] == [("carol", 1)]
    alice, bob = request.upsertions
    assert (alice.name, alice.mechanism, alice.iterations, alice.salt) == ("alice", 2, 8192, b"salt")
    assert alice.salted_password == hashlib.pbkdf2_hmac("sha512", "pâss".encode(), b"salt", 8192)
    assert (bob.mechanism, bob.iterations) == (1, 4096)
    assert re.fullmatch(rb"[0-9a-z]{20,26}", bob.salt), "salts of users that do not exist look the same"
    assert bob.salted_password == hashlib.pbkdf2_hmac("sha256", b"pass", bob.salt, 4096)


async def test_only_users_whose_error_may_pass_are_sent_again() -> None:
    codes = [{"alice": Errors.NOT_CONTROLLER}, {}]

    def alter(request: Message, version: int) -> Answer:
        return answer_of(request, **codes.pop(0))

    deletions = [UserScramCredentialDeletion(user, ScramMechanism.SCRAM_SHA_256) for user in ("alice", "bob")]
    async with canned({ApiKey.ALTER_USER_SCRAM_CREDENTIALS: alter}) as broker, admin_of(broker) as admin:
        assert (await admin.alter_user_scram_credentials(deletions)).all() == {"alice": None, "bob": None}
        second = broker.requests_of(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)[1]
    assert isinstance(second, AlterUserScramCredentialsRequest)
    assert [deletion.name for deletion in second.deletions] == ["alice"]


@pytest.mark.parametrize("iterations", [-1, 0, 1, 1 << 31])
async def test_the_broker_decides_about_iterations(iterations: int) -> None:
    """A number that the broker rejects is sent, but not computed."""
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, min(iterations, (1 << 31) - 1))

    def alter(request: Message, version: int) -> Answer:
        return answer_of(request, alice=Errors.UNACCEPTABLE_CREDENTIAL)

    async with canned({ApiKey.ALTER_USER_SCRAM_CREDENTIALS: alter}) as broker, admin_of(broker) as admin:
        results = await admin.alter_user_scram_credentials([UserScramCredentialUpsertion("alice", info, "word")])
        request = broker.requests_of(ApiKey.ALTER_USER_SCRAM_CREDENTIALS)[0]
    assert isinstance(request, AlterUserScramCredentialsRequest)
    assert request.upsertions[0].iterations == info.iterations
    assert results.errors["alice"].error is Errors.UNACCEPTABLE_CREDENTIAL


async def test_descriptions() -> None:
    answer = DescribeUserScramCredentialsResponse(
        results=[
            DescribeResult(
                user="alice",
                credential_infos=[Info(mechanism=number, iterations=8192) for number in (2, 3)],
            ),
            DescribeResult(user="bob", error_code=Errors.RESOURCE_NOT_FOUND, error_message="why"),
        ]
    )
    async with (
        canned({ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: answer}) as broker,
        admin_of(broker) as admin,
    ):
        results = await admin.describe_user_scram_credentials(["alice", "bob", "alice"])
        request = broker.requests_of(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS)[0]
    assert isinstance(request, DescribeUserScramCredentialsRequest)
    assert [user.name for user in request.users or ()] == ["alice", "bob"]
    assert results["alice"] == [SHA_512]
    with pytest.raises(KafkaError, match="why"):
        results["bob"]


async def test_an_error_of_the_whole_description_is_raised() -> None:
    answer = DescribeUserScramCredentialsResponse(error_code=Errors.CLUSTER_AUTHORIZATION_FAILED, error_message="why")
    async with (
        canned({ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: answer}) as broker,
        admin_of(broker) as admin,
    ):
        with pytest.raises(KafkaError, match="why"):
            await admin.describe_user_scram_credentials()


def test_a_password_is_not_in_the_representation() -> None:
    upsertion = UserScramCredentialUpsertion("alice", SHA_256, "secret", b"grain")
    assert repr(upsertion) == f"UserScramCredentialUpsertion(user='alice', info={SHA_256!r})"
