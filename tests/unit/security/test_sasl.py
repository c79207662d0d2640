# SPDX-License-Identifier: Apache-2.0
"""The states of an authentication: what each frame does in each state, and which text the client gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.scram import ScramExchange
from kcoord.config.security import SASL_MECHANISMS
from kcoord.metadata.image import ScramCredential
from kcoord.security.login_states import SaslStep
from kcoord.security.oauthbearer import BearerSettings
from kcoord.security.plain import PlainUsers
from kcoord.security.sasl import SaslAuthenticator, SaslSettings
from kcoord.security.scram import Decoys
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.unit.security.test_oauthbearer import CLAIMS, KEYS, NOW, NOW_MS, RULES
from tests.unit.security.test_oauthbearer import token as signed_token
from tests.unit.security.test_scram import credential_of

PASSWORDS = {"alice": "alice-secret", "bob": "bob-secret"}
CREDENTIALS = {
    (mechanism, user): credential_of(mechanism, password)
    for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
    for user, password in PASSWORDS.items()
}
VERSIONS = encode_request(ApiKey.API_VERSIONS, 0, 1, "c", b"")[4:]
METADATA = encode_request(ApiKey.METADATA, 9, 1, "c", MetadataRequest(topics=[]).encode(9))[4:]
PLAIN_ALICE = b"\0alice\0alice-secret"
INVALID = "Authentication failed: Invalid username or password"
GENERAL = "Authentication failed during authentication due to invalid credentials with SASL mechanism "


def lookup(mechanism: str, user: str) -> ScramCredential | None:
    return CREDENTIALS.get((mechanism, user))


BEARER = BearerSettings(RULES, lambda: KEYS, lambda _: None)
SETTINGS = SaslSettings(
    SASL_MECHANISMS, PlainUsers(PASSWORDS), lookup, {}, 1000, 100, lambda: "server-nonce", Decoys(b"key", {}), BEARER
)


def shake(mechanism: str = "PLAIN", version: int = 1) -> bytes:
    body = SaslHandshakeRequest(mechanism=mechanism).encode(version)
    return encode_request(ApiKey.SASL_HANDSHAKE, version, 7, "c", body)[4:]


def token(data: bytes, version: int = 2) -> bytes:
    body = SaslAuthenticateRequest(auth_bytes=data).encode(version)
    return encode_request(ApiKey.SASL_AUTHENTICATE, version, 8, "c", body)[4:]


def unframed(step: SaslStep | None) -> bytes:
    assert step is not None
    (frame,) = FrameReader(10_000).feed(step.output)
    return frame


def shaken(step: SaslStep | None, version: int = 1) -> SaslHandshakeResponse:
    frame = unframed(step)
    correlation_id, position = decode_response_header(frame, ApiKey.SASL_HANDSHAKE, version)
    assert correlation_id == 7
    return SaslHandshakeResponse.decode(frame[position:], version)


def answered(step: SaslStep | None, version: int = 2) -> SaslAuthenticateResponse:
    frame = unframed(step)
    correlation_id, position = decode_response_header(frame, ApiKey.SASL_AUTHENTICATE, version)
    assert correlation_id == 8
    return SaslAuthenticateResponse.decode(frame[position:], version)


class Login:
    """An authenticator that a test drives. `settings` may change between its handshakes."""

    def __init__(self, settings: SaslSettings = SETTINGS) -> None:
        self.settings = settings
        self.sasl = SaslAuthenticator(lambda: self.settings)

    @staticmethod
    def state_of(sasl: SaslAuthenticator) -> tuple[bool, str | None]:
        return sasl.is_complete, sasl.principal

    def plain(self, data: bytes = PLAIN_ALICE, now_ms: int = 0) -> SaslStep | None:
        """Shakes hands and sends the token of PLAIN."""
        assert shaken(self.sasl.receive(shake(), now_ms)).error_code == 0
        return self.sasl.receive(token(data), now_ms)

    def failure(self, frame: bytes, now_ms: int = 0) -> str:
        """Returns why a frame, which gets no response, closes the connection."""
        step = self.sasl.receive(frame, now_ms)
        assert step is not None and step.failure is not None and step.output == b""
        self.check_closed()
        return step.failure

    def check_closed(self) -> None:
        for frame in (VERSIONS, METADATA, shake(), token(PLAIN_ALICE)):
            assert self.sasl.receive(frame, 0) == SaslStep(failure="the authentication has failed")
        assert not self.sasl.is_complete


# --- PLAIN ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("data", [PLAIN_ALICE, b"alice\0alice\0alice-secret"])
def test_plain_login(version: int, data: bytes) -> None:
    sasl = Login().sasl
    assert sasl.receive(VERSIONS, 0) is None
    sasl.versions_answered()
    response = shaken(sasl.receive(shake(), 0))
    assert (response.error_code, response.mechanisms) == (0, list(SASL_MECHANISMS))
    assert Login.state_of(sasl) == (False, None)
    done = answered(sasl.receive(token(data, version), 0), version)
    assert (done.error_code, done.error_message, done.auth_bytes, done.session_lifetime_ms) == (0, "", b"", 0)
    assert (Login.state_of(sasl), sasl.session_end_ms) == ((True, "User:alice"), None)
    for frame in (METADATA, VERSIONS, shake(), token(PLAIN_ALICE)):
        assert sasl.receive(frame, 10**12) is None


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\0alice\0bob-secret", INVALID),
        (b"\0alice\0alice-secre", INVALID),
        (b"\0alice\0alice-secret2", INVALID),
        (b"\0unknown\0alice-secret", INVALID),
        (b"\0alice\0\xff", INVALID),
        (b"bob\0alice\0wrong", INVALID),
        (b"bob\0alice\0alice-secret", "Client requested an authorization id that is different from username"),
        (b"\0\0alice-secret", "Authentication failed: username not specified"),
        (b"\0alice\0", "Authentication failed: password not specified"),
        (b"", "Invalid SASL/PLAIN response: expected 3 tokens, got 1"),
        (b"alice\0alice-secret", "Invalid SASL/PLAIN response: expected 3 tokens, got 2"),
        (b"\0alice\0alice-secret\0", "Invalid SASL/PLAIN response: expected 3 tokens, got 4"),
    ],
)
def test_refused_plain_logins(data: bytes, text: str) -> None:
    login = Login()
    step = login.plain(data)
    assert step is not None and step.failure is not None
    response = answered(step)
    assert (response.error_code, response.auth_bytes, step.delay_ms) == (58, b"", 100)
    assert response.error_message is not None and response.error_message.endswith(text)
    assert "secret" not in step.failure and "alice" not in step.failure
    login.check_closed()


# --- SCRAM ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram_login(mechanism: str) -> None:
    sasl, client = Login().sasl, ScramExchange(mechanism, "bob", "bob-secret", "client-nonce")
    assert shaken(sasl.receive(shake(mechanism), 0)).error_code == 0
    first = answered(sasl.receive(token(client.first()), 0)).auth_bytes
    assert first.startswith(b"r=client-nonceserver-nonce,")
    assert not sasl.is_complete
    client.verify(answered(sasl.receive(token(client.final(first)), 0)).auth_bytes)
    assert (sasl.is_complete, sasl.principal) == (True, "User:bob")


@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("unknown", "alice-secret")])
def test_refused_scram_logins_have_the_same_text(user: str, password: str) -> None:
    login, client = Login(), ScramExchange("SCRAM-SHA-512", user, password, "n")
    sasl = login.sasl
    sasl.receive(shake("SCRAM-SHA-512"), 0)
    first = answered(sasl.receive(token(client.first()), 0)).auth_bytes
    step = sasl.receive(token(client.final(first)), 0)
    assert answered(step).error_message == GENERAL + "SCRAM-SHA-512"
    assert step is not None and step.delay_ms == 100
    login.check_closed()


@pytest.mark.parametrize("data", [b"n,,n=alice", b"n,,n=alice,r=\xff", b"c=A,r=n,p=A"])
def test_malformed_scram_messages(data: bytes) -> None:
    sasl = Login().sasl
    sasl.receive(shake("SCRAM-SHA-256"), 0)
    assert answered(sasl.receive(token(data), 0)).error_message == GENERAL + "SCRAM-SHA-256"


# --- OAUTHBEARER ------------------------------------------------------------------------------------------------------


def bearer(**claims: object) -> bytes:
    return token(b"n,,\x01auth=Bearer %s\x01\x01" % signed_token({**CLAIMS, **claims}).encode())


def test_a_session_ends_with_its_token_or_before() -> None:
    for max_reauth_ms, lifetime_ms in ((0, 600_000), (1_000_000, 600_000), (1000, 1000)):
        settings = replace(SETTINGS, max_reauth_ms={"OAUTHBEARER": max_reauth_ms})
        sasl = SaslAuthenticator(lambda settings=settings: settings)  # type: ignore[misc]
        sasl.receive(shake("OAUTHBEARER"), NOW_MS)
        assert answered(sasl.receive(bearer(), NOW_MS)).session_lifetime_ms == lifetime_ms
        assert (sasl.principal, sasl.session_end_ms) == ("User:alice", NOW_MS + lifetime_ms)
        assert sasl.receive(METADATA, NOW_MS + lifetime_ms) is None
        step = sasl.receive(METADATA, NOW_MS + lifetime_ms + 1)
        assert step is not None and step.failure is not None


def test_a_token_that_ended_within_the_skew_of_the_clocks_has_no_session_left() -> None:
    sasl = Login().sasl
    sasl.receive(shake("OAUTHBEARER"), NOW_MS)
    assert answered(sasl.receive(bearer(exp=NOW - 10), NOW_MS)).session_lifetime_ms == 0
    step = sasl.receive(METADATA, NOW_MS + 1)
    assert step is not None and step.failure is not None


def test_a_refused_token() -> None:
    login = Login()
    login.sasl.receive(shake("OAUTHBEARER"), NOW_MS)
    assert answered(login.sasl.receive(bearer(iss="evil"), NOW_MS)).auth_bytes == b'{"status":"invalid_token"}'
    step = login.sasl.receive(token(b"\x01"), NOW_MS)
    response = answered(step)
    assert (response.error_code, response.error_message) == (58, '{"status":"invalid_token"}')
    assert step is not None and step.failure is not None and step.failure.endswith("the issuer is not the expected one")
    login.check_closed()


def test_another_subject_cannot_take_over_a_session() -> None:
    sasl = Login().sasl
    sasl.receive(shake("OAUTHBEARER"), NOW_MS)
    sasl.receive(bearer(), NOW_MS)
    sasl.receive(shake("OAUTHBEARER"), NOW_MS + 5000)
    response = answered(sasl.receive(bearer(sub="mallory"), NOW_MS + 5000))
    assert response.error_message == "Cannot change principals during re-authentication from User.alice: User.mallory"


# --- SaslHandshake v0 -------------------------------------------------------------------------------------------------


def test_raw_tokens() -> None:
    sasl = Login().sasl
    assert shaken(sasl.receive(shake(version=0), 0), 0).error_code == 0
    assert sasl.receive(PLAIN_ALICE, 0) == SaslStep(b"\0\0\0\0")
    assert sasl.principal == "User:alice"
    sasl, client = Login().sasl, ScramExchange("SCRAM-SHA-256", "alice", "alice-secret", "n")
    sasl.receive(shake("SCRAM-SHA-256", 0), 0)
    client.verify(unframed(sasl.receive(client.final(unframed(sasl.receive(client.first(), 0))), 0)))
    assert sasl.is_complete


def test_a_refused_raw_token_gets_no_answer() -> None:
    login = Login()
    login.sasl.receive(shake(version=0), 0)
    step = login.sasl.receive(b"\0alice\0wrong", 0)
    assert step is not None and (step.output, step.delay_ms) == (b"", 100)
    assert step.failure == f"the authentication with PLAIN failed: {INVALID}"
    login.check_closed()


# --- frames that do not fit the state ---------------------------------------------------------------------------------


def test_before_the_handshake_only_api_versions_is_served() -> None:
    login = Login()
    assert login.sasl.receive(VERSIONS, 0) is None
    assert login.sasl.receive(VERSIONS, 0) is None, "the first one was not answered without an error"
    login.sasl.versions_answered()
    assert "a second time" in login.failure(VERSIONS)
    assert "api key 3 v9 is not allowed here" in Login().failure(METADATA)
    assert "api key 36 v2 is not allowed here" in Login().failure(token(PLAIN_ALICE))


@pytest.mark.parametrize(
    "frame", [b"", b"\0\x11", b"GET / HTTP/1.1\r\n\r\n", shake()[:-1], shake(version=1)[:3], b"\x60" * 80]
)
def test_bytes_that_are_no_handshake(frame: bytes) -> None:
    assert "a valid SaslHandshake request was expected" in Login().failure(frame)


@pytest.mark.parametrize("frame", [METADATA, shake(), PLAIN_ALICE, b"", token(PLAIN_ALICE)[:-1]])
def test_after_the_handshake_only_tokens_are_accepted(frame: bytes) -> None:
    login = Login()
    login.sasl.receive(shake(), 0)
    assert "a valid SaslAuthenticate request was expected" in login.failure(frame)


@pytest.mark.parametrize(("version", "answered_version"), [(0, 0), (4, 4), (99, 0)])
def test_after_the_handshake_api_versions_is_refused_with_an_answer(version: int, answered_version: int) -> None:
    login = Login()
    login.sasl.receive(shake(), 0)
    encoded_version = min(version, 4)
    body = ApiVersionsRequest().encode(encoded_version)
    frame = encode_request(ApiKey.API_VERSIONS, encoded_version, 1, "c", body)[4:]
    step = login.sasl.receive(frame[:2] + version.to_bytes(2, "big") + frame[4:], 0)
    assert step is not None and step.failure == "ApiVersions came during the SASL authentication"
    assert step.delay_ms == 100
    response = unframed(step)
    correlation_id, position = decode_response_header(response, ApiKey.API_VERSIONS, answered_version)
    assert correlation_id == 1
    decoded = ApiVersionsResponse.decode(response[position:], answered_version)
    assert (decoded.error_code, decoded.api_keys) == (Errors.ILLEGAL_SASL_STATE, [])
    login.check_closed()


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", "plain", ""])
def test_a_mechanism_that_is_not_enabled(version: int, mechanism: str) -> None:
    login = Login(replace(SETTINGS, mechanisms=["SCRAM-SHA-512"]))
    step = login.sasl.receive(shake(mechanism, version), 0)
    response = shaken(step, version)
    assert (response.error_code, response.mechanisms) == (33, ["SCRAM-SHA-512"])
    assert step is not None and step.delay_ms == 100 and step.failure is not None
    login.check_closed()


@pytest.mark.parametrize("is_shaken", [False, True])
def test_tokens_that_are_too_long(is_shaken: bool) -> None:
    login = Login()
    if is_shaken:
        login.sasl.receive(shake(version=0), 0)
    assert login.failure(bytes(1001)) == "Failing SASL authentication due to invalid receive size"


FRAMES = (VERSIONS, METADATA, shake(), shake(version=0), shake("SCRAM-SHA-256"), token(PLAIN_ALICE), PLAIN_ALICE)


@given(st.lists(st.sampled_from([*FRAMES, token(b"\0alice\0wrong"), token(b"n,,n=alice,r=n"), b"n,,n=alice,r=n"])))
def test_no_order_of_frames_serves_a_request_without_a_login(frames: list[bytes]) -> None:
    sasl = Login().sasl
    for number, frame in enumerate(frames):
        was_complete = sasl.is_complete
        step = sasl.receive(frame, 0)
        if step is None and not was_complete:
            assert frame == VERSIONS
        if sasl.is_complete and not was_complete:
            before = frames[number - 1]
            assert (before, frame) in ((shake(), token(PLAIN_ALICE)), (shake(version=0), PLAIN_ALICE))


SHAKES = [shake(mechanism, version) for mechanism in ("PLAIN", "SCRAM-SHA-256") for version in (0, 1)]
ALMOST_SCRAM = st.from_regex(
    rb"n,(a=[a-z]{0,5})?,(n=alice,r=\w+)(,\w=\w)?|c=biws,r=\w+,p=[\w+/=]{0,50}", fullmatch=True
)
TOKENS = st.binary(max_size=60) | ALMOST_SCRAM | st.lists(st.binary(max_size=5), max_size=5).map(b"\0".join)


@given(st.lists(st.sampled_from(SHAKES) | TOKENS | TOKENS.map(token), min_size=1, max_size=6))
def test_arbitrary_tokens_neither_log_in_nor_raise(frames: list[bytes]) -> None:
    login = Login()
    for frame in frames:
        step = login.sasl.receive(frame, 0)
        if step is not None and step.failure is not None:
            login.check_closed()
    assert Login.state_of(login.sasl) == (False, None)


# --- sessions ---------------------------------------------------------------------------------------------------------

LIMITED = replace(SETTINGS, max_reauth_ms={"PLAIN": 5000, "SCRAM-SHA-256": 60_000})


@pytest.mark.parametrize("version", [0, 2])
def test_a_session_ends_with_the_first_request_after_its_end(version: int) -> None:
    login = Login(LIMITED)
    login.sasl.receive(shake(), 1000)
    response = answered(login.sasl.receive(token(PLAIN_ALICE, version), 1000), version)
    assert response.session_lifetime_ms == (5000 if version else 0)
    assert login.sasl.session_end_ms == 6000
    assert login.sasl.receive(METADATA, 6000) is None
    assert "the session has expired" in login.failure(METADATA, 6001)


def test_a_session_without_an_end_cannot_be_renewed() -> None:
    login = Login(replace(SETTINGS, max_reauth_ms={"SCRAM-SHA-256": 1000}))
    login.plain()
    assert login.sasl.receive(shake(), 10**9) is None


@pytest.mark.parametrize("now_ms", [3000, 6001])
def test_reauthentication(now_ms: int) -> None:
    login = Login(LIMITED)
    login.plain(now_ms=1000)
    assert login.sasl.receive(METADATA, now_ms - 1) is None
    assert shaken(login.sasl.receive(shake(), now_ms)).error_code == 0
    assert not login.sasl.is_complete
    assert answered(login.sasl.receive(token(PLAIN_ALICE), now_ms)).session_lifetime_ms == 5000
    assert login.sasl.session_end_ms == now_ms + 5000
    assert login.sasl.receive(METADATA, now_ms + 5000) is None


def test_requests_are_not_served_during_a_reauthentication() -> None:
    login = Login(LIMITED)
    login.plain()
    login.sasl.receive(shake(), 10)
    assert "a valid SaslAuthenticate request was expected" in login.failure(METADATA, 10)


def test_reauthentication_at_most_once_a_second() -> None:
    login = Login(LIMITED)
    login.plain()
    login.plain(now_ms=10)
    assert login.sasl.receive(shake(), 1009) is None, "it is served as usual, with an error"
    login.plain(now_ms=1010)
    login.settings = replace(LIMITED, max_reauth_ms={"PLAIN": 100})
    login.plain(now_ms=3000)
    assert "the session has expired" in login.failure(shake(), 3101)


def test_a_reauthentication_keeps_mechanism_and_principal() -> None:
    login = Login(LIMITED)
    login.plain()
    step = login.plain(b"\0bob\0bob-secret", 10)
    assert answered(step).error_code == 58
    text = "Cannot change principals during re-authentication from User.alice: User.bob"
    assert answered(step).error_message == text
    login.check_closed()
    login = Login(LIMITED)
    login.plain()
    login.sasl.receive(shake("SCRAM-SHA-256"), 10)
    step = login.sasl.receive(token(b"n,,n=alice,r=n"), 10)
    assert answered(step).error_message == (
        "SASL mechanism 'SCRAM-SHA-256' requested by client is not supported for re-authentication of mechanism 'PLAIN'"
    )
    login.check_closed()


def test_a_refused_reauthentication_names_its_phase() -> None:
    login, client = Login(LIMITED), ScramExchange("SCRAM-SHA-256", "bob", "bob-secret", "n")
    login.sasl.receive(shake("SCRAM-SHA-256"), 0)
    first = answered(login.sasl.receive(token(client.first()), 0)).auth_bytes
    assert answered(login.sasl.receive(token(client.final(first)), 0)).session_lifetime_ms == 60_000
    login.sasl.receive(shake("SCRAM-SHA-256"), 10)
    text = "Authentication failed during re-authentication due to invalid credentials with SASL mechanism SCRAM-SHA-256"
    assert answered(login.sasl.receive(token(b""), 10)).error_message == text
    login.check_closed()


def test_a_reauthentication_sees_changed_users() -> None:
    login = Login(LIMITED)
    login.plain()
    login.settings = replace(LIMITED, users=PlainUsers({"alice": "new"}))
    assert login.sasl.receive(METADATA, 10) is None
    assert answered(login.plain(now_ms=10)).error_message == INVALID
