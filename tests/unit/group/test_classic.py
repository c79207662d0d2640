# SPDX-License-Identifier: Apache-2.0
"""Classic groups, in addition to `tests/transcripts/classic`: many members, and groups too large for a record."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsResponse, JoinGroupRequest, JoinGroupResponse, SyncGroupResponse
from tests.unit.group.classic_members import ClassicConsumer, answered, settle, subscription
from tests.unit.group.group_context import GroupContext

DELAY = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6}, DELAY)


def describe(context: GroupContext, group: str, api_version: int = 6) -> DescribeGroupsResponse.DescribedGroup:
    return context.run(lambda ctx: context.shard.describe_groups(ctx, [group]), api_version)[0].complete()


def state(context: GroupContext, group: str = "g") -> str:
    return describe(context, group).group_state


def consumers(context: GroupContext, count: int, **more: object) -> list[ClassicConsumer]:
    return [ClassicConsumer(context, "g", f"m{i}", ["t6"], **more) for i in range(count)]  # type: ignore[arg-type]


def error_of(run: Callable[[], object]) -> Errors:
    """Returns the error of a rejected request, which is raised or (JoinGroup of a classic group) in the response."""
    try:
        response = run()
    except KafkaError as error:
        return error.error
    assert isinstance(response, JoinGroupResponse)
    assert response.generation_id == -1
    return Errors(response.error_code)


def test_a_storm_of_joins_needs_two_requests_per_member() -> None:
    context = GroupContext({"t6": 6}, DELAY)
    members = consumers(context, 300)
    calls = 0
    original = context.shard.join_group

    def counting(ctx: object, request: JoinGroupRequest) -> object:
        nonlocal calls
        calls += 1
        return original(ctx, request)  # type: ignore[arg-type]

    context.shard.join_group = counting  # type: ignore[method-assign, assignment]
    settle(context, members, {"t6": 6})
    assert calls == 600
    assert {member.generation for member in members} == {1}


def test_an_assignment_too_large_for_a_record_is_rejected_and_the_group_rebalances(context: GroupContext) -> None:
    """All waiting SyncGroup requests fail, also the first one of the generation, and the members join again."""
    members = consumers(context, 2)
    settle(context, members, {"t6": 6})
    leader = next(member for member in members if member.leads)
    follower = next(member for member in members if not member.leads)
    joining = leader.join()
    follower.on_joined(follower.join())
    leader.on_joined(joining)
    waiting = follower.sync()
    refused = leader.sync({leader.member_id: {"t" * 30_000 + str(number): [0] for number in range(40)}})
    for reply in (waiting, refused):
        answer = answered(reply)
        assert isinstance(answer, SyncGroupResponse)
        assert answer.error_code == Errors.UNKNOWN_SERVER_ERROR
    assert state(context) == "PreparingRebalance"
    assert follower.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    settle(context, members, {"t6": 6})
    assert state(context) == "Stable"


def test_a_static_member_with_metadata_too_large_for_a_record_is_rejected_without_a_change(
    context: GroupContext,
) -> None:
    """Apache Kafka 4.3.1 returns UNKNOWN_SERVER_ERROR too, and the holder of the instance id stays a member."""
    (first,) = consumers(context, 1, instance="i1")
    settle(context, [first], {"t6": 6})
    before, timers, version = describe(context, "g"), dict(context.timers), context.shard._groups["g"].version
    (large,) = consumers(context, 1, instance="i1")
    large.metadata = subscription(["t6"]) + bytes(1_100_000)
    assert error_of(large.join_once) is Errors.UNKNOWN_SERVER_ERROR
    assert (describe(context, "g"), context.timers, context.shard._groups["g"].version) == (before, timers, version)
    assert not context.records
    assert first.heartbeat() == 0
    (second,) = consumers(context, 1, instance="i1")
    assert second.on_joined(second.join()).generation_id == first.generation
    assert second.on_synced(second.sync()) == first.owned
    assert first.heartbeat() == Errors.FENCED_INSTANCE_ID


def test_a_pending_member_may_join_with_the_instance_id_of_another_member(context: GroupContext) -> None:
    """It keeps the instance id, also after the former holder is removed."""
    holder = ClassicConsumer(context, "g", "holder", ["t6"], instance="i")
    settle(context, [holder], {"t6": 6})
    newcomer = ClassicConsumer(context, "g", "newcomer", ["t6"])
    response = newcomer.join_once()
    assert isinstance(response, JoinGroupResponse)
    assert response.error_code == Errors.MEMBER_ID_REQUIRED
    newcomer.member_id, newcomer.instance = response.member_id, "i"
    newcomer.join_once()
    assert {member.member_id for member in describe(context, "g").members} == {holder.member_id, newcomer.member_id}
    context.sleep(120_000)
    assert state(context) == "Empty"
    settle(context, [ClassicConsumer(context, "g", "holder", ["t6"], instance="i")], {"t6": 6})
