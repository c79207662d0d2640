# SPDX-License-Identifier: Apache-2.0
"""When committed offsets expire (KIP-211), for groups of both types.

| group | its offsets age from |
|---|---|
| empty, has had members | the moment it became empty, or a later commit |
| empty, never had members (simple consumer) | their commit |
| with members, topics to which no member subscribes | their commit |
| with members, subscribed topics | they do not age |
| with members whose topics are unknown now: between two generations, another protocol type | they do not age |
| empty consumer group, unknown since when (Kafka does not record it) | the first check, which records it |

An offset with its own expire timestamp (OffsetCommit v2 to v4) expires at that time, unless the group protects it.
In Kafka the offsets of empty consumer groups age from their commit; so they do with
`kcoord.offsets.expiration.policy=kafka`.

A timer runs the check in each shard. It writes tombstones, at most MAX_TOMBSTONES at a time, and then runs again at
once. With its last offset an empty group is deleted too (`deletion`). After a crash the next check continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import Group, GroupState
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset, TopicOffsets
from kcoord.metadata.image import MetadataImage

MAX_TOMBSTONES: Final = 1000
"""How many offsets one check removes, so that its records fit into a batch and other operations get their turn."""

GROUP_RETENTION_KEY: Final = "kcoord.offsets.retention.minutes"
KIP211_POLICY: Final = "kip211"
_MS_PER_MINUTE: Final = 60_000
_UNKNOWN: Final = -1


class AgingRule(Enum):
    """The rule for the offsets of one topic of a group. The first four rules protect them."""

    SUBSCRIBED = "subscribed"
    BETWEEN_GENERATIONS = "between generations"
    TOPICS_UNKNOWN = "topics unknown"
    EMPTY_SINCE_UNKNOWN = "group empty, unknown since when"
    GROUP_EMPTY = "group empty"
    NEVER_HAD_MEMBERS = "never had members"
    NOT_SUBSCRIBED = "not subscribed"
    SINCE_COMMIT = "policy kafka"

    @property
    def protects(self) -> bool:
        return self in _PROTECTING


_PROTECTING: Final = frozenset(
    {
        AgingRule.SUBSCRIBED,
        AgingRule.BETWEEN_GENERATIONS,
        AgingRule.TOPICS_UNKNOWN,
        AgingRule.EMPTY_SINCE_UNKNOWN,
    }
)


@dataclass(slots=True)
class Aging:
    """How the offsets of one topic of a group age."""

    rule: AgingRule
    since_ms: int
    """The time from which the offsets age, unless their commit is later; -1: they age from their commit."""
    retention_ms: int

    def expires_at_ms(self, offset: CommittedOffset) -> int | None:
        """Returns when the offset expires if nothing changes; None while the group protects it."""
        if self.rule.protects:
            return None
        if offset.expire_timestamp_ms >= 0:
            return offset.expire_timestamp_ms
        return max(offset.commit_timestamp_ms, self.since_ms) + self.retention_ms


class Expiration:
    """The rules at one moment.

    `clock_gain_ms` is by how much the clock may be ahead of real time. It is subtracted, so that nothing expires early.
    """

    def __init__(self, config: BrokerConfig, image: MetadataImage, now_ms: int, clock_gain_ms: int = 0) -> None:
        self._config = config
        self._image = image
        self._now_ms = now_ms - clock_gain_ms
        self.clock_ms = now_ms

    def expired(self, group: Group, offsets: Mapping[str, Mapping[int, CommittedOffset]]) -> Iterator[tuple[str, int]]:
        """Yields topic and partition of the group's offsets that have expired."""
        for topic, partitions in offsets.items():
            aging = self.aging(group, topic)
            if aging.rule.protects or not self._may_have_expired(aging, partitions):
                continue
            for partition, offset in partitions.items():
                expires_at_ms = aging.expires_at_ms(offset)
                if expires_at_ms is not None and self._now_ms >= expires_at_ms:
                    yield topic, partition

    def _may_have_expired(self, aging: Aging, offsets: Mapping[int, CommittedOffset]) -> bool:
        """True unless all offsets are too young. Reads packed rows without making objects, as nearly all are young."""
        if not isinstance(offsets, TopicOffsets):
            return True
        oldest_ms, has_own = offsets.oldest()
        return has_own or self._now_ms >= max(oldest_ms, aging.since_ms) + aging.retention_ms

    def aging(self, group: Group, topic: str) -> Aging:
        """Returns how the group's offsets of the topic age now."""
        rule = self._protection(group, topic)
        if rule is not None:
            return Aging(rule, _UNKNOWN, 0)
        return Aging(*self._start(group), self._retention_ms(group))

    def may_remove(self, group: Group) -> bool:
        """True if the group may be deleted with its last offset."""
        return group.is_empty() and not (isinstance(group, ClassicGroup) and group.pending_members)

    def is_empty_since_unknown(self, group: ConsumerGroup) -> bool:
        """True if its offsets age from when the group became empty, but the log does not say when that was."""
        ages_since_empty = self._config.kcoord_offsets_expiration_policy == KIP211_POLICY
        return ages_since_empty and group.is_empty() and group.empty_since_ms < 0

    def _protection(self, group: Group, topic: str) -> AgingRule | None:
        """Returns the rule that protects the offsets of a topic, or None.

        Offsets are also protected while it is unknown to which topics the group subscribes.
        """
        if group.is_subscribed_to(topic):
            return AgingRule.SUBSCRIBED
        if isinstance(group, ConsumerGroup):
            if self.is_empty_since_unknown(group):
                return AgingRule.EMPTY_SINCE_UNKNOWN
            return None if group.are_regexes_resolved() else AgingRule.TOPICS_UNKNOWN
        if not isinstance(group, ClassicGroup) or group.is_empty():
            return None
        if group.state is not GroupState.STABLE:
            return AgingRule.BETWEEN_GENERATIONS
        return None if group.uses_consumer_protocol() else AgingRule.TOPICS_UNKNOWN

    def _start(self, group: Group) -> tuple[AgingRule, int]:
        """Returns the rule for unprotected offsets, and the time from which they age."""
        if not group.is_empty():
            return AgingRule.NOT_SUBSCRIBED, _UNKNOWN
        if isinstance(group, ClassicGroup):
            if group.is_simple():
                return AgingRule.NEVER_HAD_MEMBERS, _UNKNOWN
            return AgingRule.GROUP_EMPTY, group.state_timestamp_ms
        if isinstance(group, ConsumerGroup) and self._config.kcoord_offsets_expiration_policy == KIP211_POLICY:
            return AgingRule.GROUP_EMPTY, group.empty_since_ms
        return AgingRule.SINCE_COMMIT, _UNKNOWN

    def _retention_ms(self, group: Group) -> int:
        own = self._image.group_configs(group.group_id).get(GROUP_RETENTION_KEY)
        minutes = self._config.offsets_retention_minutes if own is None else int(own)
        return minutes * _MS_PER_MINUTE
