# SPDX-License-Identifier: Apache-2.0
"""When the answer to a heartbeat is bound to be the same again, so that its bytes may be sent without asking.

Invariant: while `SteadyHeartbeat.is_current` holds, the same request would give the same response, no records, and no
effect but re-arming `timer` for another `timeout_ms`. Whatever could change that gives the group another `version`:
every record replayed into the group, and every change of a classic group's soft state. What lies outside the group
(topics, configs of groups and brokers) comes as a new metadata image.
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
    """The proof for one member. `image_epoch` is that of the shard when the answer was given."""

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
    """Asked after a heartbeat of the member was answered without error; None if the next answer may be another one."""
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
