# SPDX-License-Identifier: Apache-2.0
"""The targets of the coverage-guided fuzzer for logins: frames of SASL, tokens of OAUTHBEARER, and JAAS lines.

Each target has an oracle that does not use the code under test. It knows which inputs may log in: those that have the
right secret. Keys and nonces are constants, so an input means the same in every run.
"""

from __future__ import annotations

import base64
import hmac
import json
import re
from functools import cache
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from kcoord.client.scram import ScramExchange
from kcoord.config.security import SASL_MECHANISMS
from kcoord.metadata.image import ScramCredential
from kcoord.security.jaas import JaasError, parse_login_module
from kcoord.security.oauthbearer import BearerSettings, JwkKeys, TokenError, TokenRules
from kcoord.security.plain import PlainUsers
from kcoord.security.sasl import SaslAuthenticator, SaslSettings
from kcoord.security.scram import Decoys
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import SaslAuthenticateRequest, SaslHandshakeRequest

NOW: Final = 1_800_000_000
SKEW: Final = 30
AUDIENCE, ISSUER = "kafka", "https://issuer.example"
PASSWORD: Final = "7f3a-apple-pie"
NONCE: Final = "server-nonce"
SALT: Final = b"grain-of-salt"
LONGEST_TEXT: Final = 600
"""The limit of a log line, whatever the client sends."""
_KEY: Final = ec.derive_private_key(0x5EC2E7, ec.SECP256R1())
_SCRAM: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_JAAS_ERRORS: Final = re.compile(
    r"there is no login module|the class of the login module must be followed by one of [a-z, ]+|"
    r"it must end with a semicolon|a '=' has no name of an option before it|there is no '=' after option \d+|"
    r"option \d+ has no value|option \d+ occurs twice|there must be one login module only, and nothing after its "
    r"semicolon|a slash begins a comment \(character \d+\); put a value with a slash in quotes|"
    r"the quote of character \d+ has no end"
)


# --- tokens -----------------------------------------------------------------------------------------------------------


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@cache
def _keys() -> JwkKeys:
    point = _KEY.public_key().public_numbers()
    x, y = (b64(part.to_bytes(32, "big")) for part in (point.x, point.y))
    return JwkKeys(json.dumps({"keys": [{"kty": "EC", "crv": "P-256", "x": x, "y": y, "kid": "e"}]}).encode())


def signed(header: bytes, claims: bytes) -> str:
    """Returns a token of the provider, whatever its parts are."""
    data = f"{b64(header)}.{b64(claims)}"
    r, s = decode_dss_signature(_KEY.sign(data.encode(), ec.ECDSA(hashes.SHA256())))
    return f"{data}.{b64(r.to_bytes(32, 'big') + s.to_bytes(32, 'big'))}"


def confused(header: bytes, claims: bytes) -> str:
    """Returns a token whose HMAC has the public key as its secret."""
    data = f"{b64(header)}.{b64(claims)}"
    public = _KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return f"{data}.{b64(hmac.digest(public, data.encode(), 'sha256'))}"


def unsigned(header: bytes, claims: bytes) -> str:
    return f"{b64(header)}.{b64(claims)}."


_MAKERS: Final = (signed, confused, unsigned)


def is_genuine(token: str) -> bool:
    """Returns whether a token has the provider's signature, and claims that a broker accepts."""
    try:
        data, _, signature = token.rpartition(".")
        header, claims = (json.loads(_unb64(part)) for part in data.split("."))
        raw = _unb64(signature)
        r, s = int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big")
        _KEY.public_key().verify(encode_dss_signature(r, s), data.encode(), ec.ECDSA(hashes.SHA256()))
    except (ValueError, InvalidSignature, RecursionError):
        return False
    audience = claims.get("aud")
    return (
        header.get("alg") == "ES256"
        and header.get("kid") in (None, "e")
        and claims.get("exp") > NOW - SKEW
        and "iat" in claims
        and claims.get("nbf", 0) <= NOW + SKEW
        and claims.get("iss") == ISSUER
        and AUDIENCE in ([audience] if isinstance(audience, str) else audience)
        and bool(claims.get("sub").strip())
    )


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


_RULES: Final = TokenRules([AUDIENCE], ISSUER, SKEW)


def tokens(data: bytes) -> None:
    """Validates a token: the text itself, or one made of a header and claims by a signer that the first byte names."""
    kind, rest = data[:1], data[1:]
    if kind in (b"0", b"1", b"2"):
        header, _, claims = rest.partition(b"\n")
        token = _MAKERS[int(kind)](header, claims)
    else:
        token = data.decode("latin-1")
    try:
        _RULES.validate(token, _keys(), NOW * 1000)
    except TokenError as error:
        assert len(str(error)) < LONGEST_TEXT, "a client fills the log"
        return
    assert is_genuine(token)


