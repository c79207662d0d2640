# SPDX-License-Identifier: Apache-2.0
"""KIP-211, in addition to the transcripts and the table: lost times, many offsets, a clock that is too fast."""

from __future__ import annotations

import pytest

from kcoord.coordinator.group.group import OFFSETS_EXPIRATION
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES, Aging, AgingRule
from kcoord.runtime.result import CoordinatorRecord, Producer
from kcoord_protocol.messages import GroupMetadataKey, OffsetCommitKey
from tests.unit.group.classic_members import ClassicConsumer
from tests.unit.group.group_context import GroupContext
from tests.unit.group.test_transactional_offsets import commit as commit_in_transaction
from tests.unit.group.test_transactional_offsets import end

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


def groups(context: GroupContext) -> list[str]:
    return [group.group_id for group in context.run(lambda ctx: context.shard.list_groups(ctx, [], []))]


def test_a_restart_keeps_the_time_and_an_unknown_time_counts_from_the_start() -> None:
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


@pytest.mark.parametrize("has_joined", [False, True], ids=["without an id", "before the first generation"])
def test_a_classic_member_that_does_not_stay_leaves_the_offsets_of_an_empty_consumer_group(has_joined: bool) -> None:
    """The offsets age from when the last member left, although the commit is older than the retention time."""
    context = started(group_initial_rebalance_delay_ms="3000")
    context.join("g", A, ["t3"])
    context.commit("g", {"t3": {0: 1}}, member=A, epoch=2)
    for _ in range(30):
        context.sleep(MINUTE_MS // 2)
        context.heartbeat("g", A, 2)
    context.heartbeat("g", A, -1)
    context.sleep(3 * MINUTE_MS)
    member = ClassicConsumer(context, "g", "m", ["t3"])
    member.join_once()
    if has_joined:
        member.join()
    context.restart()
    context.sleep(6 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}
    context.sleep(2 * MINUTE_MS)
    assert context.fetch("g") == {}


def test_a_commit_timestamp_of_zero_is_a_time() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}}, api_version=1)
    context.commit("g", {"t3": {1: 1}}, api_version=1, commit_timestamp=0)
    context.sleep(2 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}


def test_many_offsets_expire_in_several_rounds() -> None:
    context = started()
    count = 3 * MAX_TOMBSTONES
    context.commit("g", {"t": dict.fromkeys(range(count), 1)})
    context.sleep(11 * MINUTE_MS)
    assert context.fetch("g") == {}
    assert groups(context) == []
    assert len(context.log) == 2 * count + 1


def gone(record: CoordinatorRecord) -> tuple[str, int | None]:
    """Returns the group of a tombstone, and the partition if it is the tombstone of an offset."""
    if isinstance(record.key, OffsetCommitKey):
        return record.key.group, record.key.partition
    assert isinstance(record.key, GroupMetadataKey)
    return record.key.group, None


def test_a_full_round_ends_the_check_and_the_next_round_follows_at_once() -> None:
    context = started()
    context.commit("a", {"t": dict.fromkeys(range(MAX_TOMBSTONES + 1), 1)})
    context.commit("b", {"t": {7: 1}})
    context.now_ms += 10 * MINUTE_MS
    context.run(context.shard.expire_offsets)
    assert [gone(record) for record in context.records] == [("a", partition) for partition in range(MAX_TOMBSTONES)]
    assert context.timers[OFFSETS_EXPIRATION] == context.now_ms
    context.run(context.shard.expire_offsets)
    assert [gone(record) for record in context.records] == [("a", MAX_TOMBSTONES), ("a", None), ("b", 7), ("b", None)]
    assert context.timers[OFFSETS_EXPIRATION] == context.now_ms + MINUTE_MS


def test_an_offset_with_a_pending_offset_does_not_expire_nor_does_its_group() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1, 1: 1, 2: 1}})
    producer = Producer(1, 0)
    commit_in_transaction(context, producer, {1: 5})
    context.now_ms += 10 * MINUTE_MS
    context.run(context.shard.expire_offsets)
    assert [gone(record) for record in context.records] == [("g", 0), ("g", 2)]
    end(context, producer, committed=False)
    context.run(context.shard.expire_offsets)
    assert [gone(record) for record in context.records] == [("g", 1), ("g", None)]


def test_nothing_expires_early_because_of_a_clock_that_is_too_fast() -> None:
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


def test_an_offset_with_the_longest_retention_time_does_not_expire() -> None:
    context = started()
    context.commit("g", {"t3": {0: 1}}, retention_time_ms=2**63 - 1, api_version=4)
    context.sleep(1000 * MINUTE_MS)
    assert context.fetch("g") == {("t3", 0): (1, "")}


@pytest.mark.parametrize(("expire_timestamp_ms", "expires_at_ms"), [(-1, 2_100), (0, 0), (3_000, 3_000)])
def test_an_offset_with_its_own_expire_timestamp_expires_then(expire_timestamp_ms: int, expires_at_ms: int) -> None:
    offset = CommittedOffset(5, 0, "", 1_000, expire_timestamp_ms)
    assert Aging(AgingRule.NEVER_HAD_MEMBERS, 2_000, 100).expires_at_ms(offset) == expires_at_ms
