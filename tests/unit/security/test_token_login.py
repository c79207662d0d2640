# SPDX-License-Identifier: Apache-2.0
"""Logins with delegation tokens: SCRAM with `tokenauth=true`, from the first message to the end of the session."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from kcoord.client.scram import ScramExchange
from kcoord.config import BrokerConfig
from kcoord.metadata.delegation_tokens import token_hmac
from kcoord.metadata.image import MetadataImage, ScramCredential
from kcoord.metadata.records import DelegationTokenData
from kcoord.security.plain import PlainUsers
from kcoord.security.rejection import OTHER_AUTHORIZATION_ID, Rejection
from kcoord.security.sasl import SaslAuthenticator, SaslSettings
from kcoord.security.scram import Decoys, ScramServerExchange, TokenLogin
from kcoord.security.scram_messages import ScramError
from kcoord.security.token_login import token_login
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeRequest

CONFIG = BrokerConfig.from_properties({"delegation.token.secret.key": "pepper"})
TOKEN = DelegationTokenData("User:alice", "User:admin", ("User:bob",), 1000, 9000, 5000)
IMAGE = replace(
    MetadataImage.empty(),
    delegation_tokens={"id": TOKEN, "group": replace(TOKEN, owner="Group:alice"), "ends": replace(TOKEN, max_ms=4000)},
)
MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")


def password_of(token_id: str) -> str:
    return base64.b64encode(token_hmac(CONFIG, token_id)).decode()


def nobody(mechanism: str, user: str) -> ScramCredential | None:
    return None


def server(mechanism: str, now_ms: int = 2000, *, has_tokens: bool = True) -> ScramServerExchange:
    def tokens(mechanism: str, token_id: str) -> TokenLogin | None:
        return token_login(IMAGE, CONFIG, mechanism, token_id, now_ms)

    return ScramServerExchange(mechanism, nobody, "server", Decoys(b"key", {}), tokens if has_tokens else None)


def log_in(exchange: ScramServerExchange, mechanism: str, token_id: str, password: str) -> None:
    client = ScramExchange(mechanism, token_id, password, "client", is_token=True)
    client.verify(exchange.respond(client.final(exchange.respond(client.first()))))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_the_holder_of_a_token_is_its_owner(mechanism: str) -> None:
    exchange = server(mechanism)
    log_in(exchange, mechanism, "id", password_of("id"))
    assert (exchange.is_complete, exchange.is_token_login) == (True, True)
    assert (exchange.user, exchange.credential_end_ms) == ("alice", 5000)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password(mechanism: str) -> None:
    with pytest.raises(Rejection) as caught:
        log_in(server(mechanism), mechanism, "id", password_of("other"))
    assert caught.value.client_text is None


@pytest.mark.parametrize(
    ("token_id", "now_ms", "has_tokens"),
    [("other", 2000, True), ("alice", 2000, True), ("id", 5001, True), ("group", 2000, True), ("id", 2000, False)],
)
def test_without_a_valid_token_the_first_message_fails(token_id: str, now_ms: int, has_tokens: bool) -> None:
    exchange = server("SCRAM-SHA-256", now_ms, has_tokens=has_tokens)
    with pytest.raises(Rejection, match="there is no valid delegation token with this id") as caught:
        log_in(exchange, "SCRAM-SHA-256", token_id, password_of(token_id))
    assert caught.value.client_text is None


def test_in_the_last_millisecond_a_token_is_valid() -> None:
    log_in(server("SCRAM-SHA-256", 5000), "SCRAM-SHA-256", "id", password_of("id"))
    exchange = server("SCRAM-SHA-256", 4000)
    log_in(exchange, "SCRAM-SHA-256", "ends", password_of("ends"))
    assert exchange.credential_end_ms == 4000


@pytest.mark.parametrize("extension", ["tokenauth=TRUE", "x=y,tokenauth=true", "tokenauth=false,tokenauth=true"])
def test_forms_of_the_extension(extension: str) -> None:
    exchange = server("SCRAM-SHA-256")
    exchange.respond(f"n,,n=id,r=nonce,{extension}".encode())
    assert exchange.user == "alice"


@pytest.mark.parametrize("extension", ["tokenauth=no", "tokenauth=true,tokenauth=false", "TokenAuth=true"])
def test_without_the_extension_the_name_is_a_user(extension: str) -> None:
    exchange = server("SCRAM-SHA-256")
    exchange.respond(f"n,,n=id,r=nonce,{extension}".encode())
    assert (exchange.user, exchange.is_token_login) == ("id", False)
    client = ScramExchange("SCRAM-SHA-256", "id", password_of("id"), "client")
    exchange = server("SCRAM-SHA-256")
    with pytest.raises((Rejection, ScramError)):
        exchange.respond(client.final(exchange.respond(client.first())))


def test_an_authorization_id_is_the_id_of_the_token() -> None:
    server("SCRAM-SHA-256").respond(b"n,a=id,n=id,r=nonce,tokenauth=true")
    with pytest.raises(Rejection) as caught:
        server("SCRAM-SHA-256").respond(b"n,a=alice,n=id,r=nonce,tokenauth=true")
    assert caught.value.client_text == OTHER_AUTHORIZATION_ID


@pytest.mark.parametrize(("max_reauth_ms", "lifetime_ms"), [(0, 3000), (1000, 1000), (60_000, 3000)])
def test_a_session_ends_with_the_token_at_the_latest(max_reauth_ms: int, lifetime_ms: int) -> None:
    def tokens(mechanism: str, token_id: str, now_ms: int) -> TokenLogin | None:
        return token_login(IMAGE, CONFIG, mechanism, token_id, now_ms)

    mechanism = "SCRAM-SHA-512"
    settings = SaslSettings(
        [mechanism],
        PlainUsers({}),
        nobody,
        {mechanism: max_reauth_ms},
        4096,
        0,
        lambda: "server",
        Decoys(b"key", {}),
        None,
        tokens,
    )
    authenticator = SaslAuthenticator(lambda: settings)
    now_ms = 2000

    def authenticate(message: bytes) -> SaslAuthenticateResponse:
        request = SaslAuthenticateRequest(auth_bytes=message).encode(2)
        step = authenticator.receive(encode_request(ApiKey.SASL_AUTHENTICATE, 2, 1, "c", request)[4:], now_ms)
        assert step is not None
        assert step.failure is None
        frame = step.output[4:]
        return SaslAuthenticateResponse.decode(
            frame[decode_response_header(frame, ApiKey.SASL_AUTHENTICATE, 2)[1] :], 2
        )

    handshake = SaslHandshakeRequest(mechanism=mechanism).encode(1)
    authenticator.receive(encode_request(ApiKey.SASL_HANDSHAKE, 1, 1, "c", handshake)[4:], now_ms)
    client = ScramExchange(mechanism, "id", password_of("id"), "client", is_token=True)
    first = authenticate(client.first())
    assert authenticate(client.final(first.auth_bytes)).session_lifetime_ms == lifetime_ms
    assert (authenticator.principal, authenticator.is_token_authenticated) == ("User:alice", True)
    end_ms = now_ms + lifetime_ms
    request = encode_request(ApiKey.METADATA, 12, 1, "c", b"")[4:]
    assert authenticator.receive(request, end_ms) is None
    step = authenticator.receive(request, end_ms + 1)
    assert step is not None and step.failure is not None
