# SPDX-License-Identifier: Apache-2.0
"""The random ids that a broker assigns: member ids, topic ids, incarnation ids, ids of fetch sessions.

This module is the broker's only source of randomness. Handlers draw the ids that an operation may need and pass them as
values, so the state machines stay deterministic, and the simulation can replace the source.
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
    """Takes ids from a pool of random bytes, since a system call per id is too expensive. `read` fills the pool.

    After a fork, parent and child would take the same ids from one pool. So each process makes its own object.
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
