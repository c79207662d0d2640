# SPDX-License-Identifier: Apache-2.0
"""Parses `auto_offset_reset`: latest, earliest, none, by_duration:PnDTnHnMn.nS (KIP-1106), to_start_time (KIP-1282).

Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.client.errors import ConfigException

LATEST_TIMESTAMP: Final = -1
EARLIEST_TIMESTAMP: Final = -2

_PREFIX: Final = "by_duration:"
# The format of java.time.Duration. The whole and each part can have a sign, only seconds have a fraction, and at least
# one part follows a "T".
_NUMBER: Final = r"[+-]?\d+"
_DURATION: Final = re.compile(
    rf"(?P<sign>[+-])?P(?:(?P<days>{_NUMBER})D)?"
    rf"(?:T(?=[+\-\d])(?:(?P<hours>{_NUMBER})H)?(?:(?P<minutes>{_NUMBER})M)?"
    r"(?:(?P<seconds>[+-]?\d+)(?:[.,](?P<fraction>\d{0,9}))?S)?)?",
    re.IGNORECASE,
)


class ResetStrategy(Enum):
    """How a consumer chooses its first position in a partition."""

    LATEST = "latest"
    EARLIEST = "earliest"
    NONE = "none"
    BY_DURATION = "by_duration"
    TO_START_TIME = "to_start_time"


@dataclass(frozen=True, slots=True)
class ResetPolicy:
    """A strategy; BY_DURATION has a duration."""

    strategy: ResetStrategy
    duration_ms: int = 0

    def timestamp(self, now_ms: int, group_creation_time_ms: int = -1) -> int:
        """Returns the timestamp for ListOffsets. The policy `none` has no timestamp: callers must not ask for it."""
        match self.strategy:
            case ResetStrategy.LATEST:
                return LATEST_TIMESTAMP
            case ResetStrategy.EARLIEST:
                return EARLIEST_TIMESTAMP
            case ResetStrategy.BY_DURATION:
                return max(now_ms - self.duration_ms, 0)
            case ResetStrategy.TO_START_TIME:
                assert group_creation_time_ms >= 0, "the caller knows when the group was created"
                return group_creation_time_ms
            case ResetStrategy.NONE:
                raise AssertionError("the policy none looks nothing up")

    def __str__(self) -> str:
        if self.strategy is ResetStrategy.BY_DURATION:
            return f"by_duration:{self.duration_ms}ms"
        return str(self.strategy.value)


LATEST: Final = ResetPolicy(ResetStrategy.LATEST)
EARLIEST: Final = ResetPolicy(ResetStrategy.EARLIEST)
NONE: Final = ResetPolicy(ResetStrategy.NONE)
TO_START_TIME: Final = ResetPolicy(ResetStrategy.TO_START_TIME)


def parse_reset_policy(name: str, text: str, *, none_allowed: bool = True) -> ResetPolicy:
    """Parses the value of the setting `name`. Raises ConfigException, which names the allowed values."""
    lowered = text.lower()
    policies = [policy for policy in (LATEST, EARLIEST, TO_START_TIME, NONE) if none_allowed or policy is not NONE]
    for policy in policies:
        if lowered == policy.strategy.value:
            return policy
    if lowered.startswith(_PREFIX):
        duration_ms = parse_duration_ms(text[len(_PREFIX) :])
        if duration_ms is not None and duration_ms >= 0:
            return ResetPolicy(ResetStrategy.BY_DURATION, duration_ms)
        raise ConfigException(f"{name}: {text!r} needs a duration that is not negative, for example by_duration:PT1H")
    allowed = ", ".join(policy.strategy.value for policy in policies)
    raise ConfigException(f"{name}: {text!r} is not one of {allowed} and by_duration:<duration>")


def parse_duration_ms(text: str) -> int | None:
    """Parses an ISO-8601 duration of days and smaller units. Returns whole milliseconds, None if it is malformed."""
    duration = _DURATION.fullmatch(text)
    if duration is None:
        return None
    parts = duration.groupdict()
    if all(parts[unit] is None for unit in ("days", "hours", "minutes", "seconds")):
        return None
    seconds_text = parts["seconds"] or "0"
    fraction_ms = int((parts["fraction"] or "").ljust(3, "0")[:3])
    seconds_ms = int(seconds_text) * 1000 + (-fraction_ms if seconds_text.startswith("-") else fraction_ms)
    minutes = (int(parts["days"] or 0) * 24 + int(parts["hours"] or 0)) * 60 + int(parts["minutes"] or 0)
    total_ms = minutes * 60_000 + seconds_ms
    return -total_ms if parts["sign"] == "-" else total_ms
