# SPDX-License-Identifier: Apache-2.0
"""A shard that was just loaded: every member has its whole timeouts again, and is as its last record shows it."""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import refused_join
from kcoord.coordinator.group.consumer.group import ConsumerGroup, MemberState
from kcoord.coordinator.group.group import (
    OFFSETS_EXPIRATION,
    GroupTimer,
    heartbeat_timer,
    rebalance_timer,
    session_timer,
)
from kcoord.runtime.result import TimerKey
from kcoord_protocol.errors import Errors
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import DEFAULTS, GroupContext, Waiting

A, B = "member-a", "member-b"
CONFIGS = {
    "group.initial.rebalance.delay.ms": "0",
    "group.consumer.session.timeout.ms": "50000",
    "offsets.retention.check.interval.ms": "600000",
}


def timers_after_restart(context: GroupContext) -> dict[TimerKey, int]:
    """Returns the remaining time of each timer."""
    context.sleep(1_000)
    context.restart()
    return {key: deadline_ms - context.now_ms for key, deadline_ms in context.timers.items()}


def test_members_that_revoke_also_have_a_rebalance_timer() -> None:
    context = GroupContext({"t6": 6}, CONFIGS)
    context.join("g", A, ["t6"], rebalance_timeout_ms=70_000)
    context.join("g", B, ["t6"], rebalance_timeout_ms=80_000)
    context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2, 3, 4, 5]})
    assert timers_after_restart(context) == {
        session_timer("g", A): 50_000,
        rebalance_timer("g", A): 70_000,
        session_timer("g", B): 50_000,
        OFFSETS_EXPIRATION: 600_000,
    }


def test_classic_members_have_the_session_timeout_of_their_request() -> None:
    context = GroupContext({"t6": 6}, CONFIGS)
    classic = ClassicConsumer(context, "g", "a", ["t6"], cooperative=True)
    classic.session_timeout_ms = 20_000
    settle(context, [classic], {"t6": 6})
    assert timers_after_restart(context) == {
        heartbeat_timer("g", classic.member_id): 20_000,
        OFFSETS_EXPIRATION: 600_000,
    }
    context.join("g", B, ["t6"])
    assert classic.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    classic.join()
    group = context.shard.group("g")
    assert isinstance(group, ConsumerGroup)
    assert group.members[classic.member_id].state is MemberState.UNREVOKED_PARTITIONS
    assert timers_after_restart(context) == {
        session_timer("g", classic.member_id): 20_000,
        session_timer("g", B): 50_000,
        OFFSETS_EXPIRATION: 600_000,
    }


def test_a_classic_member_is_as_its_last_record_shows_it() -> None:
    """After a rolling upgrade to another assignor all members know the new one, and none the old one."""
    context = GroupContext({"t6": 6}, {**CONFIGS, "group.consumer.migration.policy": "disabled"})
    a, old, new = (ClassicConsumer(context, "g", name, ["t6"]) for name in ("a", "old", "new"))
    a.protocols, old.protocols, new.protocols = ["sticky", "range"], ["range"], ["sticky"]
    settle(context, [a, old], {"t6": 6})
    old.leave()
    a.session_timeout_ms = 20_000
    settle(context, [a, new], {"t6": 6})
    context.restart()
    group = context.shard.group("g")
    assert isinstance(group, ClassicGroup)
    assert group.candidate_protocols() == {"sticky"}
    assert group.members[a.member_id].session_timeout_ms == 20_000
    settle(context, [a, new], {"t6": 6})


def test_a_classic_group_without_a_leader_rebalances_at_once() -> None:
    context = GroupContext({"t6": 6}, CONFIGS)
    classic = ClassicConsumer(context, "g", "a", ["t6"])
    settle(context, [classic], {"t6": 6})
    context.join("g", B, ["t6"])
    context.heartbeat("g", B, -1)
    context.restart()
    assert context.timers[TimerKey(GroupTimer.CLASSIC_REBALANCE, "g")] == context.now_ms


def test_a_classic_group_above_a_lowered_limit_rebalances_at_once() -> None:
    """Observed in Kafka 4.4.0. The members rejoin until the group is full."""
    context = GroupContext({"t6": 6}, CONFIGS)
    a, b = (ClassicConsumer(context, "g", name, ["t6"]) for name in "ab")
    settle(context, [a, b], {"t6": 6})
    for limit, error in ((2, Errors.NONE), (1, Errors.REBALANCE_IN_PROGRESS)):
        context.config = BrokerConfig.from_properties(DEFAULTS | CONFIGS | {"group.max.size": str(limit)})
        context.restart()
        context.sleep(0)
        assert (a.heartbeat(), b.heartbeat()) == (error, error)
    assert isinstance(a.join(), Waiting)
    assert b.join() == refused_join(Errors.GROUP_MAX_SIZE_REACHED, "")
    context.sleep(a.rebalance_timeout_ms)
    group = context.shard.group("g")
    assert isinstance(group, ClassicGroup)
    assert list(group.members) == [a.member_id]
