# SPDX-License-Identifier: Apache-2.0
"""Classic groups of the pure core: barriers, timeouts, static members, and what a restart keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.coordinator.group.group import GroupTimer
from kcoord.runtime.result import TimerKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsResponse, JoinGroupRequest, JoinGroupResponse, SyncGroupResponse
from tests.unit.group.classic_members import ClassicConsumer, answered, settle, subscription
from tests.unit.group.group_context import Assigned, GroupContext, Waiting

DELAY = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "500"}


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6}, DELAY)


def describe(context: GroupContext, group: str, api_version: int = 6) -> DescribeGroupsResponse.DescribedGroup:
    return context.run(lambda ctx: context.shard.describe_groups(ctx, [group]), api_version)[0]


def state(context: GroupContext, group: str = "g") -> str:
    return describe(context, group).group_state


def consumers(context: GroupContext, count: int, **more: object) -> list[ClassicConsumer]:
    return [ClassicConsumer(context, "g", f"m{i}", ["t6"], **more) for i in range(count)]  # type: ignore[arg-type]


def error_of(run: Callable[[], object]) -> Errors:
    """The error of a refused request, whether it is raised or (JoinGroup of a classic group) a response with the id."""
    try:
        response = run()
    except KafkaError as error:
        return error.error
    assert isinstance(response, JoinGroupResponse)
    assert response.generation_id == -1
    return Errors(response.error_code)


@pytest.mark.parametrize("version", range(10))
def test_one_member_from_join_to_leave(context: GroupContext, version: int) -> None:
    member = ClassicConsumer(context, "g", "m0", ["t3"], version=version)
    first = member.join_once()
    if version >= 4:
        assert isinstance(first, JoinGroupResponse)
        assert (first.error_code, first.generation_id) == (Errors.MEMBER_ID_REQUIRED, -1)
        assert first.member_id.startswith("c-m0-")
        member.member_id = first.member_id
        first = member.join_once()
    context.sleep(0)
    joined = member.on_joined(first)
    assert (joined.generation_id, joined.protocol_name, joined.leader) == (1, "range", member.member_id)
    assert [shown.member_id for shown in joined.members] == [member.member_id]
    assert state(context) == "CompletingRebalance"
    assert member.on_synced(member.sync({member.member_id: {"t3": [0, 1, 2]}})) == {"t3": [0, 1, 2]}
    assert state(context) == "Stable"
    assert member.heartbeat() == 0
    assert member.leave() == [0]
    assert state(context) == "Empty"


def test_members_come_one_by_one_and_one_leaves(context: GroupContext) -> None:
    first, second, third = members = consumers(context, 3)
    settle(context, [first], {"t6": 6})
    joining = second.join()
    assert isinstance(joining, Waiting)
    assert state(context) == "PreparingRebalance"
    assert first.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    rejoined = first.join()
    assert first.on_joined(rejoined).generation_id == 2
    assert second.on_joined(joining).members == []
    waiting = second.sync()
    assert isinstance(waiting, Waiting)
    first.on_synced(first.sync({first.member_id: {"t6": [0, 1, 2]}, second.member_id: {"t6": [3, 4, 5]}}))
    assert second.on_synced(waiting) == {"t6": [3, 4, 5]}
    settle(context, members, {"t6": 6})
    assert {member.generation for member in members} == {3}
    assert third.leave() == [0]
    assert first.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    assert third.heartbeat() == Errors.UNKNOWN_MEMBER_ID


def test_follower_with_the_same_subscription_does_not_disturb(context: GroupContext) -> None:
    leader, follower = members = consumers(context, 2)
    settle(context, members, {"t6": 6})
    again = follower.join()
    assert isinstance(again, JoinGroupResponse)
    assert (again.error_code, again.generation_id) == (0, follower.generation)
    follower.topics = ["t3"]
    assert isinstance(follower.join(), Waiting)
    assert leader.heartbeat() == Errors.REBALANCE_IN_PROGRESS


def test_leader_that_rejoins_forces_a_rebalance(context: GroupContext) -> None:
    leader, follower = members = consumers(context, 2)
    settle(context, members, {"t6": 6})
    assert isinstance(leader.join(), Waiting)
    assert follower.heartbeat() == Errors.REBALANCE_IN_PROGRESS


def test_initial_delay_is_extended_while_members_come() -> None:
    context = GroupContext({"t6": 6}, {"group.initial.rebalance.delay.ms": "3000"})
    first, second = consumers(context, 2)
    one = first.join()
    context.sleep(2_000)
    two = second.join()
    context.sleep(1_500)
    assert isinstance(one, Waiting)
    assert one.answer is None
    context.sleep(2_500)
    assert first.on_joined(one).generation_id == second.on_joined(two).generation_id == 1


def test_absent_member_is_left_behind_after_the_rebalance_timeout(context: GroupContext) -> None:
    present, absent = members = consumers(context, 2)
    for member in members:
        member.session_timeout_ms = 1_000_000
    settle(context, members, {"t6": 6})
    present.topics = ["t3"]
    rejoining = present.join()
    context.sleep(59_999)
    assert isinstance(rejoining, Waiting)
    assert rejoining.answer is None
    context.sleep(1)
    assert [shown.member_id for shown in present.on_joined(rejoining).members] == [present.member_id]
    assert absent.heartbeat() == Errors.UNKNOWN_MEMBER_ID


def test_silent_member_is_removed_and_the_others_rebalance(context: GroupContext) -> None:
    alive, silent = members = consumers(context, 2)
    settle(context, members, {"t6": 6})
    context.sleep(6_000)
    assert alive.heartbeat() == 0
    fired = context.sleep(4_000)
    assert fired == [TimerKey(GroupTimer.CLASSIC_HEARTBEAT, "g", silent.member_id)]
    assert alive.heartbeat() == Errors.REBALANCE_IN_PROGRESS


def test_member_that_never_syncs_is_removed(context: GroupContext) -> None:
    first, lazy = consumers(context, 2)
    for member in (first, lazy):
        member.session_timeout_ms = 1_000_000
    replies = first.join(), lazy.join()
    context.sleep(0)
    first.on_joined(replies[0])
    lazy.on_joined(replies[1])
    first.on_synced(first.sync({first.member_id: {"t6": [0]}}))
    context.sleep(60_000)
    assert first.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    assert lazy.heartbeat() == Errors.UNKNOWN_MEMBER_ID


def test_pending_member_that_never_comes_back_is_forgotten(context: GroupContext) -> None:
    first, ghost = consumers(context, 2)
    settle(context, [first], {"t6": 6})
    ghost.join_once()
    first.topics = ["t3"]
    rejoining = first.join()
    assert isinstance(rejoining, Waiting)
    assert rejoining.answer is None
    context.sleep(10_000)
    assert first.on_joined(rejoining).generation_id == 2


def test_join_during_the_sync_phase_sends_the_waiting_back(context: GroupContext) -> None:
    leader, follower, late = consumers(context, 3)
    replies = leader.join(), follower.join()
    context.sleep(0)
    leader.on_joined(replies[0])
    follower.on_joined(replies[1])
    waiting = follower.sync()
    assert isinstance(late.join(), Waiting)
    assert answered(waiting).error_code == Errors.REBALANCE_IN_PROGRESS
    assert error_of(leader.sync) == Errors.REBALANCE_IN_PROGRESS


def test_validation(context: GroupContext) -> None:
    member = ClassicConsumer(context, "g", "m0", ["t3"])
    member.member_id = "no-such-member"
    assert error_of(member.join_once) == Errors.UNKNOWN_MEMBER_ID
    member = ClassicConsumer(context, "", "m0", ["t3"])
    assert error_of(member.join_once) == Errors.INVALID_GROUP_ID
    for timeout_ms in (10, 1_800_001):
        member = ClassicConsumer(context, "g", "m0", ["t3"])
        member.session_timeout_ms = timeout_ms
        assert error_of(member.join_once) == Errors.INVALID_SESSION_TIMEOUT
        member.member_id = "m0"
        refused = member.join_once()
        assert isinstance(refused, JoinGroupResponse)
        assert refused.member_id == "m0"
    member = ClassicConsumer(context, "g", "m0", ["t3"])
    member.protocols = []
    assert error_of(member.join_once) == Errors.INCONSISTENT_GROUP_PROTOCOL
    member.protocols, member.protocol_type = ["range"], ""
    assert error_of(member.join_once) == Errors.INCONSISTENT_GROUP_PROTOCOL
    assert "g" not in context.shard._groups


def test_protocol_selection_follows_the_votes(context: GroupContext) -> None:
    first, second, third = members = consumers(context, 3)
    first.protocols = ["range", "sticky"]
    second.protocols = ["sticky", "range", "own"]
    third.protocols = ["sticky", "range"]
    settle(context, members, {"t6": 6})
    assert describe(context, "g").protocol_data == "sticky"
    stranger = ClassicConsumer(context, "g", "x", ["t6"])
    stranger.protocols = ["own"]
    assert error_of(stranger.join_once) == Errors.INCONSISTENT_GROUP_PROTOCOL
    stranger.protocols, stranger.protocol_type = ["range"], "connect"
    assert error_of(stranger.join_once) == Errors.INCONSISTENT_GROUP_PROTOCOL


def test_commit_needs_the_present_generation(context: GroupContext) -> None:
    (member,) = consumers(context, 1)
    settle(context, [member], {"t6": 6})
    assert context.commit("g", {"t6": {0: 1}}, member=member.member_id, epoch=1) == {("t6", 0): 0}
    cases = [
        (member.member_id, 2, Errors.ILLEGAL_GENERATION),
        ("x", 1, Errors.UNKNOWN_MEMBER_ID),
        ("", -1, Errors.UNKNOWN_MEMBER_ID),
    ]
    for member_id, generation, error in cases:
        assert error_of(partial(context.commit, "g", {"t6": {0: 9}}, member=member_id, epoch=generation)) == error
    member.topics = ["t3"]
    member.on_joined(member.join())
    between = error_of(lambda: context.commit("g", {"t6": {0: 9}}, member=member.member_id, epoch=2))
    assert between == Errors.REBALANCE_IN_PROGRESS
    assert context.fetch("g") == {("t6", 0): (1, "")}


def test_commit_keeps_the_member_alive(context: GroupContext) -> None:
    (member,) = consumers(context, 1)
    settle(context, [member], {"t6": 6})
    context.sleep(8_000)
    context.commit("g", {"t6": {0: 1}}, member=member.member_id, epoch=1)
    assert context.sleep(8_000) == []


def test_group_is_full() -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.max.size": "1"})
    first, second = consumers(context, 2)
    settle(context, [first], {"t6": 6})
    assert error_of(second.join) == Errors.GROUP_MAX_SIZE_REACHED


class TestStaticMembers:
    def test_returns_without_a_rebalance(self, context: GroupContext) -> None:
        leader, follower = members = consumers(context, 2)
        follower.instance = "i1"
        settle(context, members, {"t6": 6})
        old_id, follower.member_id = follower.member_id, ""
        back = follower.join()
        assert isinstance(back, JoinGroupResponse)
        assert (back.error_code, back.generation_id, back.member_id != old_id) == (0, 1, True)
        assert len(context.records) == 1
        follower.on_joined(back)
        assert follower.on_synced(follower.sync()) == {"t6": [1, 3, 5]}
        assert leader.heartbeat() == 0
        follower.member_id = old_id
        assert follower.heartbeat() == Errors.FENCED_INSTANCE_ID

    @pytest.mark.parametrize(("version", "leads"), [(8, False), (9, True)])
    def test_returning_leader_must_not_assign_again(self, context: GroupContext, version: int, leads: bool) -> None:
        leader, follower = members = consumers(context, 2, version=version)
        leader.instance = "i0"
        settle(context, members, {"t6": 6})
        leader.member_id = ""
        back = leader.on_joined(leader.join())
        assert (leader.leads, back.skip_assignment, bool(back.members)) == (leads, leads, leads)
        assert follower.heartbeat() == 0

    def test_returning_with_other_topics_rebalances(self, context: GroupContext) -> None:
        first, second = members = consumers(context, 2)
        first.instance = "i0"
        settle(context, members, {"t6": 6})
        first.member_id, first.topics = "", ["t3"]
        assert isinstance(first.join(), Waiting)
        assert second.heartbeat() == Errors.REBALANCE_IN_PROGRESS

    def test_returning_with_other_owned_partitions_does_not(self, context: GroupContext) -> None:
        first, second = members = consumers(context, 2, cooperative=True)
        second.instance = "i1"
        settle(context, members, {"t6": 6})
        second.member_id = ""
        assert second.owned
        assert isinstance(second.join(), JoinGroupResponse)
        assert first.heartbeat() == 0

    def test_stays_through_a_rebalance_it_misses(self, context: GroupContext) -> None:
        present, away = members = consumers(context, 2)
        away.instance = "i1"
        away.session_timeout_ms = 1_000_000
        settle(context, members, {"t6": 6})
        present.topics = ["t6", "t3"]
        rejoining = present.join()
        for _ in range(7):
            context.sleep(9_000)
        shown = {member.group_instance_id for member in present.on_joined(rejoining).members}
        assert shown == {None, "i1"}

    def test_administrator_removes_by_instance_id(self, context: GroupContext) -> None:
        (member,) = consumers(context, 1)
        member.instance = "i1"
        settle(context, [member], {"t6": 6})
        member.member_id = ""
        assert member.leave() == [0]
        assert state(context) == "Empty"
        assert member.leave() == [Errors.UNKNOWN_MEMBER_ID]


def test_restart_keeps_the_last_complete_generation(context: GroupContext) -> None:
    members = consumers(context, 2)
    settle(context, members, {"t6": 6})
    context.restart()
    assert [member.heartbeat() for member in members] == [0, 0]
    assert [member.on_synced(member.sync()) for member in members] == [{"t6": [0, 2, 4]}, {"t6": [1, 3, 5]}]
    settle(context, members, {"t6": 6})
    assert {member.generation for member in members} == {2}
    assert context.sleep(10_000)
    assert state(context) in ("PreparingRebalance", "Empty")


def test_subscribed_topics_protect_their_offsets(context: GroupContext) -> None:
    (member,) = consumers(context, 1)
    settle(context, [member], {"t6": 6})
    group = context.shard._groups["g"]
    assert group.is_subscribed_to("t6")
    assert not group.is_subscribed_to("t3")
    member.leave()
    assert not context.shard._groups["g"].is_subscribed_to("t6")


V0 = subscription(["t6"], version=0)[2:]


@pytest.mark.parametrize(
    ("metadata", "is_protected"),
    [
        (b"\x00\x01" + V0, False),
        (b"\x00\x03" + V0, False),
        (b"\x00\x09" + V0, False),
        (b"\xff\xff" + V0, False),
        (b"\x00\x00" + V0 + b"junk", False),
        (b"\x00\x03" + V0 + b"\x00\x00\x00\x05", False),
        (b"\x00\x00" + V0[:-1], True),
        (b"\x00\x00" + V0[:-4], True),
        (b"\x00", True),
    ],
)
def test_a_subscription_is_read_as_version_zero_to_learn_its_topics(
    context: GroupContext, metadata: bytes, is_protected: bool
) -> None:
    """KIP-496. Apache Kafka 4.3.1 gave these answers to an OffsetDelete of a topic that is not subscribed to."""
    (member,) = consumers(context, 1)
    member.metadata = metadata
    settle(context, [member], {})
    group = context.shard._groups["g"]
    assert (group.is_subscribed_to("t6"), group.is_subscribed_to("t3")) == (True, is_protected)
    context.restart()
    group = context.shard._groups["g"]
    assert (group.is_subscribed_to("t6"), group.is_subscribed_to("t3")) == (True, is_protected)


def test_assignments_are_described_while_the_group_rebalances(context: GroupContext) -> None:
    """Apache Kafka 4.3.1 answered the same dialogue like this: metadata only if Stable, the last assignments always."""

    def shown() -> tuple[str, list[bool], list[Assigned]]:
        group = describe(context, "g")
        assignments = [consumer_protocol.read_assignment(member.member_assignment) for member in group.members]
        by_name = [{t.topic: t.partitions for t in given.assigned_partitions} if given else {} for given in assignments]
        return group.group_state, [bool(member.member_metadata) for member in group.members], by_name

    first, second, third = consumers(context, 3)
    settle(context, [first], {"t6": 6})
    everything = {"t6": [0, 1, 2, 3, 4, 5]}
    assert shown() == ("Stable", [True], [everything])
    joining = second.join()
    assert shown() == ("PreparingRebalance", [False] * 2, [everything, {}])
    first.on_joined(first.join())
    second.on_joined(joining)
    assert shown() == ("CompletingRebalance", [False] * 2, [everything, {}])
    second.sync()
    assert shown() == ("CompletingRebalance", [False] * 2, [everything, {}])
    joining = third.join()
    assert shown() == ("PreparingRebalance", [False] * 3, [{}, {}, {}])
    again = second.join()
    first.on_joined(first.join())
    second.on_joined(again)
    third.on_joined(joining)
    assert shown() == ("CompletingRebalance", [False] * 3, [{}, {}, {}])
    plan: dict[str, Assigned] = {first.member_id: {"t6": [0]}, second.member_id: {"t6": [1]}, third.member_id: {}}
    first.on_synced(first.sync(plan))
    assert shown() == ("Stable", [True] * 3, [{"t6": [0]}, {"t6": [1]}, {}])
    third.leave()
    assert shown() == ("PreparingRebalance", [False] * 2, [{"t6": [0]}, {"t6": [1]}])


def test_no_consumer_group_is_described_by_an_empty_id(context: GroupContext) -> None:
    described = context.describe("")
    assert (described.error_code, described.error_message) == (Errors.INVALID_GROUP_ID, None)


def test_describe_of_what_is_no_classic_group(context: GroupContext) -> None:
    context.join("c", "member-a", ["t3"])
    for group in ("c", "nogroup"):
        assert (describe(context, group, 5).error_code, describe(context, group, 5).group_state) == (0, "Dead")
        assert describe(context, group, 6).error_code == Errors.GROUP_ID_NOT_FOUND


def test_empty_consumer_group_becomes_classic_with_its_offsets(context: GroupContext) -> None:
    context.join("g", "member-a", ["t3"])
    context.commit("g", {"t3": {0: 7}}, member="member-a", epoch=2)
    context.heartbeat("g", "member-a", -1)
    (member,) = consumers(context, 1)
    settle(context, [member], {"t6": 6})
    assert member.generation == 1
    assert context.fetch("g") == {("t3", 0): (7, "")}
    context.restart()
    assert member.heartbeat() == 0


def test_other_protocol_types(context: GroupContext) -> None:
    worker = ClassicConsumer(context, "g", "w", [])
    worker.protocol_type, worker.protocols = "connect", ["sessioned"]
    settle(context, [worker], {})
    assert (describe(context, "g").protocol_type, state(context)) == ("connect", "Stable")
    assert error_of(lambda: context.join("g", "member-a", ["t3"])) == Errors.GROUP_ID_NOT_FOUND


def test_storm_of_joins_needs_two_requests_a_member() -> None:
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


def test_an_assignment_that_fits_in_no_record_is_refused_and_the_group_begins_anew(context: GroupContext) -> None:
    """Nobody waits for it: all who asked are told, and join again. The first SyncGroup of a generation as well."""
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


def test_a_static_member_whose_metadata_fits_in_no_record_is_refused_before_anything_changes(
    context: GroupContext,
) -> None:
    """Apache Kafka 4.3.1 answers UNKNOWN_SERVER_ERROR too, and the member that has the instance id lives on."""
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
