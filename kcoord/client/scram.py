# SPDX-License-Identifier: Apache-2.0
"""The client's side of SCRAM (RFC 5802, RFC 7677), without channel binding, as Kafka's brokers have it. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

MECHANISMS: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 1 << 20
"""A server decides how much the client computes: up to about a second."""

_NO_CHANNEL_BINDING: Final = b"n,,"


class ScramError(Exception):
    """Why the exchange cannot go on."""


class ScramExchange:
    """One exchange: `first`, then `final` with the server's first message, then `verify` with its last."""

    def __init__(self, mechanism: str, user: str, password: str, nonce: str) -> None:
        self._hash = MECHANISMS[mechanism]
        self._password = password.encode()
        self._nonce = nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={name},r={nonce}".encode()
        self._server_signature = b""

    def first(self) -> bytes:
        return _NO_CHANNEL_BINDING + self._first_bare

    def final(self, server_first: bytes) -> bytes:
        """The proof that the client knows the password."""
        fields = _fields(server_first)
        nonce, iterations = fields.get("r", ""), fields.get("i", "")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ScramError("the server did not extend the nonce")
        if not iterations.isdecimal() or not MIN_ITERATIONS <= int(iterations) <= MAX_ITERATIONS:
            raise ScramError(f"{iterations} iterations are not between {MIN_ITERATIONS} and {MAX_ITERATIONS}")
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, _decode(fields.get("s", "")), int(iterations))
        binding = base64.b64encode(_NO_CHANNEL_BINDING).decode()
        without_proof = f"c={binding},r={nonce}".encode()
        auth_message = b",".join((self._first_bare, server_first, without_proof))
        client_key = self._hmac(salted, b"Client Key")
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), auth_message)
        proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), auth_message)
        return without_proof + b",p=" + base64.b64encode(proof)

    def verify(self, server_final: bytes) -> None:
        """Raises ScramError unless the server knows the password too."""
        fields = _fields(server_final)
        if "e" in fields:
            raise ScramError(fields["e"])
        if not hmac.compare_digest(_decode(fields.get("v", "")), self._server_signature):
            raise ScramError("the server does not know the password")

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)


def _fields(message: bytes) -> dict[str, str]:
    parts = message.decode("utf-8", "replace").split(",")
    return {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ScramError(f"{text!r} is not base64") from error
