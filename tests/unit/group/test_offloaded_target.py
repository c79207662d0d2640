# SPDX-License-Identifier: Apache-2.0
"""A target assignment that is computed in the background: members see the old target, and later changes are kept."""

from __future__ import annotations

from functools import partial

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.consumer.assignment import (
    ComputedTarget,
    ComputeTarget,
    TargetInput,
    compute,
    encode,
)
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext, Task
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import Ready
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from tests.support.calls import count_calls
from tests.unit.group.group_context import SERDE, GroupContext
from tests.unit.group.images import image_of

A, B, C = "member-a", "member-b", "member-c"


class Context(GroupContext):
    """A context with background tasks. `in_thread`: a task also encodes its records, as a background thread does."""

    def __init__(self, *, in_thread: bool) -> None:
        super().__init__({"t6": 6, "t9": 9}, {"kcoord.assignor.inline.ms": "0"})
        self.in_thread = in_thread

    def computed(self, target: TargetInput) -> ComputedTarget:
        computed = compute(target)
        if self.in_thread:
            encode(computed, SERDE.serialize)
        return computed


@pytest.fixture(params=[False, True], ids=["on the loop", "in a thread"])
def context(request: pytest.FixtureRequest) -> Context:
    return Context(in_thread=request.param)


def start(context: Context) -> tuple[Task, ComputedTarget]:
    """Takes the only task and computes its value; `finish` passes the value to the shard."""
    (task,) = context.tasks
    context.tasks = []
    assert isinstance(task.work, ComputeTarget)
    target = context.shard.target_input(task.work)
    assert target is not None
    return task, context.computed(target)


def finish(context: GroupContext, task: Task, value: object) -> list[str]:
    """Completes a task; returns the types of its records."""
    context.run(partial(context.shard.complete_task, task=task, value=value))
    return [type(record.key).__name__.removeprefix("ConsumerGroupTargetAssignment") for record in context.records]


def target(context: GroupContext, group: str = "g") -> dict[str, list[int]]:
    return {
        member.member_id: sorted(p for topic in member.target_assignment.topic_partitions for p in topic.partitions)
        for member in context.describe(group).members
    }


def test_the_first_target_of_a_group_is_computed_at_once(context: Context) -> None:
    response = context.join("g", A, ["t6"])
    assert context.assigned(response) == {"t6": [0, 1, 2, 3, 4, 5]}
    assert context.tasks == []


def test_a_joining_member_has_the_old_target_until_the_new_one_is_computed(context: Context) -> None:
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


def test_one_computation_serves_all_members_that_joined_meanwhile(context: Context) -> None:
    context.join("g", A, ["t6"])
    for number in range(5):
        context.join("g", f"member-{number}", ["t6"])
    assert len(context.tasks) == 1
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 7
    assert sorted(map(len, target(context).values())) == [1] * 6
    context.heartbeat("g", A, 2)
    assert context.tasks == []


def test_a_member_that_joined_too_late_is_in_the_next_target(context: Context) -> None:
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


def test_a_member_that_left_meanwhile_gets_no_target(context: Context) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, computed = start(context)
    context.heartbeat("g", B, -1)
    assert finish(context, task, computed) == ["MemberKey", "MetadataKey"]
    context.heartbeat("g", A, 2)
    context.run_tasks()
    assert target(context) == {A: [0, 1, 2, 3, 4, 5]}


def test_a_member_that_replaced_a_static_member_gets_its_target(context: Context) -> None:
    context.join("g", A, ["t6"], instance="i1")
    context.join("g", B, ["t6"])
    task, computed = start(context)
    assert A in computed.changed
    context.heartbeat("g", A, -2, instance="i1")
    context.join("g", C, ["t6"], instance="i1")
    context.tasks = []
    finish(context, task, computed)
    assert target(context) == {B: [3, 4, 5], C: [0, 1, 2]}


def test_a_target_of_a_group_that_was_deleted_and_created_again_is_dropped(context: Context) -> None:
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


