# SPDX-License-Identifier: Apache-2.0
"""The client's side of SCRAM (RFC 5802, RFC 7677). Like Kafka's brokers, without channel binding. Pure."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Final

from kcoord.security.scram_messages import (
    HASHES,
    MIN_ITERATIONS,
    NO_CHANNEL_BINDING,
    ScramError,
    decode_base64,
    exclusive_or,
    keyed_hash,
    message_fields,
)

MAX_ITERATIONS: Final = 1 << 20
"""The server chooses the number of iterations. This limit bounds the computation to about a second."""


class ScramExchange:
    """One exchange. Call `first`, then `final` with the server's first message, then `verify` with its last message.

    With `is_token`, user and password are the id and the HMAC of a delegation token (KIP-48).
    """

    def __init__(self, mechanism: str, user: str, password: str, nonce: str, *, is_token: bool = False) -> None:
        self._mechanism = mechanism
        self._password = password.encode()
        self._nonce = nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={name},r={nonce}{',tokenauth=true' if is_token else ''}".encode()
        self._server_signature = b""

    def first(self) -> bytes:
        """Returns the client's first message."""
        return NO_CHANNEL_BINDING + self._first_bare

    def final(self, server_first: bytes) -> bytes:
        """Returns the client's final message, which proves that the client knows the password."""
        fields = message_fields(server_first)
        nonce, iterations = fields.get("r", ""), fields.get("i", "")
        if not nonce.startswith(self._nonce) or len(nonce) == len(self._nonce):
            raise ScramError("the server did not extend the nonce")
        if not iterations.isdecimal() or not MIN_ITERATIONS <= int(iterations) <= MAX_ITERATIONS:
            raise ScramError(f"{iterations} iterations are not between {MIN_ITERATIONS} and {MAX_ITERATIONS}")
        hash_name = HASHES[self._mechanism]
        salted = hashlib.pbkdf2_hmac(hash_name, self._password, decode_base64(fields.get("s", "")), int(iterations))
        binding = base64.b64encode(NO_CHANNEL_BINDING).decode()
        without_proof = f"c={binding},r={nonce}".encode()
        auth_message = b",".join((self._first_bare, server_first, without_proof))
        client_key = keyed_hash(self._mechanism, salted, b"Client Key")
        signature = keyed_hash(self._mechanism, hashlib.new(hash_name, client_key).digest(), auth_message)
        proof = exclusive_or(client_key, signature)
        server_key = keyed_hash(self._mechanism, salted, b"Server Key")
        self._server_signature = keyed_hash(self._mechanism, server_key, auth_message)
        return without_proof + b",p=" + base64.b64encode(proof)

    def verify(self, server_final: bytes) -> None:
        """Raises ScramError unless the server proves that it knows the password, too."""
        fields = message_fields(server_final)
        if "e" in fields:
            raise ScramError(fields["e"])
        if not hmac.compare_digest(decode_base64(fields.get("v", "")), self._server_signature):
            raise ScramError("the server does not know the password")
