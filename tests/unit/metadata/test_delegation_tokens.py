# SPDX-License-Identifier: Apache-2.0
"""Delegation tokens: the answers of Kafka 4.4.0 to the same requests, with a clock that the tests move."""

from __future__ import annotations

import hashlib
import hmac
import logging
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.config import Listener, SecurityProtocol
from kcoord.config.kip1327 import Kip1327Form
from kcoord.metadata.delegation_tokens import MAX_REMOVALS
from kcoord.metadata.image import ImageBuilder
from kcoord.metadata.machine import TOKEN_EXPIRY
from kcoord.metadata.records import DelegationTokenData, new_delegation_token_record, new_feature_level_record
from kcoord.runtime.result import MAX_BATCH_BYTES, CoordinatorResult, OperationContext, Schedule
from kcoord.runtime.serde import MetadataSerde, size_bound_bytes
from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.api.handlers import (
    create_delegation_token,
    describe_delegation_token,
    expire_delegation_token,
    renew_delegation_token,
)
from kcoord.server.environment import RandomUuids
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    DescribeDelegationTokenRequest,
    DescribeDelegationTokenResponse,
    ExpireDelegationTokenRequest,
    RenewDelegationTokenRequest,
)
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, settle

SECRET = {"delegation.token.secret.key": "pepper"}
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
FOREVER = 2**63 - 1
Renewer = CreateDelegationTokenRequest.CreatableRenewers
Owner = DescribeDelegationTokenRequest.DescribeDelegationTokenOwner


class People:
    """Clients of a broker with one listener, on which they have logged in."""

    def __init__(self, cluster: Cluster, protocol: SecurityProtocol = SecurityProtocol.SASL_PLAINTEXT) -> None:
        self.cluster = cluster
        self.broker = broker_of(cluster)
        self.broker.endpoints["CLIENTS"] = Listener("CLIENTS", "box", 4711, protocol)

    def context(self, key: ApiKey, version: int, user: str, *, has_token: bool = False) -> RequestContext:
        client = Client(Kip1327Form.OFF, "CLIENTS", principal=f"User:{user}")
        client.is_token_authenticated = has_token
        return RequestContext(key, version, 1, "client", client, self.cluster.now_ms, rights=None)

    async def create(
        self, user: str = "alice", *renewers: str, max_lifetime_ms: int = -1, owner: tuple[str, str] = ("", "")
    ) -> CreateDelegationTokenResponse:
        request = CreateDelegationTokenRequest(
            owner_principal_type=owner[0],
            owner_principal_name=owner[1],
            renewers=[Renewer(principal_type="User", principal_name=name) for name in renewers],
            max_lifetime_ms=max_lifetime_ms,
        )
        return await self.send_create(user, request)

    async def send_create(
        self, user: str, request: CreateDelegationTokenRequest, *, has_token: bool = False
    ) -> CreateDelegationTokenResponse:
        context = self.context(ApiKey.CREATE_DELEGATION_TOKEN, 3, user, has_token=has_token)
        return await settle(create_delegation_token.handle(self.broker, context, request), 3)

    async def renew(self, user: str, digest: bytes, period_ms: int) -> tuple[Errors, int]:
        request = RenewDelegationTokenRequest(hmac=digest, renew_period_ms=period_ms)
        context = self.context(ApiKey.RENEW_DELEGATION_TOKEN, 2, user)
        response = await settle(renew_delegation_token.handle(self.broker, context, request), 2)
        return Errors(response.error_code), response.expiry_timestamp_ms

    async def expire(self, user: str, digest: bytes, period_ms: int) -> tuple[Errors, int]:
        request = ExpireDelegationTokenRequest(hmac=digest, expiry_time_period_ms=period_ms)
        context = self.context(ApiKey.EXPIRE_DELEGATION_TOKEN, 2, user)
        response = await settle(expire_delegation_token.handle(self.broker, context, request), 2)
        return Errors(response.error_code), response.expiry_timestamp_ms

    async def describe(self, user: str, owners: Sequence[str] | None = None) -> DescribeDelegationTokenResponse:
        request = DescribeDelegationTokenRequest(
            owners=None if owners is None else [Owner(principal_type="User", principal_name=name) for name in owners]
        )
        context = self.context(ApiKey.DESCRIBE_DELEGATION_TOKEN, 3, user)
        return await settle(describe_delegation_token.handle(self.broker, context, request), 3)

    def fire(self, after_ms: int = 0) -> CoordinatorResult[None]:
        """Lets the timer of the machine fire after a time."""
        context = OperationContext(self.cluster.now_ms + after_ms)
        return self.cluster.result(lambda machine, _: machine.fire_timer(context, TOKEN_EXPIRY))


