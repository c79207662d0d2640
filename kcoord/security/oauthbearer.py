# SPDX-License-Identifier: Apache-2.0
"""OAUTHBEARER (RFC 7628, KIP-768): the server's side of the exchange, and the validation of signed tokens. Pure.

A client sends a JSON Web Token that an identity provider has signed. The broker knows the provider's public keys
(`JwkKeys`), and accepts a token if all of these hold:

* The header names one of `ALGORITHMS`. These have a public key only. So neither `none` nor an HMAC, whose secret would
  be the published key, is accepted, whatever the keys are.
* The key that the header names by its id has made the signature. A token without a key id is accepted if only one
  key fits its algorithm.
* `exp` and `iat` are there; `exp` lies after now, and `nbf` (if it is there) before now, give or take the clock skew.
* `iss` and `aud` are the expected ones, unless the configuration expects none.
* The claim of the subject is a text, and each scope is a text that is not empty and not there twice.

The time and the keys are arguments. `kcoord.server.jwks` gets the keys from where the configuration says.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from cryptography.exceptions import UnsupportedAlgorithm
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, RSAKey

from kcoord.security.rejection import Rejection

PublicKey: TypeAlias = RSAKey | ECKey

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
INVALID_TOKEN: Final = '{"status":"invalid_token"}'
"""The answer to a token that is not accepted, and the text of the failure."""
ACKNOWLEDGEMENT: Final = b"\x01"

_KEY_CLASSES: Final[Mapping[str, type[RSAKey] | type[ECKey]]] = {"RSA": RSAKey, "EC": ECKey}
_KEY_TYPES: Final = {"RS": "RSA", "PS": "RSA", "ES": "EC"}
_PUBLIC_FIELDS: Final = frozenset(("kty", "use", "key_ops", "alg", "kid", "n", "e", "crv", "x", "y"))
_FEWEST_RSA_BITS: Final = 2048
_HEADER: Final = re.compile(r"n,(?:a=(?P<authzid>(?:[^,=]|=2C|=3D)*))?,", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z]+")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""JSON can have these halves of a character alone, but no response and no log could."""
_SPACES: Final = "".join(map(chr, range(0x21)))
"""The characters that Kafka trims. To trim others would give two subjects the same principal."""
_VALUE: Final = re.compile(r"[\x21-\x7E \t\r\n]+")
_BEARER: Final = re.compile(r"(?P<scheme>[!-~]+) +(?P<token>[-_~+/.a-zA-Z0-9]+=*)")


class TokenError(ValueError):
    """A token, or the message with it, that is not accepted. The text is for the log of the broker."""


class UnknownKeyIdError(TokenError):
    """The token names a key id that the broker does not know; the provider may have a new key since the last look."""

    def __init__(self, key_id: str) -> None:
        super().__init__(f"no key has the id {key_id!r}")
        self.key_id = key_id


@dataclass(frozen=True, slots=True)
class BearerMessage:
    """The client's first message: the token, and the name that the client wants to act as; empty for its own."""

    token: str = field(repr=False)
    authorization_id: str
    extensions: Mapping[str, str]


