# SPDX-License-Identifier: Apache-2.0
"""The settings on which the gold tables depend. All times are in ms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

MS_PER_MINUTE: Final = 60_000
BURROW_WINDOW: Final = 10
"""The number of commits that Burrow's rules consider (Burrow's setting `intervals`)."""


class ExpiryPolicy(StrEnum):
    """When the retention of the offsets of an empty group starts.

    * kip211: when the group became empty, or with a later commit. This is the default of kcoord.
    * kafka: for KIP-848 groups with the commit; for classic groups when the group became empty, even if the commit was
      later. This was observed with Kafka 4.4.0.
    """

    KIP211 = "kip211"
    KAFKA = "kafka"


@dataclass(frozen=True)
class LakeSettings:
    """The settings of a lake.

    `now` None means the newest timestamp in the lake, so a repeated job gives the same answer.
    """

    now: datetime | None = None
    retention_ms: int = 10_080 * MS_PER_MINUTE
    expiry_policy: ExpiryPolicy = ExpiryPolicy.KIP211
    storm_epochs: int = 5
    storm_window_ms: int = 10_000

    def __post_init__(self) -> None:
        if self.retention_ms <= 0:
            raise ValueError(f"retention_ms: {self.retention_ms} is not positive")
        if self.storm_epochs < 2:
            raise ValueError(f"storm_epochs: {self.storm_epochs} is less than 2")
        if self.storm_window_ms <= 0:
            raise ValueError(f"storm_window_ms: {self.storm_window_ms} is not positive")

    def to_text(self) -> dict[str, str]:
        """Returns all settings but `now`, which is not stored."""
        return {name: str(value) for name, value in asdict(self).items() if name != "now"}

    @classmethod
    def from_text(cls, stored: Mapping[str, str], **given: object) -> LakeSettings:
        """Merges the stored settings and the given settings, which win unless they are None.

        Raises ValueError for an unknown setting or a bad value.
        """
        texts = {**stored, **{name: str(value) for name, value in given.items() if value is not None}}
        unknown = texts.keys() - cls().to_text().keys()
        if unknown:
            raise ValueError(f"{min(unknown)}: unknown setting; the settings are {', '.join(cls().to_text())}")
        return cls(
            None,
            int(texts.get("retention_ms", cls.retention_ms)),
            ExpiryPolicy(texts.get("expiry_policy", cls.expiry_policy)),
            int(texts.get("storm_epochs", cls.storm_epochs)),
            int(texts.get("storm_window_ms", cls.storm_window_ms)),
        )
