# SPDX-License-Identifier: Apache-2.0
"""The server's side of SCRAM (RFC 5802, RFC 7677), with the rules and limits of Kafka's ScramSaslServer. Pure.

An exchange has two messages of the client. The first names the user and a nonce; the server extends the nonce and sends
the salt and the number of iterations. The second proves that the client knows the password; the server proves in its
answer that it has the user's credential.

A client cannot find out which users exist. A user without a credential gets a salt and a number of iterations that are
derived from the name, and so are always the same (`Decoys`). The exchange fails at the second message, after the same
computations as for a wrong password.

With the extension `tokenauth=true` the name is the id of a delegation token (KIP-48), and the client logs in as the
owner of that token. Ids are random, so the exchange with an unknown one fails at the first message, as in Kafka.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from kcoord.metadata.image import ScramCredential
from kcoord.security.rejection import OTHER_AUTHORIZATION_ID, Rejection
from kcoord.security.scram_messages import HASHES, MIN_ITERATIONS, decode_base64, exclusive_or, keyed_hash
from kcoord_protocol.scram_mechanisms import salt_of

CredentialLookup: TypeAlias = Callable[[str, str], ScramCredential | None]
"""Returns the credential of (mechanism, user), None if there is none."""


@dataclass(slots=True, frozen=True)
class TokenLogin:
    """What a delegation token logs in with: the name of its owner, a credential, and the time of its end."""

    user: str
    credential: ScramCredential
    end_ms: int


TokenLookup: TypeAlias = Callable[[str, str], TokenLogin | None]
"""Returns the login of (mechanism, token id), None if there is no valid token with this id."""

_SASL_NAME: Final = r"(?:[^\x00=,]|=2C|=3D)+"
_EXTENSIONS: Final = r"(?:,[A-Za-z]+=[^\x00,]+)*"
_TOKEN_EXTENSION: Final = "tokenauth"
_CLIENT_FIRST: Final = re.compile(
    rf"(?P<header>n,(?:a=(?P<authzid>{_SASL_NAME}))?,)"
    rf"(?P<bare>n=(?P<name>{_SASL_NAME}),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+)(?P<extensions>{_EXTENSIONS}))",
    re.DOTALL,
)
_CLIENT_FINAL: Final = re.compile(
    rf"(?P<unproven>c=(?P<binding>[A-Za-z0-9/+=]*),r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+){_EXTENSIONS}),"
    r"p=(?P<proof>[A-Za-z0-9/+=]+)",
    re.DOTALL,
)


@dataclass(slots=True, frozen=True)
class Decoys:
    """The salts and iterations of users without a credential.

    A salt looks like those of Kafka's tools. A number of iterations is as frequent among users without a credential as
    among those with one. If a credential changes, the numbers of few other users do.

    `key` is a secret that all brokers of the cluster share. `counts` has the number of credentials for each number of
    iterations, by mechanism.
    """

    key: bytes
    counts: Mapping[str, Mapping[int, int]]

    @classmethod
    def of(cls, key: bytes, credentials: Mapping[tuple[str, str], ScramCredential]) -> Self:
        """Returns the decoys for a cluster with these credentials, by mechanism and user."""
        counts: dict[str, Counter[int]] = {}
        for (mechanism, _), credential in credentials.items():
            counts.setdefault(mechanism, Counter())[credential.iterations] += 1
        return cls(key, counts)

    def credential(self, mechanism: str, user: str) -> ScramCredential:
        """Returns a credential whose password nobody knows."""
        seed = keyed_hash(mechanism, self.key, f"{mechanism},{user}".encode())
        stored_key = keyed_hash(mechanism, seed, b"Stored Key")
        server_key = keyed_hash(mechanism, seed, b"Server Key")
        return ScramCredential(salt_of(seed), stored_key, server_key, self._iterations(mechanism, seed))

    def _iterations(self, mechanism: str, seed: bytes) -> int:
        """Chooses by weighted rendezvous hashing: each number draws a lot, and frequent numbers draw better ones."""

        def lot(iterations: int) -> float:
            drawn = int.from_bytes(keyed_hash(mechanism, seed, b"Iterations %d" % iterations)[:8], "big")
            return math.log((drawn + 1) / (2**64 + 1)) / counts[iterations]

        counts = {
            iterations: count
            for iterations, count in self.counts.get(mechanism, {}).items()
            if iterations >= MIN_ITERATIONS
        }
        return max(counts, key=lot, default=MIN_ITERATIONS)


class ScramServerExchange:
    """One exchange: call `respond` with the client's first message, then with its second one.

    `nonce` is the server's part of the nonce, a new random text for each exchange. `tokens` finds delegation tokens; it
    is None if the broker has none.
    """

    def __init__(
        self,
        mechanism: str,
        lookup: CredentialLookup,
        nonce: str,
        decoys: Decoys,
        tokens: TokenLookup | None = None,
    ) -> None:
        self.user = ""
        self._mechanism = mechanism
        self._lookup = lookup
        self._nonce = nonce
        self._decoys = decoys
        self._tokens = tokens
        self._has_begun = False
        self.is_token_login = False
        """True if the client logs in with a delegation token."""
        self.is_complete = False
        self.credential_end_ms: int | None = None

    def respond(self, message: bytes) -> bytes:
        """Returns the answer to a message; raises Rejection or ScramError."""
        if not self._has_begun:
            self._has_begun = True
            return self._first(message)
        answer = self._final(message)
        self.is_complete = True
        return answer

    def _first(self, message: bytes) -> bytes:
        match = _client_first(message)
        name = _user(match["name"])
        self.is_token_login = _is_token_login(match["extensions"])
        credential = self._token_credential(name) if self.is_token_login else self._lookup(self._mechanism, name)
        if match["authzid"] is not None and _user(match["authzid"]) != name:
            raise Rejection("the client asks for another authorization id", OTHER_AUTHORIZATION_ID)
        if not self.is_token_login:
            self.user = name
        decoy = self._decoys.credential(self._mechanism, name)
        self._is_decoy = credential is None or not _is_usable(credential, decoy)
        self._credential = decoy if credential is None or self._is_decoy else credential
        self._header, self._client_first = match["header"], match["bare"]
        self._full_nonce = match["nonce"] + self._nonce
        salt = base64.b64encode(self._credential.salt).decode()
        self._server_first = f"r={self._full_nonce},s={salt},i={self._credential.iterations}"
        return self._server_first.encode()

    def _token_credential(self, token_id: str) -> ScramCredential:
        """Makes the owner of the token the user. Raises Rejection if there is no valid token with this id."""
        login = None if self._tokens is None else self._tokens(self._mechanism, token_id)
        if login is None:
            raise Rejection("there is no valid delegation token with this id")
        self.user, self.credential_end_ms = login.user, login.end_ms
        return login.credential

    def _final(self, message: bytes) -> bytes:
        """Returns the server's last message, if the client proves that it knows the password."""
        match = _CLIENT_FINAL.fullmatch(_text(message))
        if match is None:
            raise Rejection("the second message is not a client-final-message")
        if match["nonce"] != self._full_nonce:
            raise Rejection("the nonce is not that of the first message")
        if decode_base64(match["binding"]) != self._header.encode():
            raise Rejection("the channel binding is not that of the first message")
        credential = self._credential
        proof = decode_base64(match["proof"])
        if len(proof) != len(credential.stored_key):
            raise Rejection("the proof has a wrong length")
        signed = f"{self._client_first},{self._server_first},{match['unproven']}".encode()
        client_key = exclusive_or(proof, keyed_hash(self._mechanism, credential.stored_key, signed))
        stored_key = hashlib.new(HASHES[self._mechanism], client_key).digest()
        is_right = hmac.compare_digest(stored_key, credential.stored_key)
        signature = keyed_hash(self._mechanism, credential.server_key, signed)
        if self._is_decoy or not is_right:
            raise Rejection("the user does not exist, or the password is wrong")
        return b"v=" + base64.b64encode(signature)