def parse_message(data: bytes) -> BearerMessage:
    """Parses the client's first message (RFC 7628, section 3.1)."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise TokenError("the first message is not UTF-8") from None
    header, separator, rest = text.partition("\x01")
    match = _HEADER.fullmatch(header)
    if match is None or not separator or not rest.endswith("\x01\x01"):
        raise TokenError("the first message is not that of OAUTHBEARER")
    fields: dict[str, str] = {}
    for pair in rest[:-2].split("\x01"):
        name, equals, value = pair.partition("=")
        if not equals or name in fields or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise TokenError("the first message has a malformed or repeated field")
        fields[name] = value
    bearer = _BEARER.fullmatch(fields.pop("auth", ""))
    if bearer is None or bearer["scheme"].lower() != "bearer":
        raise TokenError("the field auth is not of the form 'Bearer TOKEN'")
    authorization_id = (match["authzid"] or "").replace("=2C", ",").replace("=3D", "=")
    return BearerMessage(bearer["token"], authorization_id, fields)


class JwkKeys:
    """The usable public keys of a JSON Web Key Set. `skipped` says why the other keys cannot be used."""

    def __init__(self, document: bytes) -> None:
        """Raises TokenError if the document is no key set, or has no usable key."""
        try:
            parsed = json.loads(document)
        except (ValueError, RecursionError):
            raise TokenError("the key set is not JSON") from None
        entries = parsed.get("keys") if isinstance(parsed, dict) else None
        if not isinstance(entries, list):
            raise TokenError("the key set has no list 'keys'")
        self.skipped: list[str] = []
        self._keys: list[tuple[str | None, str, str | None, PublicKey]] = []
        for entry in entries:
            try:
                self._add(entry)
            except (JoseError, ValueError, TypeError, KeyError, UnsupportedAlgorithm) as error:
                key_id = entry.get("kid") if isinstance(entry, dict) else None
                self.skipped.append(f"key {key_id!r}: {error}")
        if not self._keys:
            raise TokenError("the key set has no usable key" + "".join(f"; {text}" for text in self.skipped))

    def _add(self, entry: object) -> None:
        if not isinstance(entry, dict):
            raise TokenError("it is not an object")
        key_type = entry.get("kty")
        key_class = _KEY_CLASSES.get(key_type) if isinstance(key_type, str) else None
        if key_class is None:
            raise TokenError(f"its type {key_type!r} is not RSA or EC")
        if entry.get("use", "sig") != "sig":
            raise TokenError("it is not for signatures")
        key_id, algorithm = entry.get("kid"), entry.get("alg")
        if not isinstance(key_id, str | None) or not isinstance(algorithm, str | None):
            raise TokenError("its id or algorithm is not a text")
        if key_class is RSAKey and len(urlsafe_b64decode(f"{entry['n']}==").lstrip(b"\0")) * 8 < _FEWEST_RSA_BITS:
            raise TokenError(f"it has fewer than {_FEWEST_RSA_BITS} bits")
        key = key_class.import_key({name: value for name, value in entry.items() if name in _PUBLIC_FIELDS})
        self._keys.append((key_id, str(key_type), algorithm, key))

    def key(self, key_id: str | None, algorithm: str) -> PublicKey:
        """Returns the key for a token. Raises UnknownKeyIdError if there is none with that id."""
        with_id = [entry for entry in self._keys if key_id is None or entry[0] == key_id]
        if not with_id and key_id is not None:
            raise UnknownKeyIdError(key_id)
        key_type = _KEY_TYPES[algorithm[:2]]
        fitting = [entry[3] for entry in with_id if entry[1] == key_type and entry[2] in (None, algorithm)]
        if len(fitting) != 1:
            raise TokenError(f"{len(fitting)} keys fit {algorithm} and the key id {key_id!r}")
        return fitting[0]


@dataclass(frozen=True, slots=True)
class ValidatedToken:
    """What the broker believes after the validation. `expires_ms` is in milliseconds since 1970."""

    subject: str
    scopes: frozenset[str]
    expires_ms: int


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The sasl.oauthbearer.* settings of a listener that tokens must satisfy. No audience or issuer: any."""

    audiences: Sequence[str] = ()
    issuer: str | None = None
    clock_skew_seconds: int = 30
    scope_claim: str = "scope"
    subject_claim: str = "sub"

    def validate(self, token: str, keys: JwkKeys, now_ms: int) -> ValidatedToken:
        """Returns the claims that count. Raises TokenError if the token is not accepted."""
        claims = _verified_claims(token, keys)
        skew_ms = self.clock_skew_seconds * 1000
        expires_ms = _time_ms(claims, "exp")
        _time_ms(claims, "iat")
        if expires_ms + skew_ms <= now_ms:
            raise TokenError("the token has expired")
        if "nbf" in claims and _time_ms(claims, "nbf") - skew_ms > now_ms:
            raise TokenError("the token is not valid yet")
        if self.issuer is not None and claims.get("iss") != self.issuer:
            raise TokenError("the issuer is not the expected one")
        if self.audiences and not set(_texts(claims, "aud")) & set(self.audiences):
            raise TokenError("the audience is not an expected one")
        subject = claims.get(self.subject_claim)
        if not isinstance(subject, str) or not subject.strip(_SPACES) or _SURROGATE.search(subject):
            raise TokenError(f"the claim {self.subject_claim} is not a text")
        scopes = [scope.strip(_SPACES) for scope in _texts(claims, self.scope_claim)]
        if "" in scopes or len(set(scopes)) < len(scopes):
            raise TokenError(f"the claim {self.scope_claim} has an empty or a repeated scope")
        return ValidatedToken(subject.strip(_SPACES), frozenset(scopes), expires_ms)


