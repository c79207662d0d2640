# SPDX-License-Identifier: Apache-2.0
"""What both sides of a SCRAM exchange (RFC 5802, RFC 7677) share. Like Kafka, without channel binding. Pure."""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Final

HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""The names of the hash functions by mechanism."""
MIN_ITERATIONS: Final = 4096
NO_CHANNEL_BINDING: Final = b"n,,"
"""The header of a client's first message that asks for no channel binding and no other authorization id."""


class ScramError(Exception):
    """The exchange failed. The text has no secrets, and is for the log."""


def message_fields(message: bytes) -> dict[str, str]:
    """Returns the fields of a message by their letters. A field that is no `letter=text` is left out."""
    parts = message.decode("utf-8", "replace").split(",")
    return {name: value for name, equals, value in (part.partition("=") for part in parts) if equals}


def decode_base64(text: str) -> bytes:
    """Returns the bytes of a field; raises ScramError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ScramError("a field is not base64") from error


def keyed_hash(mechanism: str, key: bytes, message: bytes) -> bytes:
    """Returns the HMAC of a message with the hash function of the mechanism."""
    return hmac.digest(key, message, HASHES[mechanism])


def exclusive_or(first: bytes, second: bytes) -> bytes:
    """Combines two texts of the same length bit by bit."""
    return bytes([a ^ b for a, b in zip(first, second, strict=True)])