def claimed_user(message: bytes) -> tuple[str, str, bool]:
    """Returns authorization id and user of a client's first message, and whether the user is a delegation token.

    Raises Rejection if it is no such message. Nothing shows yet that the client is this user.
    """
    match = _client_first(message)
    return _user(match["authzid"] or ""), _user(match["name"]), _is_token_login(match["extensions"])


def _client_first(message: bytes) -> re.Match[str]:
    match = _CLIENT_FIRST.fullmatch(_text(message))
    if match is None:
        raise Rejection("the first message is not a client-first-message without channel binding")
    return match


def _text(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeDecodeError as error:
        raise Rejection("a message is not UTF-8") from error


def _is_token_login(extensions: str) -> bool:
    """Returns whether the last `tokenauth` among the extensions of a first message is true, in any case."""
    pairs = (extension.partition("=") for extension in extensions.split(","))
    return {name: value for name, _, value in pairs}.get(_TOKEN_EXTENSION, "").lower() == "true"


def _user(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _is_usable(credential: ScramCredential, decoy: ScramCredential) -> bool:
    """Returns whether a user can log in with a credential. A metadata log may have others, from another program."""
    has_keys = len(credential.stored_key) == len(credential.server_key) == len(decoy.stored_key)
    return has_keys and credential.iterations >= MIN_ITERATIONS
