# SPDX-License-Identifier: Apache-2.0
"""Which messages, key sets and tokens of OAUTHBEARER are accepted. The library under test does not sign the tokens."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from contextlib import suppress
from typing import Any

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from joserfc.jwk import ECKey

from kcoord.security.oauthbearer import (
    BearerExchange,
    BearerMessage,
    BearerSettings,
    JwkKeys,
    TokenError,
    TokenRules,
    UnknownKeyIdError,
    parse_message,
)
from kcoord.security.rejection import Rejection

NOW_MS = 1_800_000_000_000
NOW = NOW_MS // 1000
RSA = rsa.generate_private_key(65537, 2048)
OTHER_RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
CLAIMS: dict[str, Any] = {"sub": "alice", "iat": NOW - 10, "exp": NOW + 600, "iss": "https://issuer", "aud": "kafka"}
RULES = TokenRules(["kafka", "other"], "https://issuer")


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def number(value: int) -> str:
    return b64(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def jwk(key: object, **fields: str) -> dict[str, str]:
    if isinstance(key, rsa.RSAPrivateKey):
        numbers = key.public_key().public_numbers()
        return {"kty": "RSA", "n": number(numbers.n), "e": number(numbers.e), **fields}
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    point = key.public_key().public_numbers()
    x, y = (b64(part.to_bytes(32, "big")) for part in (point.x, point.y))
    return {"kty": "EC", "crv": "P-256", "x": x, "y": y, **fields}


def keys(*entries: object) -> JwkKeys:
    return JwkKeys(json.dumps({"keys": entries}).encode())


KEYS = keys(jwk(RSA, kid="r"), jwk(EC, kid="e"))


def sign(data: bytes, algorithm: str, key: object) -> bytes:
    if isinstance(key, bytes):
        return hmac.digest(key, data, hashlib.sha256)
    if isinstance(key, rsa.RSAPrivateKey):
        digest = hashes.SHA256()
        scheme = padding.PSS(padding.MGF1(digest), 32) if algorithm.startswith("PS") else padding.PKCS1v15()
        return key.sign(data, scheme, digest)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    r, s = decode_dss_signature(key.sign(data, ec.ECDSA(hashes.SHA256())))
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def token(claims: object = None, algorithm: str = "RS256", key: object = RSA, **header: object) -> str:
    head = {"alg": algorithm, **(header or {"kid": "r"})}
    body = CLAIMS if claims is None else claims
    signed = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(body).encode())}"
    return f"{signed}.{b64(sign(signed.encode(), algorithm, key))}"


class TestTokens:
    @pytest.mark.parametrize(
        ("algorithm", "key", "key_id"),
        [("RS256", RSA, "r"), ("PS256", RSA, "r"), ("ES256", EC, "e")],
    )
    def test_a_token_of_each_kind_of_key_is_accepted(self, algorithm: str, key: object, key_id: str) -> None:
        validated = RULES.validate(token(None, algorithm, key, kid=key_id), KEYS, NOW_MS)
        assert (validated.subject, validated.scopes, validated.expires_ms) == ("alice", frozenset(), NOW_MS + 600_000)

    @pytest.mark.parametrize(
        ("change", "error"),
        [
            ({"exp": NOW - 30}, "expired"),
            ({"exp": None}, "exp is not a time"),
            ({"exp": True}, "exp is not a time"),
            ({"exp": float("nan")}, "exp is not a time"),
            ({"exp": "soon"}, "exp is not a time"),
            ({"iat": None}, "iat is not a time"),
            ({"nbf": NOW + 31}, "not valid yet"),
            ({"iss": "https://another"}, "issuer"),
            ({"iss": ["https://issuer"]}, "issuer"),
            ({"aud": "someone"}, "audience"),
            ({"aud": []}, "audience"),
            ({"aud": [1]}, "aud is not a text or a list"),
            ({"aud": None}, "aud is not a text or a list"),
            ({"sub": ""}, "sub is not a text"),
            ({"sub": 5}, "sub is not a text"),
            ({"sub": "al\ud800ice"}, "sub is not a text"),
            ({"scope": ["a", " a"]}, "repeated scope"),
            ({"scope": ["a", ""]}, "empty or a repeated"),
            ({"scope": 7}, "scope is not a text"),
        ],
    )
    def test_a_claim_that_is_not_accepted(self, change: dict[str, object], error: str) -> None:
        with pytest.raises(TokenError, match=error):
            RULES.validate(token({**CLAIMS, **change}), KEYS, NOW_MS)

    @pytest.mark.parametrize("claim", ["exp", "iat", "iss", "aud", "sub"])
    def test_a_claim_that_is_not_there(self, claim: str) -> None:
        claims = {name: value for name, value in CLAIMS.items() if name != claim}
        with pytest.raises(TokenError):
            RULES.validate(token(claims), KEYS, NOW_MS)

    def test_clocks_may_differ_by_the_skew(self) -> None:
        late = {**CLAIMS, "exp": NOW - 29}
        assert RULES.validate(token(late), KEYS, NOW_MS).expires_ms == NOW_MS - 29_000
        assert RULES.validate(token({**CLAIMS, "nbf": NOW + 30}), KEYS, NOW_MS).subject == "alice"

    def test_without_expectations_any_issuer_and_audience_is_accepted(self) -> None:
        claims = {"sub": " alice ", "iat": NOW, "exp": NOW + 1}
        assert TokenRules().validate(token(claims), KEYS, NOW_MS).subject == "alice"

    @pytest.mark.parametrize(
        ("subject", "principal"),
        [(" alice\t", "alice"), ("\x1calice", "alice"), ("\xa0alice", "\xa0alice"), ("\u2003alice", "\u2003alice")],
    )
    def test_only_the_spaces_that_kafka_trims_are_no_part_of_the_subject(self, subject: str, principal: str) -> None:
        assert RULES.validate(token({**CLAIMS, "sub": subject}), KEYS, NOW_MS).subject == principal

    def test_the_configured_claims_name_subject_and_scopes(self) -> None:
        rules = TokenRules(scope_claim="scp", subject_claim="client")
        validated = rules.validate(token({**CLAIMS, "client": "app", "scp": ["read", "write"]}), KEYS, NOW_MS)
        assert validated.subject == "app"
        assert validated.scopes == {"read", "write"}
        assert rules.validate(token({**CLAIMS, "client": "app", "scp": "read"}), KEYS, NOW_MS).scopes == {"read"}

    @pytest.mark.parametrize("claims", [[], "text", 5])
    def test_a_payload_that_is_no_object(self, claims: object) -> None:
        with pytest.raises(TokenError, match="payload is not an object"):
            RULES.validate(token(claims), KEYS, NOW_MS)


class TestForgedTokens:
    def test_the_signature_of_another_key(self) -> None:
        with pytest.raises(TokenError, match="signature"):
            RULES.validate(token(key=OTHER_RSA), KEYS, NOW_MS)

    @pytest.mark.parametrize("algorithm", ["none", "None", "", "HS256", "HS512", "RSA-OAEP", 5, None])
    def test_an_algorithm_without_a_public_key(self, algorithm: object) -> None:
        head = {"alg": algorithm, "kid": "r"}
        signed = f"{b64(json.dumps(head).encode())}.{b64(json.dumps(CLAIMS).encode())}"
        for signature in ("", b64(b"x" * 32)):
            with pytest.raises(TokenError):
                RULES.validate(f"{signed}.{signature}", KEYS, NOW_MS)

    def test_an_hmac_with_the_public_key_as_its_secret(self) -> None:
        public = RSA.public_key()
        for secret in (
            public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
            public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        ):
            with pytest.raises(TokenError, match="algorithm 'HS256'"):
                RULES.validate(token(None, "HS256", secret, kid="r"), KEYS, NOW_MS)

    def test_the_key_of_another_algorithm(self) -> None:
        with pytest.raises(TokenError, match="0 keys fit ES256"):
            RULES.validate(token(None, "ES256", EC, kid="r"), KEYS, NOW_MS)
        with pytest.raises(TokenError, match="0 keys fit PS256"):
            RULES.validate(token(None, "PS256", RSA, kid="r"), keys(jwk(RSA, kid="r", alg="RS256")), NOW_MS)

    def test_a_key_in_the_header_does_not_count(self) -> None:
        with pytest.raises(TokenError):
            RULES.validate(token(None, "RS256", OTHER_RSA, kid="r", jwk=jwk(OTHER_RSA)), KEYS, NOW_MS)
        with pytest.raises(UnknownKeyIdError):
            RULES.validate(token(None, "RS256", OTHER_RSA, kid="x", jku="https://evil"), KEYS, NOW_MS)

    def test_an_unknown_key_id_is_named(self) -> None:
        with pytest.raises(UnknownKeyIdError) as raised:
            RULES.validate(token(kid="new"), KEYS, NOW_MS)
        assert raised.value.key_id == "new"

    def test_an_extension_that_must_be_understood(self) -> None:
        with pytest.raises(TokenError):
            RULES.validate(token(None, "RS256", RSA, kid="r", crit=["exp2"], exp2=1), KEYS, NOW_MS)

    @pytest.mark.parametrize("crit", [5, None, True, [[]], [], {"b64": 1}, ["b64"]])
    def test_an_extension_of_any_type(self, crit: object) -> None:
        with pytest.raises(TokenError, match="must be understood"):
            RULES.validate(token(None, "RS256", RSA, kid="r", crit=crit, b64=True), KEYS, NOW_MS)

    @pytest.mark.parametrize("head", [b'"alg"', b'["alg"]', b"5", b"null", b"[" * 300, b""])
    def test_a_header_that_is_no_object(self, head: bytes) -> None:
        with pytest.raises(TokenError):
            RULES.validate(f"{b64(head)}.{b64(b'{}')}.{b64(b'x' * 256)}", KEYS, NOW_MS)

    def test_a_payload_that_is_too_deep(self) -> None:
        signed = f"{b64(json.dumps({'alg': 'RS256', 'kid': 'r'}).encode())}.{b64(b'[' * 50_000)}"
        with pytest.raises(TokenError, match="payload is wrong"):
            RULES.validate(f"{signed}.{b64(sign(signed.encode(), 'RS256', RSA))}", KEYS, NOW_MS)

    @given(st.data())
    def test_no_change_of_a_byte_is_accepted(self, data: st.DataObject) -> None:
        text = token()
        place = data.draw(st.integers(0, len(text) - 1))
        other = data.draw(st.sampled_from("ABCxyz019-_.=\n\x01é"))
        if text[place] == other or place in {text.find(".", 0) - 1, text.rfind(".") - 1, len(text) - 1}:
            return  # the last character of a part has bits that do not count
        with pytest.raises(TokenError):
            RULES.validate(text[:place] + other + text[place + 1 :], KEYS, NOW_MS)

    @given(st.text())
    def test_any_text_is_refused(self, text: str) -> None:
        with pytest.raises(TokenError):
            RULES.validate(text, KEYS, NOW_MS)


class TestKeySets:
    def test_a_token_without_a_key_id_needs_a_set_with_one_fitting_key(self) -> None:
        plain = token(None, "RS256", RSA, typ="JWT")
        assert RULES.validate(plain, KEYS, NOW_MS).subject == "alice"
        with pytest.raises(TokenError, match="2 keys fit"):
            RULES.validate(plain, keys(jwk(RSA), jwk(OTHER_RSA)), NOW_MS)

    def test_keys_that_cannot_be_used_are_skipped(self) -> None:
        small = rsa.generate_private_key(65537, 1024)
        unusable = [
            {"kty": "oct", "k": b64(b"secret"), "kid": "s"},
            jwk(RSA, kid="enc", use="enc"),
            jwk(small, kid="small"),
            {"kty": "RSA", "kid": "half"},
            {"kty": 5},
            "text",
        ]
        key_set = keys(*unusable, jwk(RSA, kid="r"))
        assert len(key_set.skipped) == len(unusable)
        assert RULES.validate(token(), key_set, NOW_MS).subject == "alice"
        with pytest.raises(TokenError, match="no usable key; key 's'"):
            keys(*unusable)

    def test_a_private_key_of_the_set_is_not_kept(self) -> None:
        private = {**jwk(RSA, kid="r"), "d": number(RSA.private_numbers().d)}
        key = keys(private).key("r", "RS256")
        assert not key.is_private

    @pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"keys":{}}', b'{"keys":[]}', b"\xff"])
    def test_a_document_that_is_no_key_set(self, document: bytes) -> None:
        with pytest.raises(TokenError, match="key set"):
            JwkKeys(document)

    def test_a_key_that_the_library_does_not_support_is_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def import_key(fields: object) -> object:
            raise UnsupportedAlgorithm("the curve is not supported")

        monkeypatch.setattr(ECKey, "import_key", import_key)
        key_set = keys({"kty": "EC", "crv": "secp256k1", "x": "AA", "y": "AA"}, jwk(RSA, kid="r"))
        assert key_set.skipped == ["key None: the curve is not supported"]
        assert RULES.validate(token(), key_set, NOW_MS).subject == "alice"


class TestMessages:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"n,,\x01auth=Bearer abc.def-_~+/==\x01\x01", BearerMessage("abc.def-_~+/==", "", {})),
            (b"n,a=al=2Cice=3D,\x01auth=bearer  t\x01\x01", BearerMessage("t", "al,ice=", {})),
            (b"n,,\x01auth=Bearer t\x01traceId=12 3\x01\x01", BearerMessage("t", "", {"traceId": "12 3"})),
        ],
    )
    def test_messages(self, data: bytes, message: BearerMessage) -> None:
        assert parse_message(data) == message

    def test_repr_shows_no_token(self) -> None:
        assert "abc" not in repr(BearerMessage("abc", "alice", {}))

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x01",
            b"n,,\x01auth=Bearer t\x01",
            b"n,,\x01\x01",
            b"y,,\x01auth=Bearer t\x01\x01",
            b"p=x,,\x01auth=Bearer t\x01\x01",
            b"n,a=x=41,\x01auth=Bearer t\x01\x01",
            b"n,,\x01auth=Basic t\x01\x01",
            b"n,,\x01auth=Bearer\x01\x01",
            b"n,,\x01auth=Bearer t t\x01\x01",
            b"n,,\x01auth=Bearer t\x01auth=Bearer u\x01\x01",
            b"n,,\x01auth=Bearer t\x01x1=2\x01\x01",
            b"n,,\x01auth=Bearer t\x01x=\x01\x01",
            b"n,,\x01auth=Bearer \xff\x01\x01",
            b"n,,\x01auth=Bearer t\x01\x01more",
        ],
    )
    def test_a_message_that_is_not_of_the_mechanism(self, data: bytes) -> None:
        with pytest.raises(TokenError):
            parse_message(data)

    @given(st.binary(max_size=80))
    def test_any_bytes(self, data: bytes) -> None:
        with suppress(TokenError):
            assert parse_message(data).token


class TestExchange:
    def exchange(self) -> BearerExchange:
        self.unknown: list[str] = []
        return BearerExchange(BearerSettings(RULES, lambda: KEYS, self.unknown.append), NOW_MS)

    def test_a_good_token(self) -> None:
        exchange = self.exchange()
        assert exchange.respond(b"n,a=alice,\x01auth=Bearer %s\x01\x01" % token().encode()) == b""
        assert (exchange.is_complete, exchange.user, exchange.credential_end_ms) == (True, "alice", NOW_MS + 600_000)
        assert self.unknown == []

    def test_a_refused_token_is_answered_before_the_failure(self) -> None:
        exchange = self.exchange()
        bad = b"n,,\x01auth=Bearer %s\x01\x01" % token(kid="new").encode()
        assert exchange.respond(bad) == b'{"status":"invalid_token"}'
        assert self.unknown == ["new"]
        with pytest.raises(Rejection, match="no key has the id 'new'") as raised:
            exchange.respond(b"\x01")
        assert raised.value.client_text == '{"status":"invalid_token"}'
        assert not exchange.is_complete

    def test_an_acknowledgement_without_a_refusal_is_no_message(self) -> None:
        with pytest.raises(Rejection) as raised:
            self.exchange().respond(b"\x01")
        assert raised.value.client_text is None

    def test_another_authorization_id(self) -> None:
        with pytest.raises(Rejection) as raised:
            self.exchange().respond(b"n,a=bob,\x01auth=Bearer %s\x01\x01" % token().encode())
        assert raised.value.client_text == (
            "Authentication failed: Client requested an authorization id (bob) that is different from the token's "
            "principal name (alice)"
        )
