# SPDX-License-Identifier: Apache-2.0
"""The random identifiers that a broker gives out: member ids, topic ids, incarnations, sessions.

Randomness enters the broker here alone. Handlers draw what an operation may need and pass it on as a value, so the
state machines stay deterministic, and the simulation replaces the source.
"""

from __future__ import annotations

import os
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Final

from kcoord_protocol.uuid import uuid_from_string

_UUID_BYTES: Final = 16
_POOL_BYTES: Final = 256 * _UUID_BYTES


class RandomUuids:
    """Cuts identifiers from one read of `read` at a time: a system call for each is too expensive.

    A process that forks must not share its pool with its children, so each process makes its own.
    """

    __slots__ = ("_pool", "_position", "_read")

    def __init__(self, read: Callable[[int], bytes] = os.urandom) -> None:
        self._read = read
        self._pool = b""
        self._position = 0

    def take(self) -> bytes:
        """Returns 16 random bytes with the version and variant bits of a random UUID."""
        if self._position == len(self._pool):
            self._pool = self._read(_POOL_BYTES)
            self._position = 0
        start = self._position
        self._position = start + _UUID_BYTES
        value = bytearray(self._pool[start : self._position])
        value[6] = value[6] & 0x0F | 0x40
        value[8] = value[8] & 0x3F | 0x80
        return bytes(value)

    def take_text(self) -> str:
        """Returns a UUID in Kafka's text form. It never starts with '-', which command lines take for an option."""
        while True:
            text = urlsafe_b64encode(self.take())[:22].decode("ascii")
            if text[0] != "-":
                return text

    def take_topic_ids(self, count: int) -> list[bytes]:
        """Returns ids for new topics."""
        return [uuid_from_string(self.take_text()) for _ in range(count)]

    def take_session_id(self) -> int:
        """Returns a positive 31-bit id for a fetch session."""
        return int.from_bytes(self.take()[:4], "big") % (2**31 - 1) + 1