def _verified_claims(token: str, keys: JwkKeys) -> dict[str, object]:
    """Returns the claims of a token whose signature is right."""
    try:
        header: object = jws.extract_compact(token.encode()).headers()
    except (JoseError, ValueError) as error:
        raise TokenError(f"the token is malformed: {error}") from None
    # The library does not check the types of these, and fails with other errors later.
    if not isinstance(header, dict) or "crit" in header:
        raise TokenError("the header is not an object, or has extensions that must be understood")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in ALGORITHMS:
        raise TokenError(f"the algorithm {algorithm!r} is not accepted")
    if not isinstance(key_id, str | None):
        raise TokenError("the key id is not a text")
    try:
        signed = jws.deserialize_compact(token, keys.key(key_id, algorithm), [algorithm])
        claims = json.loads(signed.payload)
    except (JoseError, ValueError, RecursionError) as error:
        if isinstance(error, TokenError):
            raise
        raise TokenError(f"the signature or the payload is wrong: {error}") from None
    if not isinstance(claims, dict):
        raise TokenError("the payload is not an object")
    return claims


def _time_ms(claims: Mapping[str, object], claim: str) -> int:
    seconds = claims.get(claim)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1 << 43:
        raise TokenError(f"the claim {claim} is not a time in seconds")
    return int(seconds * 1000)


def _texts(claims: Mapping[str, object], claim: str) -> list[str]:
    """Returns the entries of a claim that is a text or a list of texts; none if the claim is not there."""
    value = claims.get(claim, [])
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise TokenError(f"the claim {claim} is not a text or a list of texts")
    return entries


@dataclass(frozen=True, slots=True)
class BearerSettings:
    """What a listener accepts: the rules, the present keys, and a function that gets unknown key ids."""

    rules: TokenRules
    keys: Callable[[], JwkKeys]
    on_unknown_key: Callable[[str], None]

    def new_exchange(self, now_ms: int) -> BearerExchange:
        """Returns an exchange that judges a token by the time `now_ms`."""
        return BearerExchange(self, now_ms)


class BearerExchange:
    """One exchange at `now_ms`. A token that is not accepted is answered; the client's acknowledgement ends it."""

    def __init__(self, settings: BearerSettings, now_ms: int) -> None:
        self._settings = settings
        self._now_ms = now_ms
        self._refusal: str | None = None
        self.user = ""
        self.is_complete = False
        self.credential_end_ms: int | None = None

    def respond(self, message: bytes) -> bytes:
        """Returns the answer, empty for an accepted token; raises Rejection."""
        if self._refusal is not None and message == ACKNOWLEDGEMENT:
            raise Rejection(self._refusal, INVALID_TOKEN)
        try:
            bearer = parse_message(message)
        except TokenError as error:
            raise Rejection(str(error)) from None
        settings = self._settings
        try:
            token = settings.rules.validate(bearer.token, settings.keys(), self._now_ms)
        except TokenError as error:
            if isinstance(error, UnknownKeyIdError):
                settings.on_unknown_key(error.key_id)
            self._refusal = str(error)
            return INVALID_TOKEN.encode()
        if bearer.authorization_id not in ("", token.subject):
            raise Rejection(
                "the authorization id is not the subject of the token",
                f"Authentication failed: Client requested an authorization id ({bearer.authorization_id}) that is "
                f"different from the token's principal name ({token.subject})",
            )
        self.user, self.credential_end_ms, self.is_complete = token.subject, token.expires_ms, True
        return b""