@pytest.fixture
def people() -> People:
    return People(Cluster(SECRET))


async def test_a_token_has_the_times_and_the_password_of_kafka(people: People) -> None:
    people.cluster.now_ms = 1_795_459_728_335
    created = await people.create("alice", "bob", "carol")
    assert (created.error_code, created.principal_type, created.principal_name) == (0, "User", "alice")
    assert (created.token_requester_principal_type, created.token_requester_principal_name) == ("User", "alice")
    # Kafka 4.4.0 has answered with these times.
    assert created.issue_timestamp_ms == 1_795_459_728_335
    assert created.expiry_timestamp_ms == 1_795_546_128_335
    assert created.max_timestamp_ms == 1_796_064_528_335
    assert len(urlsafe_b64decode(created.token_id + "==")) == 16
    assert created.hmac == hmac.new(b"pepper", created.token_id.encode(), hashlib.sha512).digest()
    assert people.cluster.image.delegation_tokens == {
        created.token_id: DelegationTokenData(
            "User:alice",
            "User:alice",
            ("User:bob", "User:carol"),
            created.issue_timestamp_ms,
            created.max_timestamp_ms,
            created.expiry_timestamp_ms,
        )
    }
    assert ImageBuilder.of(people.cluster.log).delegation_tokens == people.cluster.image.delegation_tokens


async def test_the_password_is_the_one_that_kafka_has_computed() -> None:
    # Kafka 4.4.0 with delegation.token.secret.key=pepper has answered with this id and this HMAC.
    people = People(Cluster(SECRET))
    people.broker.uuids = RandomUuids(lambda count: urlsafe_b64decode("tyvk22oATfqDObiMBEV3zw==").ljust(count, b"x"))
    created = await people.create()
    assert created.token_id == "tyvk22oATfqDObiMBEV3zw"
    assert created.hmac.hex() == (
        "000fd843bf16c70a24da596899e2ef9ec00dd6973929395ff68173102224b8e2"
        "f1ec5dfc631d2ff44f2cbb01e86f2f8be857aa1cd8dfbc0a2035d8541794e7d7"
    )


@pytest.mark.parametrize(
    ("asked_ms", "lifetime_ms"),
    [(-1, 7 * DAY_MS), (0, 7 * DAY_MS), (5000, 5000), (8 * DAY_MS, 7 * DAY_MS), (FOREVER, 7 * DAY_MS)],
)
async def test_a_client_can_ask_for_a_shorter_life(people: People, asked_ms: int, lifetime_ms: int) -> None:
    created = await people.create(max_lifetime_ms=asked_ms)
    assert created.max_timestamp_ms == people.cluster.now_ms + lifetime_ms
    assert created.expiry_timestamp_ms == people.cluster.now_ms + min(lifetime_ms, DAY_MS)


@pytest.mark.parametrize("user", ["alice", "bob"])
@pytest.mark.parametrize(
    ("verb", "period_ms", "expiry_ms"),
    [
        # As Kafka 4.4.0 has answered for a token whose maximum time is an hour after its creation.
        ("renew", -1, HOUR_MS),
        ("renew", 0, HOUR_MS),
        ("renew", 600_000, 600_000),
        ("renew", 10**9, HOUR_MS),
        ("renew", FOREVER, HOUR_MS),
        ("expire", 0, 0),
        ("expire", 600_000, 600_000),
        ("expire", 10**9, HOUR_MS),
        ("expire", FOREVER, HOUR_MS),
    ],
)
async def test_owner_and_renewers_set_the_expiry_time(
    people: People, user: str, verb: str, period_ms: int, expiry_ms: int
) -> None:
    created = await people.create("alice", "bob", max_lifetime_ms=HOUR_MS)
    before = people.cluster.image.delegation_tokens[created.token_id]
    change = people.renew if verb == "renew" else people.expire
    assert await change(user, created.hmac, period_ms) == (Errors.NONE, people.cluster.now_ms + expiry_ms)
    after = people.cluster.image.delegation_tokens
    assert after == {created.token_id: replace(before, expiry_ms=people.cluster.now_ms + expiry_ms)}


