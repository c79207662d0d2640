# SPDX-License-Identifier: Apache-2.0
"""Kafka's uuids: 16 plain bytes in messages, 22 characters of unpadded URL-safe base64 in text."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final

UUID_BYTES: Final = 16
ZERO_UUID: Final = bytes(UUID_BYTES)


def uuid_to_string(uuid: bytes) -> str:
    """Write a uuid as Kafka's tools print it."""
    if len(uuid) != UUID_BYTES:
        raise ValueError(f"a uuid has {UUID_BYTES} bytes, not {len(uuid)}")
    return urlsafe_b64encode(uuid).decode("ascii").rstrip("=")


def hyphenated_uuid(uuid: bytes) -> str:
    """Write a uuid in the common form of 36 characters."""
    if len(uuid) != UUID_BYTES:
        raise ValueError(f"a uuid has {UUID_BYTES} bytes, not {len(uuid)}")
    return "-".join(part.hex() for part in (uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:]))


def uuid_from_string(text: str) -> bytes:
    """Read the 22-character form; raise ValueError for any text that Kafka's tools would not print."""
    try:
        uuid = urlsafe_b64decode(text + "==")
    except ValueError as e:
        raise ValueError(f"not a uuid: {text!r}") from e
    if len(uuid) != UUID_BYTES or uuid_to_string(uuid) != text:
        raise ValueError(f"not a uuid: {text!r}")
    return uuid
