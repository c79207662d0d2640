# SPDX-License-Identifier: Apache-2.0
"""When committed offsets expire (KIP-211), for groups of both types.

| group | its offsets age from |
|---|---|
| empty, has had members | the moment it became empty, or a later commit |
| empty, never had members (simple consumer) | their commit |
| with members, topics that nobody subscribes to | their commit |
| with members, subscribed topics | they do not age |
| with members whose topics are not known now: between two generations, another protocol type | they do not age |
| empty consumer-protocol group, nobody knows since when (Kafka does not note it) | the first check, which notes it |

An offset with an expire timestamp of its own (OffsetCommit v2 to v4) ages by that alone, under the same protection.
Kafka lets offsets of empty consumer groups age from their commit; `kcoord.offsets.expiration.policy=kafka` does so too.
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

"""The timer of the check, every offsets.retention.check.interval.ms."""

MAX_TOMBSTONES: Final = 1000
"""How many offsets one check removes at a time, so that a result fits into a batch and others get their turn."""

GROUP_RETENTION_KEY: Final = "kcoord.offsets.retention.minutes"
KIP211_POLICY: Final = "kip211"
_MS_PER_MINUTE: Final = 60_000
_UNKNOWN: Final = -1


class AgingRule(Enum):
    """What decides over the offsets of one topic of a group. The first four protect them."""

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
    """They age from then on, or from a later commit; -1: from their commit."""
    retention_ms: int

    def expires_at_ms(self, offset: CommittedOffset) -> int | None:
        """When the offset expires if nothing happens meanwhile; None while the group protects it."""
        if self.rule.protects:
            return None
        if offset.expire_timestamp_ms >= 0:
            return offset.expire_timestamp_ms
        return max(offset.commit_timestamp_ms, self.since_ms) + self.retention_ms


class Expiration:
    """The rules at one moment. `clock_gain_ms` is by how much the clock may have run too fast: nothing expires early
    by it.
    """

    def __init__(self, config: BrokerConfig, image: MetadataImage, now_ms: int, clock_gain_ms: int = 0) -> None:
        self._config = config
        self._image = image
        self._now_ms = now_ms - clock_gain_ms
        self.clock_ms = now_ms

    def expired(self, group: Group, offsets: Mapping[str, Mapping[int, CommittedOffset]]) -> Iterator[tuple[str, int]]:
        """Topic and partition of the group's offsets that have expired."""
        for topic, partitions in offsets.items():
            aging = self.aging(group, topic)
            if aging.rule.protects or not self._may_have_expired(aging, partitions):
                continue
            for partition, offset in partitions.items():
                expires_at_ms = aging.expires_at_ms(offset)
                if expires_at_ms is not None and self._now_ms >= expires_at_ms:
                    yield topic, partition

    def _may_have_expired(self, aging: Aging, offsets: Mapping[int, CommittedOffset]) -> bool:
        """A look at packed rows, which are not made objects for it: nearly all offsets are younger."""
        if not isinstance(offsets, TopicOffsets):
            return True
        oldest_ms, has_own = offsets.oldest()
        return has_own or self._now_ms >= max(oldest_ms, aging.since_ms) + aging.retention_ms

    def aging(self, group: Group, topic: str) -> Aging:
        rule = self._protection(group, topic)
        if rule is not None:
            return Aging(rule, _UNKNOWN, 0)
        return Aging(*self._start(group), self._retention_ms(group))

    def may_remove(self, group: Group) -> bool:
        """Whether the group may go with its last offset."""
        return group.is_empty() and not (isinstance(group, ClassicGroup) and group.pending_members)

    def is_empty_since_unknown(self, group: ConsumerGroup) -> bool:
        """Whether its offsets should age from when it became empty, and nobody knows when that was."""
        is_asked = self._config.kcoord_offsets_expiration_policy == KIP211_POLICY
        return is_asked and group.is_empty() and group.empty_since_ms < 0

    def _protection(self, group: Group, topic: str) -> AgingRule | None:
        """What keeps the offsets of a topic from aging. What a group reads is not always known."""
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
        """The rule by which unprotected offsets age, and from when."""
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