async def test_the_default_of_a_renewal_is_a_day(people: People) -> None:
    created = await people.create()
    people.cluster.now_ms += 5000
    assert await people.renew("alice", created.hmac, FOREVER) == (Errors.NONE, people.cluster.now_ms + DAY_MS)


async def test_a_negative_period_removes_the_token_also_after_its_end(people: People) -> None:
    first, second = await people.create("alice", "bob"), await people.create("alice", "bob")
    assert await people.expire("bob", first.hmac, -2) == (Errors.NONE, people.cluster.now_ms)
    assert people.cluster.image.delegation_tokens.keys() == {second.token_id}
    people.cluster.now_ms += 8 * DAY_MS
    assert await people.expire("bob", second.hmac, 0) == (Errors.DELEGATION_TOKEN_EXPIRED, 0)
    assert await people.expire("bob", second.hmac, -1) == (Errors.NONE, people.cluster.now_ms)
    assert people.cluster.image.delegation_tokens == {}
    assert await people.expire("bob", second.hmac, -1) == (Errors.DELEGATION_TOKEN_NOT_FOUND, 0)


async def test_the_requester_and_a_stranger_can_do_nothing(people: People) -> None:
    created = await people.create("carol", "bob", owner=("User", "alice"))
    before = people.cluster.image
    for user in ("carol", "mallory"):
        for period_ms in (-1, 0, 600_000):
            assert await people.renew(user, created.hmac, period_ms) == (Errors.DELEGATION_TOKEN_OWNER_MISMATCH, 0)
            assert await people.expire(user, created.hmac, period_ms) == (Errors.DELEGATION_TOKEN_OWNER_MISMATCH, 0)
    people.cluster.now_ms += DAY_MS + 1
    # Kafka checks these in another order for a token that has expired.
    assert await people.renew("carol", created.hmac, -1) == (Errors.DELEGATION_TOKEN_EXPIRED, 0)
    assert await people.expire("carol", created.hmac, 0) == (Errors.DELEGATION_TOKEN_OWNER_MISMATCH, 0)
    assert people.cluster.image is before


@pytest.mark.parametrize("digest", [b"", b"x", b"x" * 64])
async def test_an_unknown_password(people: People, digest: bytes) -> None:
    await people.create()
    assert await people.renew("alice", digest, -1) == (Errors.DELEGATION_TOKEN_NOT_FOUND, 0)
    assert await people.expire("alice", digest, -1) == (Errors.DELEGATION_TOKEN_NOT_FOUND, 0)


async def test_a_token_ends_after_its_last_millisecond(people: People) -> None:
    created = await people.create(max_lifetime_ms=5000)
    people.cluster.now_ms += 5000
    assert (await people.renew("alice", created.hmac, -1))[0] is Errors.NONE
    people.cluster.now_ms += 1
    assert (await people.renew("alice", created.hmac, -1))[0] is Errors.DELEGATION_TOKEN_EXPIRED


async def test_without_a_secret_key_there_are_no_tokens() -> None:
    people = People(Cluster({"delegation.token.secret.key": ""}))
    created = await people.create("alice", "bob")
    assert (created.error_code, created.principal_name) == (Errors.DELEGATION_TOKEN_AUTH_DISABLED, "alice")
    assert (created.issue_timestamp_ms, created.token_id, created.hmac) == (0, "", b"")
    assert await people.renew("alice", b"x", -1) == (Errors.DELEGATION_TOKEN_AUTH_DISABLED, 0)
    assert await people.expire("alice", b"x", -1) == (Errors.DELEGATION_TOKEN_AUTH_DISABLED, 0)
    with pytest.raises(KafkaError) as failed:
        await people.describe("alice")
    assert failed.value.error is Errors.DELEGATION_TOKEN_AUTH_DISABLED
    assert people.cluster.machine.on_loaded(OperationContext(0)).timers == []


