# SPDX-License-Identifier: Apache-2.0
"""KIP-211, row by row, for groups of both types; the check runs on the virtual clock."""

from __future__ import annotations

from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext

A = "member-a"
MINUTE_MS = 60_000
RETENTION = {
    "offsets.retention.minutes": "10",
    "offsets.retention.check.interval.ms": str(MINUTE_MS),
    "group.initial.rebalance.delay.ms": "0",
    "group.max.session.timeout.ms": str(10**9),
}


def started(**more: str) -> GroupContext:
    configs = {name.replace("_", "."): value for name, value in more.items()}
    context = GroupContext({"t3": 3, "t6": 6}, RETENTION | configs)
    context.restart()
    return context


def keep_alive(context: GroupContext, minutes: int, epoch: int) -> None:
    for _ in range(minutes * 2):
        context.sleep(MINUTE_MS // 2)
        context.heartbeat("g", A, epoch)


def groups(context: GroupContext) -> list[str]:
    return [group.group_id for group in context.run(lambda ctx: context.shard.list_groups(ctx, [], []))]


def test_simple_group_ages_from_each_commit() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}})
    context.sleep(5 * MINUTE_MS)
    context.commit("g", {"t3": {1: 1}})
    context.sleep(5 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 1): (1, "")}
    context.sleep(5 * MINUTE_MS)
    assert context.fetch("g") == {}
    assert groups(context) == []


def test_subscribed_offsets_of_a_live_group_never_age() -> None:
    context = started()
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}, "t6": {0: 2}}, member=A, epoch=2)
    keep_alive(context, 60, 2)
    assert context.fetch("g") == {("t3", 0): (1, "")}


def test_empty_consumer_group_ages_from_the_moment_it_became_empty() -> None:
    context = started()
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    keep_alive(context, 30, 2)
    context.heartbeat("g", A, -1)
    context.sleep(9 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    context.sleep(2 * MINUTE_MS)
    assert context.fetch("g") == {}
    assert groups(context) == []


def test_the_clock_starts_again_when_a_member_came_back() -> None:
    context = started()
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    context.heartbeat("g", A, -1)
    context.sleep(9 * MINUTE_MS)
    context.join("g", A, ["t3"])
    context.heartbeat("g", A, -1)
    context.sleep(9 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}


def test_policy_kafka_ages_consumer_groups_from_the_commit() -> None:
    context = started(**{"kcoord.offsets.expiration.policy": "kafka"})
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    keep_alive(context, 30, 2)
    context.heartbeat("g", A, -1)
    context.sleep(MINUTE_MS)
    assert context.fetch("g") == {}


def test_restart_keeps_the_moment_and_an_unknown_one_counts_from_the_start() -> None:
    context = started()
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    context.heartbeat("g", A, -1)
    context.sleep(6 * MINUTE_MS)
    context.restart()
    context.sleep(3 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    for record in context.log:
        if record.value is not None:
            record.value.unknown_tagged_fields = ()
    context.restart()
    context.sleep(9 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    context.sleep(2 * MINUTE_MS)
    assert context.fetch("g") == {}


def test_classic_group() -> None:
    context = started()
    member = ClassicConsumer(context, "g", "m", ["t3"])
    member.session_timeout_ms = 10**9
    settle(context, [member], {"t3": 3})
    context.commit("g", {"t3": {0: 1}, "t6": {0: 2}}, member=member.member_id, epoch=1)
    context.sleep(30 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    member.leave()
    context.sleep(9 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    context.restart()
    context.sleep(2 * MINUTE_MS)
    assert context.fetch("g") == {}
    assert groups(context) == []


def test_classic_group_between_generations_keeps_everything() -> None:
    context = started()
    member = ClassicConsumer(context, "g", "m", ["t3"])
    member.session_timeout_ms = member.rebalance_timeout_ms = 10**9
    settle(context, [member], {"t3": 3})
    context.commit("g", {"t6": {0: 2}}, member=member.member_id, epoch=1)
    member.topics = ["t3", "t6"]
    member.join()
    context.sleep(30 * MINUTE_MS)
    assert context.fetch("g")


def test_retention_time_of_an_old_client_counts_for_its_offset() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}}, retention_time_ms=2 * MINUTE_MS, api_version=4)
    context.commit("g", {"t3": {1: 1}}, retention_time_ms=60 * MINUTE_MS, api_version=4)
    context.sleep(3 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 1): (1, "")}
    context.sleep(50 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 1): (1, "")}


def test_group_may_have_a_retention_of_its_own() -> None:
    context = started()
    context.group_configs["g"] = {"kcoord.offsets.retention.minutes": "100"}
    context.update_metadata(context.topics)
    context.commit("g", {"t3": {0: 1}})
    context.commit("h", {"t3": {0: 1}})
    context.sleep(99 * MINUTE_MS)
    assert groups(context) == ["g"]
    context.sleep(2 * MINUTE_MS)
    assert groups(context) == []


def test_many_offsets_go_in_portions() -> None:
    context = started()
    count = 3 * MAX_TOMBSTONES
    context.commit("g", {"t": dict.fromkeys(range(count), 1)})
    context.sleep(11 * MINUTE_MS)
    assert context.fetch("g") == {}
    assert groups(context) == []
    assert len(context.log) == 2 * count + 1


def test_nothing_expires_early_by_a_clock_that_ran_too_fast() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}}, retention_time_ms=2 * MINUTE_MS, api_version=4)
    context.commit("g", {"t3": {1: 1}})
    context.shard.clock_gain_ms = MINUTE_MS
    context.sleep(2 * MINUTE_MS)
    assert len(context.fetch("g")) == 2
    context.sleep(MINUTE_MS)
    assert context.fetch("g") == {("t3", 1): (1, "")}
    context.sleep(7 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 1): (1, "")}
    context.sleep(MINUTE_MS)
    assert context.fetch("g") == {}