def token_seeds() -> list[bytes]:
    claims = {"sub": "alice", "iat": NOW - 10, "exp": NOW + 600, "iss": ISSUER, "aud": AUDIENCE}
    headers: list[dict[str, object]] = [
        {"alg": "ES256", "kid": "e"},
        {"alg": "ES256"},
        {"alg": "none"},
        {"alg": "HS256", "kid": "e"},
        {"alg": "RS256", "kid": "e"},
        {"alg": "ES256", "kid": "other"},
        {"alg": "ES256", "kid": "e", "crit": ["b64"], "b64": False},
        {"alg": "ES256", "jwk": {"kty": "oct", "k": "AAAA"}},
        {"alg": "ES256", "jku": "https://evil.example", "x5u": "https://evil.example", "x5c": ["AAAA"]},
        {"alg": "x" * 700},
        {"alg": "ES256", "kid": "k" * 700},
        {"alg": "dir", "enc": "A128GCM", "zip": "DEF"},
    ]
    changes: list[dict[str, object]] = [
        {},
        {"exp": NOW - 3600},
        {"exp": 10**400},
        {"exp": 1e308},
        {"nbf": NOW + 3600},
        {"aud": ["x", AUDIENCE]},
        {"aud": "other"},
        {"iss": "https://evil.example"},
        {"sub": ["alice"]},
        {"scope": "a b"},
    ]
    good = json.dumps(headers[0]).encode()
    made = [b"0" + json.dumps(header).encode() + b"\n" + json.dumps(claims).encode() for header in headers]
    made += [b"0" + good + b"\n" + json.dumps({**claims, **change}).encode() for change in changes]
    made += [bytes([kind]) + seed[1:] for kind in b"12" for seed in made[:5]]
    # The first of two equal claims does not count, and no nesting is too deep.
    made.append(b"0" + good + b'\n{"sub": "root", ' + json.dumps(claims)[1:].encode())
    made.append(b"0" + good + b"\n" + b"[" * 900)
    made.append(signed(good, json.dumps(claims).encode()).encode())
    made.append(signed(good, signed(good, json.dumps(claims).encode()).encode()).encode())
    return made


# --- frames -----------------------------------------------------------------------------------------------------------


@cache
def _credentials() -> dict[tuple[str, str], ScramCredential]:
    import hashlib

    credentials = {}
    for mechanism, name in _SCRAM.items():
        salted = hashlib.pbkdf2_hmac(name, PASSWORD.encode(), SALT, 4096)
        stored = hashlib.new(name, hmac.digest(salted, b"Client Key", name)).digest()
        credentials[mechanism, "alice"] = ScramCredential(SALT, stored, hmac.digest(salted, b"Server Key", name), 4096)
    return credentials


@cache
def _scram_messages(mechanism: str) -> tuple[bytes, bytes]:
    """Returns the two messages of the only client that has the password."""
    exchange = ScramExchange(mechanism, "alice", PASSWORD, "nonce")
    first = exchange.first()
    salt = base64.b64encode(SALT).decode()
    return first, exchange.final(f"r=nonce{NONCE},s={salt},i=4096".encode())


@cache
def _settings() -> SaslSettings:
    return SaslSettings(
        SASL_MECHANISMS,
        PlainUsers({"alice": PASSWORD}),
        lambda mechanism, user: _credentials().get((mechanism, user)),
        {"PLAIN": 2000},
        1000,
        100,
        lambda: NONCE,
        Decoys(b"key", {}),
        BearerSettings(_RULES, _keys, lambda _: None),
    )


_VERSIONS: Final = encode_request(ApiKey.API_VERSIONS, 0, 1, "c", b"")[4:]
_BEARER: Final = re.compile(rb"auth=bearer +([-_~+/.a-zA-Z0-9]+=*)", re.IGNORECASE)
_PROOF: Final = re.compile(rb"p=([A-Za-z0-9/+=]+)")