async def test_an_old_metadata_version_has_no_tokens(people: People) -> None:
    for level, error in ((13, Errors.UNSUPPORTED_VERSION), (14, Errors.NONE)):
        people.cluster.machine.replay(new_feature_level_record("metadata.version", level))
        created = await people.create()
        assert created.error_code == error
    people.cluster.machine.replay(new_feature_level_record("metadata.version", 13))
    assert await people.renew("alice", created.hmac, -1) == (Errors.UNSUPPORTED_VERSION, 0)
    assert await people.expire("alice", created.hmac, -1) == (Errors.UNSUPPORTED_VERSION, 0)


@pytest.mark.parametrize(
    ("protocol", "user", "has_token", "is_allowed"),
    [
        (SecurityProtocol.PLAINTEXT, "alice", False, False),
        (SecurityProtocol.SSL, "ANONYMOUS", False, False),
        (SecurityProtocol.SSL, "CN=alice", False, True),
        (SecurityProtocol.SASL_SSL, "alice", False, True),
        (SecurityProtocol.SASL_PLAINTEXT, "alice", False, True),
        (SecurityProtocol.SASL_PLAINTEXT, "alice", True, False),
        (SecurityProtocol.SASL_SSL, "alice", True, False),
    ],
)
async def test_who_may_ask(protocol: SecurityProtocol, user: str, has_token: bool, is_allowed: bool) -> None:
    people = People(Cluster(SECRET), protocol)
    request = CreateDelegationTokenRequest(max_lifetime_ms=-1)
    created = await people.send_create(user, request, has_token=has_token)
    if is_allowed:
        assert (created.error_code, created.principal_name) == (0, user)
        return
    assert (created.error_code, created.principal_name) == (Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, user)
    assert (created.issue_timestamp_ms, created.expiry_timestamp_ms, created.max_timestamp_ms) == (-1, -1, -1)
    for handler, refused in (
        (renew_delegation_token, RenewDelegationTokenRequest()),
        (expire_delegation_token, ExpireDelegationTokenRequest()),
        (describe_delegation_token, DescribeDelegationTokenRequest()),
    ):
        context = people.context(handler.API_KEY, 1, user, has_token=has_token)
        with pytest.raises(KafkaError) as failed:
            handler.handle(people.broker, context, refused)
        assert failed.value.error is Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
        response = handler.error_response(refused, failed.value, 1)
        assert getattr(response, "expiry_timestamp_ms", -1) == -1
    assert people.cluster.image.delegation_tokens == {}


@pytest.mark.parametrize(("kind", "renewer_kind"), [("Group", "User"), ("", "User"), ("User", "Group"), ("User", "")])
async def test_owner_and_renewers_are_users(people: People, kind: str, renewer_kind: str) -> None:
    request = CreateDelegationTokenRequest(
        owner_principal_type=kind,
        owner_principal_name="bob",
        renewers=[Renewer(principal_type=renewer_kind, principal_name="carol")],
        max_lifetime_ms=-1,
    )
    created = await people.send_create("alice", request)
    assert (created.error_code, created.issue_timestamp_ms) == (Errors.INVALID_PRINCIPAL_TYPE, -1)
    assert people.cluster.image.delegation_tokens == {}


async def test_expired_tokens_are_removed_on_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kcoord.metadata")
    people = People(Cluster(SECRET | {"delegation.token.expiry.check.interval.ms": "60000"}))
    cluster = people.cluster
    short, long = await people.create(max_lifetime_ms=5000), await people.create()
    (timer,) = cluster.machine.on_loaded(OperationContext(cluster.now_ms)).timers
    assert timer == Schedule(TOKEN_EXPIRY, cluster.now_ms + 60_000)
    for after_ms, left in ((5000, {short.token_id, long.token_id}), (5001, {long.token_id}), (DAY_MS + 1, set())):
        fired = people.fire(after_ms)
        assert fired.timers == [Schedule(TOKEN_EXPIRY, cluster.now_ms + after_ms + 60_000)]
        assert cluster.image.delegation_tokens.keys() == left
    assert f"Delegation token expired for token: {short.token_id} for owner: User:alice" in caplog.text


