# SPDX-License-Identifier: Apache-2.0
"""A login that is passed on to another broker has the outcome that it has there. That broker is a SaslAuthenticator."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.scram import ScramExchange
from kcoord.security.login_states import SaslStep
from kcoord.security.relayed_login import RELAYED_MECHANISMS, RelayedLogin, subject_of
from kcoord.security.sasl import SaslAuthenticator, SaslSettings
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.unit.security.test_oauthbearer import CLAIMS, NOW_MS, b64
from tests.unit.security.test_oauthbearer import token as signed_token
from tests.unit.security.test_sasl import METADATA, PLAIN_ALICE, SETTINGS, VERSIONS, answered, shake, shaken, token

MAX_BYTES = SETTINGS.max_token_bytes
DELAY_MS = 70


class Relayed:
    """A client whose login is passed on, and the broker that decides."""

    def __init__(self, settings: SaslSettings = SETTINGS) -> None:
        self.broker = SaslAuthenticator(lambda: settings)
        self.login = RelayedLogin(MAX_BYTES, DELAY_MS, "sub")

    def receive(self, frame: bytes, now_ms: int = 0) -> SaslStep | None:
        """Returns the answer to a frame, also if it comes from the broker."""
        step = self.login.receive(frame, now_ms)
        request = self.login.take_request()
        if request is None:
            return step
        assert step == SaslStep(), "nothing is answered before the broker has decided"
        assert not self.login.is_complete
        return self.login.answered(self.ask(request, now_ms), now_ms)

    def ask(
        self, request: SaslHandshakeRequest | SaslAuthenticateRequest, now_ms: int = 0
    ) -> SaslHandshakeResponse | SaslAuthenticateResponse:
        """Returns the broker's response to a request that is passed on."""
        is_handshake = isinstance(request, SaslHandshakeRequest)
        version = 1 if is_handshake else 2
        step = self.broker.receive(
            encode_request(request.api_key, version, 5, "k", request.encode(version))[4:], now_ms
        )
        assert step is not None
        (frame,) = FrameReader(10_000).feed(step.output)
        _, position = decode_response_header(frame, request.api_key, version)
        answer = SaslHandshakeResponse if is_handshake else SaslAuthenticateResponse
        return answer.decode(frame[position:], version)


def bearer(message: bytes = b"", **claims: object) -> bytes:
    start = message or b"n,,"
    return token(start + b"\x01auth=Bearer %s\x01\x01" % signed_token({**CLAIMS, **claims}).encode())


def both(frames: list[bytes], settings: SaslSettings = SETTINGS) -> tuple[list[SaslStep | None], Relayed]:
    """Sends frames to a broker, and to a login that is passed on to another such broker. Both have the same outcome.

    A failure is as in the other broker, but its delay was there.
    """
    direct, relayed = SaslAuthenticator(lambda: settings), Relayed(settings)
    steps: list[SaslStep | None] = []
    for frame in frames:
        expected, step = direct.receive(frame, NOW_MS), relayed.receive(frame, NOW_MS)
        assert (step is None) == (expected is None)
        if step is not None and expected is not None:
            assert step.output == expected.output
            assert (step.failure is None) == (expected.failure is None)
        assert relayed.login.is_complete == direct.is_complete
        assert (relayed.login.principal, relayed.login.session_end_ms) == (direct.principal, direct.session_end_ms)
        steps.append(step)
    return steps, relayed


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("data", [PLAIN_ALICE, b"alice\0alice\0alice-secret"])
def test_plain(version: int, data: bytes) -> None:
    steps, relayed = both([shake(), token(data, version), METADATA])
    assert relayed.login.principal == "User:alice"
    assert steps[-1] is None


@pytest.mark.parametrize(
    "data",
    [b"\0alice\0wrong", b"\0unknown\0alice-secret", b"\0\0alice-secret", b"\0alice\0", b"", b"a\0b", b"\0a\0b\0c"],
    ids=str,
)
def test_refused_plain_logins(data: bytes) -> None:
    steps, relayed = both([shake(), token(data)])
    assert answered(steps[1]).error_code == Errors.SASL_AUTHENTICATION_FAILED
    assert relayed.receive(METADATA) == SaslStep(failure="the authentication has failed")


def test_clients_that_send_bare_tokens() -> None:
    steps, relayed = both([shake(version=0), PLAIN_ALICE])
    assert steps[1] == SaslStep(b"\0\0\0\0")
    assert relayed.login.principal == "User:alice"
    steps, _ = both([shake(version=0), b"\0alice\0wrong"])
    assert steps[1] is not None
    assert (steps[1].output, steps[1].failure) == (b"", "the authentication with PLAIN was refused")


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize(("user", "password", "is_right"), [("bob", "bob-secret", True), ("bob", "x", False)])
def test_scram(mechanism: str, user: str, password: str, is_right: bool) -> None:
    relayed, client = Relayed(), ScramExchange(mechanism, user, password, "n")
    assert shaken(relayed.receive(shake(mechanism))).error_code == 0
    first = answered(relayed.receive(token(client.first()))).auth_bytes
    assert not relayed.login.is_complete
    last = answered(relayed.receive(token(client.final(first))))
    assert (relayed.login.is_complete, relayed.login.principal) == (is_right, "User:bob" if is_right else None)
    if is_right:
        client.verify(last.auth_bytes)
    else:
        assert last.error_message is not None and last.error_message.endswith(mechanism)


