# SPDX-License-Identifier: Apache-2.0
"""The logins of delegation tokens (KIP-48): SCRAM with the token's id as user and its HMAC in base64 as password.

A credential is computed at the first login with a token and a mechanism, which takes a few milliseconds, and kept.
"""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.metadata.delegation_tokens import USER_TYPE, token_hmac
from kcoord.metadata.image import MetadataImage, ScramCredential
from kcoord.security.scram import TokenLogin
from kcoord.security.scram_messages import HASHES, MIN_ITERATIONS, keyed_hash
from kcoord_protocol.scram_mechanisms import salt_of

_MAX_CREDENTIALS: Final = 1024


def token_login(
    image: MetadataImage, config: BrokerConfig, mechanism: str, token_id: str, now_ms: int
) -> TokenLogin | None:
    """Returns the login of a token, None if there is no valid token with this id."""
    token = image.delegation_tokens.get(token_id)
    if token is None or token.is_expired(now_ms):
        return None
    principal_type, _, user = token.owner.partition(":")
    if principal_type != USER_TYPE:
        # Kafka creates such tokens, and their holders log in as users of that name.
        return None
    return TokenLogin(user, _credential(mechanism, token_hmac(config, token_id)), min(token.max_ms, token.expiry_ms))


@lru_cache(_MAX_CREDENTIALS)
def _credential(mechanism: str, digest: bytes) -> ScramCredential:
    """Returns the credential of a token with this HMAC. The salt is the same at all workers and after each start."""
    salt = salt_of(keyed_hash(mechanism, digest, b"Salt"))
    salted = hashlib.pbkdf2_hmac(HASHES[mechanism], base64.b64encode(digest), salt, MIN_ITERATIONS)
    stored_key = hashlib.new(HASHES[mechanism], keyed_hash(mechanism, salted, b"Client Key")).digest()
    return ScramCredential(salt, stored_key, keyed_hash(mechanism, salted, b"Server Key"), MIN_ITERATIONS)