async def test_many_expired_tokens_are_removed_in_parts(people: People) -> None:
    token = DelegationTokenData("User:alice", "User:alice", (), 0, 1, 1)
    for number in range(MAX_REMOVALS * 2 + 5):
        people.cluster.machine.replay(new_delegation_token_record(f"token-{number}", token))
    for removed, delay_ms in ((MAX_REMOVALS, 0), (MAX_REMOVALS, 0), (5, HOUR_MS)):
        fired = people.fire()
        assert len(fired.records) == removed
        assert fired.timers == [Schedule(TOKEN_EXPIRY, people.cluster.now_ms + delay_ms)]
        serde = MetadataSerde()
        assert size_bound_bytes([serde.serialize(record) for record in fired.records]) < MAX_BATCH_BYTES
    assert people.cluster.image.delegation_tokens == {}


async def test_who_sees_which_tokens(people: People) -> None:
    mine = await people.create("alice", "bob")
    other = await people.create("carol")
    # Without an authorizer, everyone sees everything.
    assert {token.token_id for token in (await people.describe("mallory")).tokens} == {mine.token_id, other.token_id}
    assert (await people.describe("alice", [])).tokens == []
    (token,) = (await people.describe("mallory", ["bob", "dave"])).tokens
    assert (token.token_id, token.hmac) == (mine.token_id, mine.hmac)
    assert [renewer.principal_name for renewer in token.renewers] == ["bob"]
    times = (token.issue_timestamp, token.expiry_timestamp, token.max_timestamp)
    assert times == (mine.issue_timestamp_ms, mine.expiry_timestamp_ms, mine.max_timestamp_ms)


async def test_secrets_are_shown_nowhere(people: People, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    created = await people.create()
    await people.renew("alice", created.hmac, -1)
    described = await people.describe("alice")
    shown = [repr(created), repr(described), repr(people.cluster.image), repr(people.cluster.log), caplog.text]
    shown.append(repr(RenewDelegationTokenRequest(hmac=created.hmac)))
    shown.append(repr(ExpireDelegationTokenRequest(hmac=created.hmac)))
    for text in shown:
        assert "pepper" not in text
        assert created.hmac.hex() not in text
        assert repr(created.hmac)[2:-1] not in text


@dataclass
class Model:
    """What KIP-48 says of one token."""

    users: set[str]
    max_ms: int
    expiry_ms: int


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "renew", "expire", "sweep"]),
            st.sampled_from(["alice", "bob", "carol"]),
            st.integers(-1, 20),
            st.integers(0, 3),
            st.integers(0, 8),
        ),
        max_size=25,
    )
)
async def test_any_sequence_of_requests_agrees_with_a_model(steps: list[tuple[str, str, int, int, int]]) -> None:
    limits = {"delegation.token.max.lifetime.ms": "16", "delegation.token.expiry.time.ms": "6"}
    people = People(Cluster(SECRET | limits))
    cluster = people.cluster
    model: dict[bytes, Model] = {}
    digests: list[bytes] = []
    for verb, user, period, pick, wait in steps:
        cluster.now_ms += wait
        now = cluster.now_ms
        if verb == "create":
            created = await people.create(user, "bob", max_lifetime_ms=period)
            maximum = now + (min(period, 16) if period > 0 else 16)
            model[created.hmac] = Model({user, "bob"}, maximum, min(maximum, now + 6))
            digests.append(created.hmac)
        elif verb == "sweep":
            people.fire()
            model = {digest: entry for digest, entry in model.items() if entry.expiry_ms >= now}
        elif digests:
            digest = digests[pick % len(digests)]
            error, expiry = await (people.renew if verb == "renew" else people.expire)(user, digest, period)
            entry = model.get(digest)
            if entry is None:
                assert error is Errors.DELEGATION_TOKEN_NOT_FOUND
                continue
            removes = verb == "expire" and period < 0
            refusals = set()
            if user not in entry.users:
                refusals.add(Errors.DELEGATION_TOKEN_OWNER_MISMATCH)
            if entry.expiry_ms < now and not removes:
                refusals.add(Errors.DELEGATION_TOKEN_EXPIRED)
            if refusals:
                assert error in refusals
            elif removes:
                assert (error, expiry) == (Errors.NONE, now)
                del model[digest]
            else:
                longest = 6 if verb == "renew" else FOREVER
                length = longest if verb == "renew" and period <= 0 else min(period, longest)
                entry.expiry_ms = min(entry.max_ms, now + length)
                assert (error, expiry) == (Errors.NONE, entry.expiry_ms)
        left = sorted(token.expiry_ms for token in cluster.image.delegation_tokens.values())
        assert left == sorted(entry.expiry_ms for entry in model.values())
