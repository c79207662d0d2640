# SPDX-License-Identifier: Apache-2.0
"""When the answer to a heartbeat is bound to be the same again, so that its bytes may be sent without asking.

Invariant: while `SteadyHeartbeat.is_current` holds, the same request would give the same response, no records, and no
effect but re-arming `timer` for another `timeout_ms`. Whatever could change that raises the group's `version`: every
record replayed into the group, and every change of a classic group's soft state. What lies outside the group (topics,
configs of groups and brokers) comes as a new metadata image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kcoord.runtime.result import TimerKey


class Versioned(Protocol):
    """A group; `version` grows with every change that an answer could show."""

    version: int


@dataclass(slots=True)
class SteadyHeartbeat:
    """The proof for one member. `image_epoch` is that of the shard when the answer was given."""

    group: Versioned
    version: int
    image_epoch: int
    timer: TimerKey
    timeout_ms: int

    def is_current(self, image_epoch: int) -> bool:
        return self.group.version == self.version and image_epoch == self.image_epoch