def test_an_older_target_does_not_replace_a_newer_one(context: Context) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, older = start(context)
    context.join("g", C, ["t6"])
    task, newer = start(context)
    assert finish(context, task, newer)
    before = target(context)
    assert finish(context, task, older) == []
    assert target(context) == before


def test_a_computation_that_failed_is_tried_again_by_the_next_heartbeat(context: Context) -> None:
    context.join("g", A, ["t6"])
    context.join("g", B, ["t6"])
    task, _ = start(context)
    assert finish(context, task, RuntimeError("out of memory")) == []
    context.heartbeat("g", A, 2)
    context.run_tasks()
    assert context.describe("g").assignment_epoch == 3


def test_a_restart_forgets_the_computation_and_the_next_heartbeat_asks_again(context: Context) -> None:
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
    ("interval", "inline", "partitions", "put_off"),
    [
        ("0", "10", 1_992, False),
        ("0", "10", 1_993, True),
        ("500", "10", 9_992, False),
        ("500", "10", 9_993, True),
        ("500", "2", 3_992, False),
        ("500", "2", 3_993, True),
    ],
)
def test_the_limit_of_a_computation_depends_on_the_assignment_interval(
    interval: str, inline: str, partitions: int, put_off: bool
) -> None:
    """A member costs 4 us, a partition 0.5 us. More than 1 % of the interval is too long, but never 1 ms or less."""
    configs = {"group.consumer.assignment.interval.ms": interval, "kcoord.assignor.inline.ms": inline}
    context = GroupContext({"big": partitions}, configs)
    context.join("g", A, ["big"])
    context.sleep(1000)
    context.join("g", B, ["big"])
    assert bool(context.tasks) is put_off


def test_different_subscriptions_cost_more() -> None:
    context = GroupContext({"big": 1_000, "other": 1})
    context.join("g", A, ["big"])
    context.join("g", B, ["big", "other"])
    assert context.tasks == []
    context.join("g", C, ["big"])
    assert len(context.tasks) == 1


def calls_on_the_loop(members: int) -> int:
    """Returns the cost of a new target for all members in the event loop: input, installation and write."""
    config = BrokerConfig.from_properties(
        {"kcoord.assignor.inline.ms": "0", "group.consumer.assignment.interval.ms": "1000"}
    )
    image = image_of({"t": 2 * members}, epoch=1)
    runtime = ShardSet(lambda _: GroupCoordinatorShard(config, image), SERDE)
    runtime.load(0, (), 0)
    now_ms = 1000

    def poll() -> Ready:
        ready = runtime.poll(now_ms)
        for append in ready.appends:
            runtime.written(append)
        return ready

    def join(number: int) -> Ready:
        request = ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id=f"m{number}",
            rebalance_timeout_ms=1000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        )
        context = OperationContext(now_ms, 1, token=number)
        runtime.run(0, GroupCoordinatorShard.consumer_group_heartbeat, request, context)
        return poll()

    for number in range(members):
        join(number)
    now_ms += 2000
    ((_, task),) = join(members).tasks
    machine = runtime.machine(0)
    assert machine is not None
    inputs: list[TargetInput | None] = []
    calls = count_calls(lambda: inputs.append(machine.target_input(ComputeTarget("g"))))
    (target,) = inputs
    assert target is not None
    computed = compute(target)
    encode(computed, SERDE.serialize)
    assert len(computed.changed) == members + 1
    calls += count_calls(lambda: runtime.complete_task(0, task, computed, OperationContext(now_ms)))
    calls += count_calls(poll)
    (described,) = machine.consumer_group_describe(OperationContext(now_ms), ["g"]).response
    assert described.group.assignment_epoch == members + 2
    return calls


def test_the_cost_of_a_target_in_the_event_loop_does_not_depend_on_the_members() -> None:
    assert calls_on_the_loop(200) < calls_on_the_loop(20) + 10
