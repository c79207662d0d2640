# SPDX-License-Identifier: Apache-2.0
"""Exponential backoff with jitter (KIP-580). Pure: the caller supplies the random number and does the waiting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MULTIPLIER: Final = 2.0
JITTER: Final = 0.2


@dataclass(slots=True)
class Backoff:
    """The waits before the first, second, ... retry: doubled each time, up to `max_ms`."""

    initial_ms: float
    max_ms: float

    def delay_ms(self, failures: int, random: float) -> float:
        """Returns the wait after `failures` failures in a row. `random` in [0, 1) spreads it by 20 % to both sides."""
        if failures <= 0:
            return 0.0
        exponent = min(failures - 1, 32)
        delay = min(self.initial_ms * MULTIPLIER**exponent, self.max_ms)
        return delay * (1.0 + JITTER * (2.0 * random - 1.0))