def sasl(data: bytes) -> None:
    """Feeds frames to an authentication: each has its length and the seconds before it, in two bytes and one byte."""
    login = SaslAuthenticator(_settings)
    now_ms, received, position = NOW * 1000, b"", 0
    while position + 3 <= len(data):
        size, now_ms = int.from_bytes(data[position : position + 2], "big"), now_ms + data[position + 2] * 100
        frame = data[position + 3 : position + 3 + size]
        position += 3 + size
        was_complete = login.is_complete
        step = login.receive(frame, now_ms)
        if step is None:
            assert was_complete or frame[:2] == _VERSIONS[:2], "only ApiVersions is served before a login"
            if not was_complete:
                login.versions_answered()
            continue
        received += frame
        for text in (step.output, (step.failure or "").encode("utf-8", "surrogatepass")):
            assert PASSWORD.encode() not in text and SALT not in text
        assert len(step.failure or "") < LONGEST_TEXT
        assert len(step.output) < 4000
        if login.is_complete and not was_complete:
            assert login.principal == "User:alice" and _has_secret(received)
        assert step.failure is None or not login.is_complete


def _has_secret(received: bytes) -> bool:
    """Returns whether the client has sent what only those can send who have the password or a token."""
    if b"\0alice\0" + PASSWORD.encode() in received:
        return True
    for first, final in map(_scram_messages, _SCRAM):
        # The last characters of base64 have bits without a meaning, so the proof is compared as bytes.
        unproven, _, proof = final.rpartition(b"p=")
        proofs = (_PROOF.findall(received[match.end() :]) for match in re.finditer(re.escape(unproven), received))
        if first in received and any(base64.b64decode(proof) in map(_decoded, group) for group in proofs):
            return True
    return any(is_genuine(token.decode()) for token in _BEARER.findall(received))


def _decoded(proof: bytes) -> bytes:
    try:
        return base64.b64decode(proof, validate=True)
    except ValueError:
        return b""


def _frames(*frames: bytes, delay: int = 0) -> bytes:
    return b"".join(len(frame).to_bytes(2, "big") + bytes([delay]) + frame for frame in frames)


def sasl_seeds() -> list[bytes]:
    def shake(mechanism: str, version: int = 1) -> bytes:
        body = SaslHandshakeRequest(mechanism=mechanism).encode(version)
        return encode_request(ApiKey.SASL_HANDSHAKE, version, 7, "c", body)[4:]

    def asked(message: bytes, version: int = 2) -> bytes:
        body = SaslAuthenticateRequest(auth_bytes=message).encode(version)
        return encode_request(ApiKey.SASL_AUTHENTICATE, version, 8, "c", body)[4:]

    claims = {"sub": "alice", "iat": NOW - 10, "exp": NOW + 600, "iss": ISSUER, "aud": AUDIENCE}
    token = signed(b'{"alg": "ES256"}', json.dumps(claims).encode())
    bearer = f"n,,\x01auth=Bearer {token}\x01traceId=7\x01\x01".encode()
    plain = f"\0alice\0{PASSWORD}".encode()
    logins: dict[str, list[bytes]] = {"PLAIN": [plain], "OAUTHBEARER": [bearer]}
    logins |= {mechanism: list(_scram_messages(mechanism)) for mechanism in _SCRAM}
    seeds = [_frames(_VERSIONS, shake(name), *map(asked, messages)) for name, messages in logins.items()]
    seeds += [_frames(shake(name, 0), *messages) for name, messages in logins.items()]
    seeds += [_frames(shake("PLAIN"), asked(plain[:-1])), _frames(shake("OTHER"))]
    seeds += [_frames(shake("OAUTHBEARER"), asked(bearer.replace(b"auth=Bearer ", b"auth=Bearer x")), asked(b"\x01"))]
    # Re-authentications: in time, with another mechanism, another user, and too late.
    renewed = _frames(shake("PLAIN"), asked(plain))
    seeds += [renewed + _frames(shake("PLAIN"), asked(plain), delay=15)]
    seeds += [renewed + _frames(shake("OAUTHBEARER"), asked(bearer), delay=15)]
    seeds += [renewed + _frames(shake("PLAIN"), asked(plain.replace(b"alice", b"bobby")), delay=15)]
    seeds += [renewed + _frames(_VERSIONS, delay=25)]
    return seeds


# --- JAAS lines -------------------------------------------------------------------------------------------------------


def jaas(data: bytes) -> None:
    """Parses a line of sasl.jaas.config. No error shows a part of the line."""
    try:
        module = parse_login_module(data.decode("utf-8", "surrogateescape"))
    except JaasError as error:
        assert _JAAS_ERRORS.fullmatch(str(error))
        return
    assert repr(module) == f"LoginModule({module.class_name!r})"


def jaas_seeds() -> list[bytes]:
    line = b'x.PlainLoginModule required username="alice" password="a \\"pie\\" \\101";'
    return [line, line.replace(b'"', b"'"), line[:-1], b"/* a */ " + line + b" // b", line + line, b"x sufficient a=b;"]
