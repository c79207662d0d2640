# SPDX-License-Identifier: Apache-2.0
"""The server's side of PLAIN (RFC 4616), with the texts of Kafka's PlainSaslServer. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from kcoord.security.rejection import OTHER_AUTHORIZATION_ID, Rejection

_TOKENS: Final = 3


class PlainUsers:
    """The users of a listener. Only hashes of the passwords are kept.

    A comparison takes the same time for a wrong password, a password of another length and an unknown user.
    """

    def __init__(self, passwords: Mapping[str, str]) -> None:
        self._hashes = {user: _hash(password) for user, password in passwords.items()}

    def __len__(self) -> int:
        return len(self._hashes)

    def is_password(self, user: str, password: str) -> bool:
        """Returns whether the user exists and has this password."""
        expected = self._hashes.get(user)
        is_equal = hmac.compare_digest(_hash(password), expected or bytes(hashlib.sha256().digest_size))
        return is_equal and expected is not None


def _hash(password: str) -> bytes:
    return hashlib.sha256(password.encode("utf-8", "surrogatepass")).digest()


class PlainExchange:
    """One exchange of a single message: authorization id, user and password, with NUL between them."""

    def __init__(self, users: PlainUsers) -> None:
        self._users = users
        self.user = ""
        self.is_complete = False
        self.credential_end_ms: int | None = None

    def respond(self, message: bytes) -> bytes:
        """Returns the empty answer to a right password; raises Rejection."""
        authorization_id, user, password = parse_plain(message)
        if not user:
            raise _rejection("Authentication failed: username not specified")
        if not password:
            raise _rejection("Authentication failed: password not specified")
        if not self._users.is_password(user, password):
            raise _rejection("Authentication failed: Invalid username or password")
        if authorization_id not in ("", user):
            raise _rejection(OTHER_AUTHORIZATION_ID)
        self.user, self.is_complete = user, True
        return b""


def parse_plain(message: bytes) -> tuple[str, str, str]:
    """Returns authorization id, user and password; raises Rejection."""
    tokens = message.decode("utf-8", "replace").split("\0")
    if len(tokens) != _TOKENS:
        raise _rejection(f"Invalid SASL/PLAIN response: expected 3 tokens, got {len(tokens)}")
    authorization_id, user, password = tokens
    return authorization_id, user, password


def _rejection(text: str) -> Rejection:
    return Rejection(text, text)
