# SPDX-License-Identifier: Apache-2.0
"""Online migration between the protocols (KIP-848 case study "Online Migration")."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsResponse, JoinGroupResponse
from tests.unit.group.classic_members import ClassicConsumer, answered, settle
from tests.unit.group.group_context import Assigned, GroupContext, Waiting

DELAY = {"group.initial.rebalance.delay.ms": "0"}
NEW = "member-n"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t6": 6}, DELAY)


def described(context: GroupContext) -> DescribeGroupsResponse.DescribedGroup:
    return context.run(lambda ctx: context.shard.describe_groups(ctx, ["g"]), 6)[0]


def classic(context: GroupContext, count: int, **more: object) -> list[ClassicConsumer]:
    members = [ClassicConsumer(context, "g", f"m{i}", ["t6"], **more) for i in range(count)]  # type: ignore[arg-type]
    settle(context, members, {"t6": 6})
    return members


def answered_join(reply: JoinGroupResponse | Waiting) -> JoinGroupResponse:
    response = answered(reply)
    assert isinstance(response, JoinGroupResponse)
    return response


def drive(member: ClassicConsumer) -> Assigned:
    """One turn of a classic consumer: heartbeat, and rejoin and sync when it is told to."""
    if member.heartbeat() in (Errors.REBALANCE_IN_PROGRESS, Errors.ILLEGAL_GENERATION):
        if not member.cooperative:
            member.owned = {}
        reply = member.join()
        assert isinstance(reply, JoinGroupResponse), "classic members of a consumer group never wait"
        member.on_joined(reply)
        member.on_synced(member.sync())
    return member.owned


def converge(
    context: GroupContext, members: list[ClassicConsumer], epoch: int, owned: Assigned | None = None
) -> tuple[Assigned, int]:
    """Let everybody work until nothing changes; returns what the new member owns and its epoch.

    At every moment no partition has two owners.
    """
    owned = owned or {}
    for _ in range(8):
        for member in members:
            drive(member)
            check_single_owners([*(m.owned for m in members), owned])
        response = context.heartbeat("g", NEW, epoch, owned=owned)
        epoch = response.member_epoch
        assigned = context.assigned(response)
        owned = assigned if assigned is not None else owned
        check_single_owners([*(m.owned for m in members), owned])
    return owned, epoch


def check_single_owners(owned: list[Assigned]) -> None:
    partitions = [(topic, p) for assigned in owned for topic, ps in assigned.items() for p in ps]
    assert len(partitions) == len(set(partitions)), owned


@pytest.mark.parametrize("cooperative", [False, True])
def test_upgrade_and_downgrade(context: GroupContext, cooperative: bool) -> None:
    members = classic(context, 2, cooperative=cooperative)
    settle(context, members, {"t6": 6})
    generation = members[0].generation
    joined = context.join("g", NEW, ["t6"])
    assert joined.member_epoch == generation + 1
    group = context.describe("g")
    assert {m.member_id: m.member_type for m in group.members} == {
        members[0].member_id: 0,
        members[1].member_id: 0,
        NEW: 1,
    }
    owned, epoch = converge(context, members, joined.member_epoch)
    assert sorted(p for m in (*(m.owned for m in members), owned) for p in m["t6"]) == [0, 1, 2, 3, 4, 5]
    assert [len(o["t6"]) for o in (members[0].owned, members[1].owned, owned)] == [2, 2, 2]
    assert context.describe("g").group_state == "Stable"
    context.restart()
    assert [drive(member) for member in members] == [members[0].owned, members[1].owned]
    # And back: the last member of the consumer protocol leaves.
    context.heartbeat("g", NEW, -1)
    context.sleep(0)
    group_now = described(context)
    assert (group_now.error_code, group_now.group_state) == (0, "PreparingRebalance")
    assert [member.heartbeat() for member in members] == [Errors.REBALANCE_IN_PROGRESS] * 2
    settle(context, members, {"t6": 6})
    assert members[0].generation > epoch
    assert described(context).group_state == "Stable"
    context.restart()
    assert [member.heartbeat() for member in members] == [0, 0]


def test_upgrade_sends_waiting_members_back(context: GroupContext) -> None:
    first, second = classic(context, 2)
    first.topics = ["t6", "x"]
    waiting = first.join()
    context.join("g", NEW, ["t6"])
    assert waiting.answer.error_code == Errors.REBALANCE_IN_PROGRESS  # type: ignore[union-attr]
    assert second.heartbeat() == Errors.REBALANCE_IN_PROGRESS


def test_a_group_is_converted_during_its_first_rebalance() -> None:
    """Apache Kafka 4.3.1 answers UNKNOWN_SERVER_ERROR, since the group has no protocol yet."""
    context = GroupContext({"t6": 6}, {"group.initial.rebalance.delay.ms": "3000"})
    member = ClassicConsumer(context, "g", "a", ["t6"])
    waiting = member.join()
    assert described(context).group_state == "PreparingRebalance"
    joined = context.join("g", NEW, ["t6"])
    assert answered_join(waiting).error_code == Errors.REBALANCE_IN_PROGRESS
    owned, _ = converge(context, [member], joined.member_epoch, context.assigned(joined))
    assert sorted(owned["t6"] + member.owned["t6"]) == [0, 1, 2, 3, 4, 5]


def test_a_classic_successor_takes_the_place_of_a_static_member_in_a_full_group() -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.consumer.max.size": "2"})
    context.join("g", NEW, ["t6"])
    static, other = (ClassicConsumer(context, "g", name, ["t6"], instance=name) for name in ("i1", "i2"))
    static.on_joined(static.join())
    with pytest.raises(KafkaError) as caught:
        other.join()
    assert caught.value.error == Errors.GROUP_MAX_SIZE_REACHED
    successor = ClassicConsumer(context, "g", "i1", ["t6"], instance="i1")
    successor.on_joined(successor.join())
    assert {member.member_id for member in context.describe("g").members} == {NEW, successor.member_id}


def test_silent_consumer_member_brings_the_group_back(context: GroupContext) -> None:
    members = classic(context, 1)
    members[0].session_timeout_ms = 100_000
    context.join("g", NEW, ["t6"])
    for _ in range(9):
        drive(members[0])
        context.sleep(5_000)
    assert described(context).error_code == 0
    settle(context, members, {"t6": 6})
    assert members[0].owned == {"t6": [0, 1, 2, 3, 4, 5]}


def test_static_member_changes_protocol_and_keeps_its_assignment(context: GroupContext) -> None:
    other, static = [
        ClassicConsumer(context, "g", "a", ["t6"]),
        ClassicConsumer(context, "g", "b", ["t6"], instance="i1"),
    ]
    settle(context, [other, static], {"t6": 6})
    joined = context.join("g", NEW, ["t6"], instance="i1", assignor=None)
    assert context.assigned(joined) == static.owned
    assert static.heartbeat() == Errors.FENCED_INSTANCE_ID
    assert drive(other) == {"t6": [0, 2, 4]}
    back = ClassicConsumer(context, "g", "b", ["t6"], instance="i1")
    back.on_joined(back.join())
    context.sleep(0)
    assert described(context).error_code == 0
    settle(context, [other, back], {"t6": 6})
    assert sorted(other.owned["t6"] + back.owned["t6"]) == [0, 1, 2, 3, 4, 5]


def rolled_back(context: GroupContext, *, is_settled: bool = True) -> tuple[ClassicConsumer, ClassicConsumer]:
    """A classic member, and the successor of the only static member of the consumer protocol, which has just joined."""
    context.join("g", NEW, ["t6"], instance="i1")
    other, back = (ClassicConsumer(context, "g", name, ["t6"], instance=name) for name in ("i0", "i1"))
    other.on_joined(other.join())
    other.on_synced(other.sync())
    if is_settled:
        converge(context, [other], 2, {"t6": [0, 1, 2, 3, 4, 5]})
        assert context.describe("g").group_state == "Stable"
    back.on_joined(back.join())
    return other, back


@pytest.mark.parametrize("crashes", [False, True])
def test_a_rollback_without_anything_to_move_does_not_rebalance(context: GroupContext, crashes: bool) -> None:
    """Apache Kafka 4.3.1 converts the group when its last static member comes back, and lets it be Stable too."""
    other, back = rolled_back(context)
    if crashes:
        context.restart()
    context.sleep(0)
    assert (described(context).error_code, described(context).group_state) == (0, "Stable")
    assert len(back.on_synced(back.sync())["t6"]) == len(other.owned["t6"]) == 3
    assert [member.heartbeat() for member in (other, back)] == [0, 0]
    context.sleep(5_000)
    assert [member.heartbeat() for member in (other, back)] == [0, 0]
    context.restart()
    context.sleep(0)
    assert [member.heartbeat() for member in (other, back)] == [0, 0]
    check_single_owners([other.owned, back.owned])
    settle(context, [other, back], {"t6": 6})


@pytest.mark.parametrize("crashes", [False, True])
def test_a_rollback_of_a_group_that_is_not_settled_rebalances(context: GroupContext, crashes: bool) -> None:
    other, back = rolled_back(context, is_settled=False)
    if crashes:
        context.restart()
    context.sleep(0)
    assert (described(context).error_code, described(context).group_state) == (0, "PreparingRebalance")
    settle(context, [other, back], {"t6": 6})
    assert sorted(other.owned["t6"] + back.owned["t6"]) == [0, 1, 2, 3, 4, 5]


def test_the_rebalance_of_a_downgrade_survives_a_crash(context: GroupContext) -> None:
    members = classic(context, 2)
    joined = context.join("g", NEW, ["t6"])
    converge(context, members, joined.member_epoch)
    context.heartbeat("g", NEW, -1)
    context.restart()
    context.sleep(0)
    assert described(context).group_state == "PreparingRebalance"
    settle(context, members, {"t6": 6})
    assert sorted(members[0].owned["t6"] + members[1].owned["t6"]) == [0, 1, 2, 3, 4, 5]


def test_a_fenced_classic_member_does_not_take_its_instance_back(context: GroupContext) -> None:
    """Found by the simulation, seed 94: with the id that it had, it took the place of its own successor (KIP-345)."""
    context.join("g", NEW, ["t6"])
    old = ClassicConsumer(context, "g", "b", ["t6"], instance="i1")
    old.on_joined(old.join())
    successor = ClassicConsumer(context, "g", "b", ["t6"], instance="i1")
    successor.on_joined(successor.join())
    with pytest.raises(KafkaError) as caught:
        old.join()
    assert caught.value.error == Errors.FENCED_INSTANCE_ID
    stranger = ClassicConsumer(context, "g", "c", ["t6"], instance="i2")
    stranger.member_id = "somebody"
    with pytest.raises(KafkaError) as caught:
        stranger.join()
    assert caught.value.error == Errors.UNKNOWN_MEMBER_ID
    successor.on_joined(successor.join())
    assert {member.member_id for member in context.describe("g").members} == {NEW, successor.member_id}


@pytest.mark.parametrize("has_joined", [False, True])
def test_an_interrupted_rebalance_is_made_up_for_by_the_conversion(context: GroupContext, has_joined: bool) -> None:
    """Found by the simulation, seed 1284: a static member came back with the other protocol, and nothing changed."""
    static = ClassicConsumer(context, "g", "a", ["t6"], instance="i1")
    settle(context, [static], {"t6": 1})
    other = ClassicConsumer(context, "g", "b", ["t6"])
    waiting = other.join()
    if has_joined:
        static.on_joined(static.join())
        other.on_joined(waiting)
    joined = context.join("g", NEW, ["t6"], instance="i1", assignor=None)
    other.member_id = answered_join(waiting).member_id
    owned, _ = converge(context, [other], joined.member_epoch, context.assigned(joined))
    assert sorted(owned["t6"] + other.owned["t6"]) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("moment", ["preparing", "completing", "aborted", "unheard"])
def test_a_cooperative_member_keeps_what_it_owns_until_it_has_given_it_up(context: GroupContext, moment: str) -> None:
    """It goes on with its partitions while a rebalance is interrupted, whatever the coordinator knows of it."""
    first = ClassicConsumer(context, "g", "a", ["t6"], cooperative=True)
    settle(context, [first], {"t6": 6})
    second = ClassicConsumer(context, "g", "b", ["t6"], cooperative=True)
    waiting = second.join()
    if moment != "preparing":
        first.on_joined(first.join())
        second.on_joined(waiting)
    if moment == "aborted":
        second.topics = ["t6", "x"]
        second.join()
    if moment == "unheard":
        first.sync({first.member_id: {"t6": [0, 1, 2]}, second.member_id: {}})
    joined = context.join("g", NEW, ["t6"])
    assert (context.assigned(joined), first.owned) == ({}, {"t6": [0, 1, 2, 3, 4, 5]})
    second.member_id = answered_join(waiting).member_id
    given, _ = converge(context, [first, second], joined.member_epoch)
    assert sorted(given["t6"] + first.owned["t6"] + second.owned["t6"]) == [0, 1, 2, 3, 4, 5]
    assert context.describe("g").group_state == "Stable"


def test_a_classic_successor_of_a_member_that_is_behind_gets_where_its_predecessor_would_have(
    context: GroupContext,
) -> None:
    """Found by the simulation, seeds 197 and 351: at the assignment epoch it counted as settled, with nothing of it."""
    members = [NEW, "third"]
    context.join("g", NEW, ["t6"])
    static = ClassicConsumer(context, "g", "b", ["t6"], instance="i1")
    static.on_joined(static.join())
    for _ in range(3):
        context.heartbeat("g", NEW, 0, names=["t6"], owned={}, rebalance_timeout_ms=60_000)
        drive(static)
    assert len(static.owned["t6"]) == 3
    context.join("g", "third", ["t6"])
    back = ClassicConsumer(context, "g", "b", ["t6"], instance="i1")
    back.on_joined(back.join())
    for _ in range(4):
        drive(back)
        for member in members:
            context.heartbeat("g", member, 0, names=["t6"], owned={}, rebalance_timeout_ms=60_000)
    group = context.describe("g")
    assert group.group_state == "Stable"
    assert all(member.assignment == member.target_assignment for member in group.members)


@pytest.mark.parametrize(
    ("policy", "refused"), [("disabled", True), ("downgrade", True), ("upgrade", False), ("BIDIRECTIONAL", False)]
)
def test_upgrade_policy(policy: str, refused: bool) -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.consumer.migration.policy": policy})
    classic(context, 1)
    if not refused:
        assert context.join("g", NEW, ["t6"]).member_epoch == 2
        return
    with pytest.raises(KafkaError) as caught:
        context.join("g", NEW, ["t6"])
    assert caught.value.error == Errors.GROUP_ID_NOT_FOUND
    assert "migration.policy" in (caught.value.message or "")


def test_downgrade_policy() -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.consumer.migration.policy": "upgrade"})
    members = classic(context, 1)
    context.join("g", NEW, ["t6"])
    context.heartbeat("g", NEW, -1)
    context.sleep(0)
    assert context.describe("g").error_code == 0
    assert drive(members[0]) == {"t6": [0, 1, 2, 3, 4, 5]}


def test_unreadable_subscription_is_named(context: GroupContext) -> None:
    (member,) = classic(context, 1)
    context.shard._groups["g"].members[member.member_id].protocols = [("range", b"\x00")]  # type: ignore[attr-defined]
    with pytest.raises(KafkaError) as caught:
        context.join("g", NEW, ["t6"])
    assert caught.value.error == Errors.GROUP_ID_NOT_FOUND
    assert member.member_id in (caught.value.message or "")


def test_classic_member_that_does_not_rejoin_is_removed(context: GroupContext) -> None:
    members = classic(context, 2)
    for member in members:
        member.rebalance_timeout_ms = 60_000
    joined = context.join("g", NEW, ["t6"])
    epoch = joined.member_epoch
    owned: Assigned = {}
    for _ in range(13):
        context.sleep(5_000)
        drive(members[0])
        members[1].heartbeat()
        response = context.heartbeat("g", NEW, epoch, owned=owned)
        epoch, owned = response.member_epoch, context.assigned(response) or owned
    assert members[1].heartbeat() == Errors.UNKNOWN_MEMBER_ID
    assert len(context.describe("g").members) == 2


def test_commit_of_a_classic_member_uses_its_generation(context: GroupContext) -> None:
    members = classic(context, 1)
    context.join("g", NEW, ["t6"])
    drive(members[0])
    member_id, generation = members[0].member_id, members[0].generation
    assert context.commit("g", {"t6": {0: 1}}, member=member_id, epoch=generation, api_version=8) == {("t6", 0): 0}
    with pytest.raises(KafkaError) as caught:
        context.commit("g", {"t6": {0: 1}}, member=member_id, epoch=generation + 1, api_version=8)
    assert caught.value.error == Errors.ILLEGAL_GENERATION


def test_classic_leave_can_remove_any_member(context: GroupContext) -> None:
    context.join("g", NEW, ["t6"])
    leaver = ClassicConsumer(context, "g", "x", ["t6"])
    leaver.member_id = NEW
    assert leaver.leave() == [0]
    assert context.describe("g").group_state == "Empty"
    assert leaver.leave() == [Errors.UNKNOWN_MEMBER_ID]
