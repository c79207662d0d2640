# SPDX-License-Identifier: Apache-2.0
"""The soft state of groups after their shard was loaded: timers and completed epochs.

Deadlines are not in the log. A member therefore gets its whole timeout again after each load; it is never removed early
because of a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import migration
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import Rebalance
from kcoord.coordinator.group.consumer.group import ConsumerGroup, GroupSettings, MemberState
from kcoord.coordinator.group.group import Group, GroupTimer, rebalance_timer, session_timer
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import Schedule, TimerEffect, TimerKey


def timers_after_load(
    config: BrokerConfig, image: MetadataImage, groups: Iterable[Group], now_ms: int
) -> Iterator[TimerEffect]:
    """Yields the timers: a session timeout per member, and a rebalance timeout per member that is revoking.

    A downgrade that a crash interrupted continues. A classic group with more members than `group.max.size` rebalances,
    and those that rejoin last have no place, as in Kafka.
    """
    for group in groups:
        if not isinstance(group, ConsumerGroup | ClassicGroup):
            continue
        downgrade = migration.unfinished(config, group, now_ms)
        if downgrade is not None:
            yield downgrade
        if isinstance(group, ConsumerGroup):
            if group.is_converged:
                group.completed_epoch = group.group_epoch
            session_timeout_ms = GroupSettings(config, image, group.group_id).session_timeout_ms
            yield from _consumer_timers(group, session_timeout_ms, now_ms)
        else:
            rebalance = Rebalance(config, group, now_ms)
            rebalance.reset_heartbeats(group.members.values())
            if len(group.members) > config.group_max_size:
                rebalance.schedule(TimerKey(GroupTimer.CLASSIC_REBALANCE, group.group_id), 0)
            yield from rebalance.result.timers


def _consumer_timers(group: ConsumerGroup, session_timeout_ms: int, now_ms: int) -> Iterator[Schedule]:
    group_id = group.group_id
    for member in group.members.values():
        timeout_ms = session_timeout_ms if member.classic is None else member.classic.session_timeout_ms
        yield Schedule(session_timer(group_id, member.member_id), now_ms + timeout_ms)
        if member.state is MemberState.UNREVOKED_PARTITIONS and member.classic is None:
            deadline_ms = now_ms + member.rebalance_timeout_ms
            yield Schedule(rebalance_timer(group_id, member.member_id), deadline_ms)
