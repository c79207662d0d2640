# SPDX-License-Identifier: Apache-2.0
"""A target assignment that is computed beside the group: who asked for it sees the old one, and what changed meanwhile
is respected.
"""

from __future__ import annotations

from functools import partial

import pytest

from kcoord.coordinator.group.consumer.target_assignment import ComputedTarget, ComputeTarget, compute
from kcoord.coordinator.result import Task
from tests.unit.group.group_context import GroupContext

A, B, C = "member-a", "member-b", "member-c"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t6": 6, "t9": 9}, {"kcoord.assignor.inline.ms": "0"})


def start(context: GroupContext) -> tuple[Task, ComputedTarget]:
    """Takes the task off the list and computes it; `finish` hands the outcome in."""
    (task,) = context.tasks
    context.tasks = []
    assert isinstance(task.work, ComputeTarget)
    target = context.shard.target_input(task.work.group_id)
    assert target is not None
    return task, compute(target)


def finish(context: GroupContext, task: Task, value: object) -> list[str]:
    """Returns the types of the records that came of it."""
    context.run(partial(context.shard.complete_task, task=task, value=value))
    return [type(record.key).__name__.removeprefix("ConsumerGroupTargetAssignment") for record in context.records]


def target(context: GroupContext, group: str = "g") -> dict[str, list[int]]:
    return {
        member.member_id: sorted(p for topic in member.target_assignment.topic_partitions for p in topic.partitions)
        for member in context.describe(group).members
    }


def test_the_first_target_of_a_group_is_never_put_off(context: GroupContext) -> None:
    response = context.join("g", A, ["t6"])
    assert context.assigned(response) == {"t6": [0, 1, 2, 3, 4, 5]}
    assert context.tasks == []


def test_whoever_joins_sees_the_old_target_until_the_new_one_is_there(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    joined = context.join("g", B, ["t6"])
    assert (joined.member_epoch, context.assigned(joined)) == (2, {})
    assert context.describe("g").group_state == "Assigning"
    assert context.heartbeat("g", A, 2).assignment is None
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 3
    revoking = context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2, 3, 4, 5]})
    assert context.assigned(revoking) == {"t6": [0, 1, 2]}
    assert context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2]}).member_epoch == 3
    assert context.assigned(context.heartbeat("g", B, 2)) == {"t6": [3, 4, 5]}
    assert context.describe("g").group_state == "Stable"


def test_one_computation_serves_all_who_joined_meanwhile(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    for number in range(5):
        context.join("g", f"member-{number}", ["t6"])
    assert len(context.tasks) == 1
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 7
    assert sorted(map(len, target(context).values())) == [1] * 6
    context.heartbeat("g", A, 2)
    assert context.tasks == []


def test_who_joined_too_late_is_in_the_next_target(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, computed = start(context)
    context.join("g", C, ["t6"])
    context.tasks = []
    assert finish(context, task, computed) == ["MemberKey", "MemberKey", "MetadataKey"]
    assert target(context) == {A: [0, 1, 2], B: [3, 4, 5], C: []}
    context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2, 3, 4, 5]})
    context.run_tasks()
    assert sorted(map(len, target(context).values())) == [2, 2, 2]


def test_who_left_meanwhile_gets_no_target(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, computed = start(context)
    context.heartbeat("g", B, -1)
    assert finish(context, task, computed) == ["MemberKey", "MetadataKey"]
    context.heartbeat("g", A, 2)
    context.run_tasks()
    assert target(context) == {A: [0, 1, 2, 3, 4, 5]}


def test_who_took_the_place_of_a_static_member_gets_its_target(context: GroupContext) -> None:
    context.join("g", A, ["t6"], instance="i1")
    context.join("g", B, ["t6"])
    task, computed = start(context)
    assert A in computed.changed
    context.heartbeat("g", A, -2, instance="i1")
    context.join("g", C, ["t6"], instance="i1")
    context.tasks = []
    finish(context, task, computed)
    assert target(context) == {B: [3, 4, 5], C: [0, 1, 2]}


def test_a_target_of_a_group_that_was_made_again_is_dropped(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, computed = start(context)
    for member in (A, B):
        context.heartbeat("g", member, -1)
    context.run(lambda c: context.shard.delete_groups(c, ["g"]))
    assert finish(context, task, computed) == []
    context.sleep(1)
    context.join("g", A, ["t9"])
    for number in range(5):
        context.join("g", f"member-{number}", ["t9"])
    assert finish(context, task, computed) == []


def test_an_older_target_does_not_replace_a_newer_one(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, older = start(context)
    context.join("g", C, ["t6"])
    task, newer = start(context)
    assert finish(context, task, newer)
    before = target(context)
    assert finish(context, task, older) == []
    assert target(context) == before


def test_a_computation_that_failed_is_tried_again_by_the_next_heartbeat(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, _ = start(context)
    assert finish(context, task, RuntimeError("out of memory")) == []
    context.heartbeat("g", A, 2)
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 3


def test_a_restart_forgets_the_computation_and_the_next_heartbeat_asks_again(context: GroupContext) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    context.restart()
    assert context.tasks == []
    context.heartbeat("g", A, 2)
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 3


def test_small_groups_are_computed_within_the_request() -> None:
    context = GroupContext({"t6": 6, "t9": 9})
    context.join("g", A, ["t6"])
    assert context.join("g", B, ["t9"]).member_epoch == 3
    assert context.tasks == []


@pytest.mark.parametrize(
    ("interval", "partitions", "put_off"), [("0", 1_500, False), ("0", 3_000, True), ("500", 3_000, False)]
)
def test_what_takes_long_depends_on_the_assignment_interval(interval: str, partitions: int, put_off: bool) -> None:
    context = GroupContext({"big": partitions}, {"group.consumer.assignment.interval.ms": interval})
    context.join("g", A, ["big"])
    context.sleep(1000)
    context.join("g", B, ["big"])
    assert bool(context.tasks) is put_off


def test_different_subscriptions_count_for_more() -> None:
    context = GroupContext({"big": 1_000, "other": 1})
    context.join("g", A, ["big"])
    context.join("g", B, ["big", "other"])
    assert context.tasks == []
    context.join("g", C, ["big"])
    assert len(context.tasks) == 1
