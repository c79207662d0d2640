# SPDX-License-Identifier: Apache-2.0
"""A group with an assignor of one's own: it computes in the background, and may fail."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.assignor import ASSIGNORS
from kcoord.coordinator.group.consumer.assignment import (
    ComputedTarget,
    ComputeTarget,
    FailedComputation,
    computed_target,
    member_specs,
)
from kcoord.runtime.result import Task
from tests.unit.group.group_context import DEFAULTS, GroupContext

A, B = "member-a", "member-b"
OWNED = {"t": [0, 1, 2, 3]}


@pytest.fixture
def context() -> GroupContext:
    settings = {
        "group.consumer.assignors": "uniform,pack.age:Own",
        "group.consumer.session.timeout.ms": "1000000",
        "group.consumer.max.session.timeout.ms": "1000000",
    }
    config = BrokerConfig.from_properties(DEFAULTS | settings)
    config.name_assignor("pack.age:Own", "own")
    return GroupContext({"t": 4}, config=config)


def join(context: GroupContext, member: str) -> int:
    return context.join("g", member, ["t"], assignor="own").member_epoch


def asked(context: GroupContext) -> Task | None:
    """Returns the task that the last requests started, if any."""
    return context.tasks.pop() if context.tasks else None


def computed(context: GroupContext) -> ComputedTarget:
    """Returns what an assignor that is like `range` computes now."""
    work = context.shard.target_input(ComputeTarget("g"))
    assert work is not None
    assert work.assignor == "own"
    specs = member_specs(work)
    return computed_target(work, specs, ASSIGNORS["range"].assign(specs, work.partition_counts))


def complete(context: GroupContext, task: Task | None, value: object) -> None:
    assert task is not None
    context.run(lambda ctx: context.shard.complete_task(ctx, task, value))


def fail(context: GroupContext, task: Task | None, reason: str = "ValueError: no") -> None:
    complete(context, task, FailedComputation("g", "own", reason))


def test_members_of_a_new_group_have_nothing_until_the_first_result(context: GroupContext) -> None:
    response = context.join("g", A, ["t"], assignor="own")
    assert response.member_epoch >= 1
    assert context.assigned(response) == {}
    context.restart()
    assert context.heartbeat("g", A, response.member_epoch, owned={}).member_epoch == response.member_epoch
    complete(context, asked(context), computed(context))
    answer = context.heartbeat("g", A, response.member_epoch, owned={})
    assert context.assigned(answer) == OWNED
    assert answer.member_epoch == response.member_epoch + 1
    assert asked(context) is None


def test_a_failure_keeps_the_target_and_the_pauses_grow(context: GroupContext) -> None:
    epoch = join(context, A)
    complete(context, asked(context), computed(context))
    epoch = context.heartbeat("g", A, epoch, owned={}).member_epoch
    join(context, B)
    for pause_ms in (2_000, 4_000, 8_000, 16_000, 32_000, 60_000, 60_000):
        task = asked(context)
        fail(context, task)
        context.sleep(pause_ms - 1)
        answer = context.heartbeat("g", A, epoch, owned=OWNED)
        assert (answer.member_epoch, answer.assignment) == (epoch, None)
        assert asked(context) is None
        context.sleep(1)
        context.heartbeat("g", A, epoch, owned=OWNED)
    described = context.describe("g")
    assert (described.failed_computations, described.assignor_error) == (7, "ValueError: no")
    assert described.group_state == "Assigning"
    assert context.shard.counters.assignor_failures == {"own": 7}
    complete(context, asked(context), computed(context))
    described = context.describe("g")
    assert (described.failed_computations, described.assignor_error) == (0, "")
    assert context.assigned(context.heartbeat("g", A, epoch, owned=OWNED)) == {"t": [0, 1]}


def test_a_restart_forgets_the_pause(context: GroupContext) -> None:
    epoch = join(context, A)
    fail(context, asked(context))
    context.restart()
    context.heartbeat("g", A, epoch, owned={})
    assert asked(context) is not None


def test_a_group_that_turns_to_a_built_in_assignor_does_not_wait_for_the_pause(context: GroupContext) -> None:
    epoch = join(context, A)
    fail(context, asked(context))
    answer = context.heartbeat("g", A, epoch, assignor="uniform", owned={})
    assert context.assigned(answer) == OWNED
    assert context.describe("g").failed_computations == 0


def test_a_changed_rack_is_a_new_epoch(context: GroupContext) -> None:
    epoch = join(context, A)
    complete(context, asked(context), computed(context))
    epoch = context.heartbeat("g", A, epoch, owned={}).member_epoch
    context.heartbeat("g", A, epoch, owned=OWNED, rack="r1")
    assert context.describe("g").group_epoch == epoch + 1


def test_a_group_without_topics_has_its_empty_target_at_once(context: GroupContext) -> None:
    answer = context.join("g", A, ["absent"], assignor="own")
    assert context.assigned(answer) == {}
    group = context.describe("g")
    assert group.assignment_epoch in (group.group_epoch - 1, group.group_epoch)
    if group.assignment_epoch < group.group_epoch:
        complete(context, asked(context), computed(context))
    assert context.describe("g").assignment_epoch == group.group_epoch
