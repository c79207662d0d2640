# SPDX-License-Identifier: Apache-2.0
"""KIP-211 beside `tests/transcripts/offsets` and the table: lost moments, many offsets, a clock that ran too fast."""

from __future__ import annotations

from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES
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


def groups(context: GroupContext) -> list[str]:
    return [group.group_id for group in context.run(lambda ctx: context.shard.list_groups(ctx, [], []))]


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
