# SPDX-License-Identifier: Apache-2.0
"""When committed offsets expire (KIP-211), for groups of both types.

| group | its offsets age from |
|---|---|
| empty, has had members | the moment it became empty, or a later commit |
| empty, never had members (simple consumer) | their commit |
| with members, topics that nobody subscribes to | their commit |
| with members, subscribed topics | they do not age |

An offset with an expire timestamp of its own (OffsetCommit v2 to v4) ages by that alone, under the same protection.
Kafka lets offsets of empty consumer groups age from their commit; `kcoord.offsets.expiration.policy=kafka` does so too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import Group, GroupState
from kcoord.coordinator.group.offsets import CommittedOffset
from kcoord.coordinator.result import TimerKey
from kcoord.metadata.image import MetadataImage

OFFSETS_EXPIRATION: Final = TimerKey("offsets-expiration")
"""The timer of the check, every offsets.retention.check.interval.ms."""

MAX_TOMBSTONES: Final = 1000
"""How many offsets one check removes at a time, so that a result fits into a batch and others get their turn."""

GROUP_RETENTION_KEY: Final = "kcoord.offsets.retention.minutes"
_MS_PER_MINUTE: Final = 60_000


class Expiration:
    """The rules at one moment."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, now_ms: int) -> None:
        self._config = config
        self._image = image
        self._now_ms = now_ms

    def expired(self, group: Group, offsets: Mapping[str, Mapping[int, CommittedOffset]]) -> Iterator[tuple[str, int]]:
        """Topic and partition of the group's offsets that have expired."""
        for topic, partitions in offsets.items():
            for partition, offset in partitions.items():
                expires_at_ms = self.expires_at_ms(group, topic, offset)
                if expires_at_ms is not None and self._now_ms >= expires_at_ms:
                    yield topic, partition

    def expires_at_ms(self, group: Group, topic: str, offset: CommittedOffset) -> int | None:
        """When the offset expires if nothing happens meanwhile; None while the group protects it."""
        if group.is_subscribed_to(topic) or not self._may_expire(group):
            return None
        if offset.expire_timestamp_ms >= 0:
            return offset.expire_timestamp_ms
        return max(offset.commit_timestamp_ms, self._empty_since_ms(group)) + self._retention_ms(group)

    def may_remove(self, group: Group) -> bool:
        """Whether the group may go with its last offset."""
        return group.is_empty() and not (isinstance(group, ClassicGroup) and group.pending_members)

    @staticmethod
    def _may_expire(group: Group) -> bool:
        """A classic group keeps everything between two generations, and where its subscriptions are not known."""
        if not isinstance(group, ClassicGroup) or group.is_empty():
            return True
        return group.state is GroupState.STABLE and group.uses_consumer_protocol()

    def _empty_since_ms(self, group: Group) -> int:
        if not group.is_empty():
            return -1
        if isinstance(group, ClassicGroup):
            return -1 if group.is_simple() else group.state_timestamp_ms
        if isinstance(group, ConsumerGroup) and self._config.kcoord_offsets_expiration_policy == "kip211":
            return group.empty_since_ms
        return -1

    def _retention_ms(self, group: Group) -> int:
        own = self._image.group_configs(group.group_id).get(GROUP_RETENTION_KEY)
        minutes = self._config.offsets_retention_minutes if own is None else int(own)
        return minutes * _MS_PER_MINUTE