def test_a_name_with_signs_of_scram() -> None:
    relayed = Relayed()
    relayed.receive(shake("SCRAM-SHA-256"))
    relayed.login.receive(token(b"n,,n=a=2Cb=3Dc,r=nonce"), 0)
    relayed.login.take_request()
    relayed.login.answered(SaslAuthenticateResponse(auth_bytes=b"r=..."), 0)
    relayed.login.receive(token(b"c=biws,r=...,p=..."), 0)
    relayed.login.take_request()
    relayed.login.answered(SaslAuthenticateResponse(auth_bytes=b"v=..."), 0)
    assert relayed.login.principal == "User:a,b=c"


def test_a_token_of_oauthbearer_names_the_user_and_the_end_of_the_session() -> None:
    _, relayed = both([shake("OAUTHBEARER"), bearer(sub="carol"), METADATA])
    assert (relayed.login.principal, relayed.login.session_end_ms) == ("User:carol", NOW_MS + 600_000)


def test_a_token_that_the_broker_refuses() -> None:
    """The broker answers with a message and no error first (RFC 7628). The client is not logged in then."""
    steps, relayed = both([shake("OAUTHBEARER"), bearer(aud="another"), token(b"\x01")])
    assert answered(steps[1]).auth_bytes == b'{"status":"invalid_token"}'
    assert answered(steps[2]).error_code == Errors.SASL_AUTHENTICATION_FAILED
    assert relayed.login.principal is None


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("PLAIN", b"root\0alice\0alice-secret"),
        ("SCRAM-SHA-256", b"n,a=root,n=alice,r=nonce"),
        ("OAUTHBEARER", b"n,a=root,\x01auth=Bearer " + signed_token(CLAIMS).encode() + b"\x01\x01"),
    ],
)
def test_another_authorization_id_is_refused_whatever_the_broker_does(mechanism: str, message: bytes) -> None:
    relayed = Relayed()
    relayed.receive(shake(mechanism))
    step = relayed.login.receive(token(message), 0)
    assert relayed.login.take_request() is None, "the broker does not see it"
    assert step is not None
    assert (step.failure is not None, step.delay_ms) == (True, DELAY_MS)
    text = answered(step).error_message
    assert text == "Authentication failed: Client requested an authorization id that is different from username"


def test_delegation_tokens_are_refused() -> None:
    relayed, client = Relayed(), ScramExchange("SCRAM-SHA-256", "token-id", "hmac", "n", is_token=True)
    relayed.receive(shake("SCRAM-SHA-256"))
    text = answered(relayed.receive(token(client.first()))).error_message
    assert text == "Delegation tokens cannot be used here, because their owners are not known."


@pytest.mark.parametrize(
    ("mechanism", "message"),
    [
        ("PLAIN", b"no user"),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer opaque\x01\x01"),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer %s\x01\x01" % signed_token({"name": "alice"}).encode()),
    ],
)
def test_a_login_without_a_user_fails_even_if_the_broker_accepts_it(mechanism: str, message: bytes) -> None:
    login = RelayedLogin(MAX_BYTES, DELAY_MS, "sub")
    login.receive(shake(mechanism), 0)
    login.take_request()
    login.answered(SaslHandshakeResponse(mechanisms=[mechanism]), 0)
    login.receive(token(message), 0)
    assert login.take_request() is not None
    step = login.answered(SaslAuthenticateResponse(), 0)
    assert (step.failure is not None, login.is_complete, login.principal) == (True, False, None)
    assert answered(step).error_message == (
        f"Authentication failed with SASL mechanism {mechanism}: the messages of the client have no user name that can "
        "be read"
    )


def test_mechanisms_are_those_of_the_broker_whose_users_can_be_read() -> None:
    relayed = Relayed(replace(SETTINGS, mechanisms=["PLAIN", "GSSAPI"]))
    response = shaken(relayed.receive(shake("SCRAM-SHA-256")))
    assert (response.error_code, response.mechanisms) == (Errors.UNSUPPORTED_SASL_MECHANISM, ["PLAIN"])
    login = RelayedLogin(MAX_BYTES, DELAY_MS, "sub")
    login.receive(shake("GSSAPI"), 0)
    login.take_request()
    step = login.answered(SaslHandshakeResponse(mechanisms=["PLAIN", "GSSAPI"]), 0)
    response = shaken(step)
    assert (response.error_code, response.mechanisms) == (Errors.UNSUPPORTED_SASL_MECHANISM, ["PLAIN"])
    assert step.failure is not None


