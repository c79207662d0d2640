# SPDX-License-Identifier: Apache-2.0
"""Users' SCRAM credentials: the rules and texts of Kafka 4.4.0 for the same requests, and the keys that are stored."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.metadata.image import ImageBuilder, ScramCredential
from kcoord.metadata.records import new_scram_credential_record
from kcoord.metadata.scram import changes_of, parts_of
from kcoord.server.api.handlers import alter_user_scram_credentials, describe_user_scram_credentials
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.json_form import to_json
from kcoord_protocol.messages import (
    AlterUserScramCredentialsRequest,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)
from kcoord_protocol.scram_mechanisms import ScramMechanism
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, context, settle

Deletion = AlterUserScramCredentialsRequest.ScramCredentialDeletion
Upsertion = AlterUserScramCredentialsRequest.ScramCredentialUpsertion
User = DescribeUserScramCredentialsRequest.UserName

TWICE = "A user credential cannot be altered twice in the same request"
ABSENT = "Attempt to delete a user credential that does not exist"
SHA_256, SHA_512 = 1, 2


def put(
    user: str, mechanism: int = SHA_256, iterations: int = 4096, salted_password: bytes = b"secret" * 6
) -> Upsertion:
    return Upsertion(
        name=user, mechanism=mechanism, iterations=iterations, salt=b"grain", salted_password=salted_password
    )


def drop(user: str, mechanism: int = SHA_256) -> Deletion:
    return Deletion(name=user, mechanism=mechanism)


async def alter(
    cluster: Cluster, deletions: Sequence[Deletion] = (), upsertions: Sequence[Upsertion] = ()
) -> list[tuple[str, int, str | None]]:
    request = AlterUserScramCredentialsRequest(deletions=list(deletions), upsertions=list(upsertions))
    asked = context(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0)
    response = await settle(alter_user_scram_credentials.handle(broker_of(cluster), asked, request), 0)
    return [(result.user, result.error_code, result.error_message) for result in response.results]


async def describe(cluster: Cluster, users: Sequence[str] | None = None) -> DescribeUserScramCredentialsResponse:
    request = DescribeUserScramCredentialsRequest(users=None if users is None else [User(name=user) for user in users])
    asked = context(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0)
    return await settle(describe_user_scram_credentials.handle(broker_of(cluster), asked, request), 0)


async def iterations(cluster: Cluster, users: Sequence[str] | None = None) -> dict[str, dict[int, int]]:
    return {
        result.user: {info.mechanism: info.iterations for info in result.credential_infos}
        for result in (await describe(cluster, users)).results
    }


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (put("a", iterations=4095), Errors.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        (put("a", iterations=-1), Errors.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        (put("a", iterations=16_385), Errors.UNACCEPTABLE_CREDENTIAL, "Too many iterations"),
        (put("a", salted_password=b""), Errors.UNACCEPTABLE_CREDENTIAL, "Password must not be empty"),
        (put(""), Errors.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (put("", 3), Errors.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (put("a", 0), Errors.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (put("a", 3, 1), Errors.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (drop(""), Errors.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (drop("a", 3), Errors.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM mechanism"),
        (drop("a"), Errors.RESOURCE_NOT_FOUND, ABSENT),
        (drop("present", SHA_512), Errors.RESOURCE_NOT_FOUND, ABSENT),
    ],
)
async def test_rejected_changes(cluster: Cluster, change: Deletion | Upsertion, error: Errors, text: str) -> None:
    assert await alter(cluster, upsertions=[put("present")]) == [("present", 0, None)]
    before = cluster.image
    changes = ([], [change]) if isinstance(change, Upsertion) else ([change], [])
    assert await alter(cluster, *changes) == [(change.name, error, text)]
    assert cluster.image is before


@pytest.mark.parametrize(
    ("deletions", "upsertions", "error", "text"),
    [
        ([], [put("present"), put("present", SHA_512)], Errors.DUPLICATE_RESOURCE, TWICE),
        ([], [put("present")] * 3, Errors.DUPLICATE_RESOURCE, TWICE),
        ([drop("present")], [put("present")], Errors.DUPLICATE_RESOURCE, TWICE),
        ([drop("present")] * 2, [], Errors.DUPLICATE_RESOURCE, TWICE),
        # The first error of a user is reported.
        ([], [put("present"), put("present", iterations=1)], Errors.DUPLICATE_RESOURCE, TWICE),
        ([], [put("present", iterations=1), put("present")], Errors.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        ([drop("present", SHA_512)], [put("present")], Errors.RESOURCE_NOT_FOUND, ABSENT),
    ],
)
async def test_a_request_names_a_user_once(
    cluster: Cluster, deletions: list[Deletion], upsertions: list[Upsertion], error: Errors, text: str
) -> None:
    assert await alter(cluster, upsertions=[put("present", iterations=5000)]) == [("present", 0, None)]
    assert await alter(cluster, deletions, upsertions) == [("present", error, text)]
    assert await iterations(cluster) == {"present": {SHA_256: 5000}}


async def test_users_succeed_and_fail_one_by_one(cluster: Cluster) -> None:
    assert await alter(cluster, upsertions=[put("a"), put("b", SHA_512, 16_384)]) == [("a", 0, None), ("b", 0, None)]
    results = await alter(cluster, [drop("z"), drop("a")], [put("c"), put("d", iterations=1), put("b")])
    assert results == [
        ("a", 0, None),
        ("c", 0, None),
        ("b", 0, None),
        ("z", 91, ABSENT),
        ("d", 93, "Too few iterations"),
    ]
    assert await iterations(cluster) == {"b": {SHA_256: 4096, SHA_512: 16_384}, "c": {SHA_256: 4096}}
    assert await alter(cluster) == []


async def test_a_request_with_many_users_is_decided_in_parts(cluster: Cluster) -> None:
    """Other operations are decided between the parts. The results are those of the whole request."""
    users = [f"user-{number}" for number in range(600)]
    assert await alter(cluster, upsertions=[put("gone"), put("twice")]) == [("gone", 0, None), ("twice", 0, None)]
    upsertions = [*map(put, users), put("twice"), put("low", iterations=1), put("twice"), put("once", SHA_512)]
    results = await alter(cluster, [drop("gone"), drop("absent")], upsertions)
    assert results == [
        ("gone", 0, None),
        *((user, 0, None) for user in users),
        ("once", 0, None),
        ("absent", Errors.RESOURCE_NOT_FOUND, ABSENT),
        ("low", Errors.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        ("twice", Errors.DUPLICATE_RESOURCE, TWICE),
    ]
    assert len(await iterations(cluster)) == 602


@pytest.mark.parametrize("most_users", [1, 2, 3, 100])
def test_the_parts_of_a_request(most_users: int) -> None:
    deletions, upsertions = [drop("a"), drop("b")], [put("b"), put("c"), put("d"), put("c")]
    parts = parts_of(AlterUserScramCredentialsRequest(deletions=deletions, upsertions=upsertions), most_users)
    names = [{change.name for change in changes_of(part)} for part in parts]
    assert names[-1] == {"b", "c"} and set().union(*names[:-1]) == {"a", "d"}
    assert all(len(users) <= most_users for users in names[:-1])
    assert sum(len(changes_of(part)) for part in parts) == 6


@pytest.mark.parametrize("sizes", [(31, 32), (32, 33), (0, 0), (64, 64)])
def test_keys_of_a_wrong_length_are_refused(sizes: tuple[int, int]) -> None:
    stored, server = map(bytes, sizes)
    with pytest.raises(ValueError, match=r"credential of user 'alice' has keys of \d+ and \d+ bytes, not 32"):
        new_scram_credential_record(ScramMechanism.SCRAM_SHA_256, "alice", b"salt", stored, server, 4096)


@given(
    st.sampled_from([(SHA_256, "sha256"), (SHA_512, "sha512")]),
    st.text(min_size=1, max_size=20),
    st.binary(max_size=40),
    st.text(min_size=1, max_size=20),
)
def test_the_stored_keys_are_those_of_rfc_5802(
    mechanism: tuple[int, str], user: str, salt: bytes, password: str
) -> None:
    number, hash_name = mechanism
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode("utf-8", "surrogatepass"), salt, 4096)
    request = AlterUserScramCredentialsRequest(
        upsertions=[Upsertion(name=user, mechanism=number, iterations=4096, salt=salt, salted_password=salted)]
    )
    cluster = Cluster()
    cluster.run(lambda machine, context: machine.alter_user_scram_credentials(context, request))
    client_key = hmac.new(salted, b"Client Key", hash_name).digest()
    expected = ScramCredential(
        salt, hashlib.new(hash_name, client_key).digest(), hmac.new(salted, b"Server Key", hash_name).digest(), 4096
    )
    assert cluster.image.scram_credentials == {(f"SCRAM-SHA-{hash_name[3:]}", user): expected}
    assert ImageBuilder.of(cluster.log).scram_credentials == cluster.image.scram_credentials


async def test_the_salted_password_is_shown_nowhere(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    request = AlterUserScramCredentialsRequest(upsertions=[put("a", iterations=1), put("b")])
    results = await alter(cluster, upsertions=request.upsertions)
    shown = [repr(request), str(results), caplog.text, str(to_json(request, 0, hides_secrets=True))]
    shown += [repr(cluster.image), repr(cluster.log)]
    for text in shown:
        assert "secret" not in text
        assert "grain" not in text
    assert "salted_password=[hidden]" in repr(request)


async def test_descriptions(cluster: Cluster) -> None:
    nobody = await describe(cluster)
    assert (nobody.error_code, nobody.error_message, nobody.results) == (0, "", [])
    await alter(cluster, upsertions=[put("bob", iterations=8192), put("alice", SHA_512)])
    await alter(cluster, upsertions=[put("alice")])
    everyone = {"alice": {SHA_256: 4096, SHA_512: 4096}, "bob": {SHA_256: 8192}}
    assert list(await iterations(cluster)) == ["alice", "bob"]
    assert await iterations(cluster) == await iterations(cluster, []) == everyone
    described = await describe(cluster, ["bob", "carol", "alice", "alice"])
    assert [(result.user, result.error_code, result.error_message) for result in described.results] == [
        ("bob", 0, ""),
        ("carol", 91, "Attempt to describe a user credential that does not exist: carol"),
        ("alice", 92, "Cannot describe SCRAM credentials for the same user twice in a single request: alice"),
    ]
    assert [len(result.credential_infos) for result in described.results] == [1, 0, 0]


def test_errors_of_the_whole_request() -> None:
    error = KafkaError(Errors.NOT_CONTROLLER, "text")
    request = AlterUserScramCredentialsRequest(deletions=[drop("a")], upsertions=[put("a"), put("b")])
    failed = alter_user_scram_credentials.error_response(request, error, 0)
    assert [(result.user, result.error_code, result.error_message) for result in failed.results] == [
        ("a", Errors.NOT_CONTROLLER, "text"),
        ("b", Errors.NOT_CONTROLLER, "text"),
    ]
    described = describe_user_scram_credentials.error_response(DescribeUserScramCredentialsRequest(), error, 0)
    assert (described.error_code, described.error_message) == (Errors.NOT_CONTROLLER, "text")
