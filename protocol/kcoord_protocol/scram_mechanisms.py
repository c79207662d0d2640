# SPDX-License-Identifier: Apache-2.0
"""The SCRAM mechanisms, with their numbers in requests and metadata records (KIP-554)."""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class ScramMechanism(IntEnum):
    """A SCRAM mechanism. Its value is the number that requests and records carry."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def mechanism_name(self) -> str:
        """The name of the mechanism in SASL."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        """The name of the hash function in `hashlib`."""
        return f"sha{self.name[-3:]}"

    @property
    def key_bytes(self) -> int:
        """The length of the keys that a server keeps: that of the hashes."""
        return int(self.name[-3:]) // 8

    @classmethod
    def of_number(cls, number: int) -> ScramMechanism | None:
        """Returns the mechanism with this number, None if there is none."""
        return next((mechanism for mechanism in cls if mechanism == number), None)


MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16_384
"""The bounds of Kafka for the iterations of a credential."""
SALT_SEED_BYTES: Final = 32
_SALT_BITS: Final = 130
_SALT_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"


def salt_of(seed: bytes) -> bytes:
    """Returns a salt like those of Kafka's tools: a number of 130 bits out of the seed, written with letters.

    All salts have this form, also those for users that do not exist. So a salt does not say whether a user exists.
    """
    number = int.from_bytes(seed) & ((1 << _SALT_BITS) - 1)
    digits: list[str] = []
    while number:
        number, digit = divmod(number, len(_SALT_DIGITS))
        digits.append(_SALT_DIGITS[digit])
    return "".join(reversed(digits)).encode()
