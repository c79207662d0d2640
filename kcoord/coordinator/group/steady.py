# SPDX-License-Identifier: Apache-2.0
"""Steady heartbeats: heartbeats that change nothing, so that a fast path may repeat the bytes of the response.

**Invariant.** While `SteadyHeartbeat.is_current` is True, the same request would give the same response and no records.
Its only effect would be to schedule `timer` again for `timeout_ms`. Every change that could break this gives the group
another `version`: every record replayed into the group, and every change of a classic group's soft state. Topics and
configs are outside the group; they change only with a new metadata image.
"""

from __future__ import annotations

from dataclasses import dataclass

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import ConsumerGroup, GroupSettings
from kcoord.coordinator.group.group import Group, GroupState, heartbeat_timer, session_timer
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import TimerKey


@dataclass(slots=True)
class SteadyHeartbeat:
    """The steady heartbeat of one member. `image_epoch` is the shard's image epoch at the time of the response."""

    group: ConsumerGroup | ClassicGroup
    version: object
    image_epoch: int
    timer: TimerKey
    timeout_ms: int

    def is_current(self, image_epoch: int) -> bool:
        return self.group.version is self.version and image_epoch == self.image_epoch


def steady_heartbeat(
    config: BrokerConfig, image: MetadataImage, group: Group, member_id: str
) -> SteadyHeartbeat | None:
    """Returns the steady heartbeat after a response without error; None if the next response may differ."""
    if isinstance(group, ConsumerGroup):
        member = group.members.get(member_id)
        if member is None or not group.is_steady_for(member):
            return None
        key = session_timer(group.group_id, member_id)
        timeout_ms = GroupSettings(config, image, group.group_id).session_timeout_ms
        return SteadyHeartbeat(group, group.version, image.epoch, key, timeout_ms)
    if isinstance(group, ClassicGroup):
        classic_member = group.members.get(member_id)
        if classic_member is None or group.state is not GroupState.STABLE:
            return None
        key = heartbeat_timer(group.group_id, member_id)
        return SteadyHeartbeat(group, group.version, image.epoch, key, classic_member.session_timeout_ms)
    return None