def test_reauthentication_keeps_the_user() -> None:
    settings = replace(SETTINGS, max_reauth_ms={"PLAIN": 5_000})
    relayed = Relayed(settings)
    relayed.receive(shake(), 0)
    assert answered(relayed.receive(token(PLAIN_ALICE), 0)).session_lifetime_ms == 5_000
    assert relayed.receive(METADATA, 4_000) is None
    assert shaken(relayed.receive(shake(), 4_000)).error_code == 0
    assert not relayed.login.is_complete
    assert answered(relayed.receive(token(PLAIN_ALICE), 4_000)).session_lifetime_ms == 5_000
    assert (relayed.login.principal, relayed.login.session_end_ms) == ("User:alice", 9_000)
    relayed.receive(shake(), 6_000)
    # The broker would refuse another user itself. This one is careless.
    relayed.login.receive(token(b"\0bob\0bob-secret"), 6_000)
    relayed.login.take_request()
    step = relayed.login.answered(SaslAuthenticateResponse(session_lifetime_ms=5_000), 6_000)
    text = "Cannot change principals during re-authentication from User.alice: User.bob"
    assert answered(step).error_message == text
    assert not relayed.login.is_complete


def test_the_first_request_after_the_end_of_a_session_fails() -> None:
    relayed = Relayed(replace(SETTINGS, max_reauth_ms={"PLAIN": 5_000}))
    relayed.receive(shake(), 0)
    relayed.receive(token(PLAIN_ALICE), 0)
    step = relayed.receive(METADATA, 5_001)
    assert step is not None and step.failure is not None and not step.is_authentication


def test_no_frame_may_come_before_an_answer() -> None:
    login = RelayedLogin(MAX_BYTES, DELAY_MS, "sub")
    login.receive(shake(), 0)
    step = login.receive(token(PLAIN_ALICE), 0)
    assert step is not None and step.failure is not None
    late = login.answered(SaslHandshakeResponse(mechanisms=["PLAIN"]), 0)
    assert late.failure is not None
    assert not login.is_complete


@pytest.mark.parametrize("frame", [METADATA, VERSIONS[:6], token(PLAIN_ALICE), b"x" * (MAX_BYTES + 1)], ids=len)
def test_frames_that_are_no_handshake_fail_here(frame: bytes) -> None:
    login = RelayedLogin(MAX_BYTES, DELAY_MS, "sub")
    login.receive(VERSIONS, 0)
    login.versions_answered()
    step = login.receive(frame, 0)
    assert step is not None and step.failure is not None
    assert login.take_request() is None


@pytest.mark.parametrize(
    ("payload", "subject"),
    [
        ({"sub": "alice"}, "alice"),
        ({"sub": 7}, ""),
        ({"sub": None}, ""),
        ({}, ""),
        (["sub"], ""),
        ("alice", ""),
    ],
    ids=str,
)
def test_subjects_of_tokens(payload: Any, subject: str) -> None:
    assert subject_of(f"{b64(b'{}')}.{b64(json.dumps(payload).encode())}.{b64(b's')}", "sub") == subject


@given(st.text())
def test_no_text_breaks_the_reader_of_tokens(text: str) -> None:
    assert isinstance(subject_of(text, "sub"), str)
    assert isinstance(subject_of(f"a.{text}.c", "sub"), str)


FRAMES = [
    VERSIONS,
    METADATA,
    token(b"\x01"),
    token(b"junk"),
    token(PLAIN_ALICE),
    token(b"n,,n=alice,r=nonce"),
    token(b"n,a=root,n=alice,r=nonce"),
    *map(shake, RELAYED_MECHANISMS),
    shake("GSSAPI"),
    shake(version=0),
    PLAIN_ALICE,
    b"",
]
ANSWERS = [
    SaslHandshakeResponse(mechanisms=["PLAIN"]),
    SaslHandshakeResponse(error_code=Errors.UNSUPPORTED_SASL_MECHANISM),
    SaslAuthenticateResponse(),
    SaslAuthenticateResponse(auth_bytes=b"v=..."),
    SaslAuthenticateResponse(session_lifetime_ms=2_000),
    SaslAuthenticateResponse(error_code=Errors.SASL_AUTHENTICATION_FAILED),
]


@given(st.lists(st.one_of(st.sampled_from(FRAMES), st.sampled_from(ANSWERS)), max_size=12))
def test_no_order_of_frames_and_answers_completes_a_login_that_was_not_accepted(steps: list[Any]) -> None:
    """A login is complete only right after an answer to a token without an error, and then has a principal."""
    login, now_ms, pending = RelayedLogin(MAX_BYTES, DELAY_MS, "sub"), 0, False
    for step in steps:
        was_complete, now_ms = login.is_complete, now_ms + 700
        if isinstance(step, bytes):
            login.receive(step, now_ms)
            login.versions_answered()
            pending = isinstance(login.take_request(), SaslAuthenticateRequest)
            assert was_complete or not login.is_complete
            continue
        login.answered(step, now_ms)
        if login.is_complete and not was_complete:
            assert pending
            assert isinstance(step, SaslAuthenticateResponse)
            assert not step.error_code
            assert login.principal == "User:alice"
        pending = False
