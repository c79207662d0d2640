# SPDX-License-Identifier: Apache-2.0
"""Online migration, in addition to `tests/transcripts/migration`: every partition has exactly one owner in the end."""

from __future__ import annotations

import pytest

from kcoord.coordinator.group.group import GroupTimer, heartbeat_timer, rebalance_timer, session_timer
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataValue,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerProtocolSubscription,
    DescribeGroupsResponse,
    JoinGroupResponse,
)
from tests.unit.group.classic_members import ClassicConsumer, answered, settle
from tests.unit.group.group_context import Assigned, GroupContext, Waiting

DELAY = {"group.initial.rebalance.delay.ms": "0"}
NEW = "member-n"


@pytest.fixture
def context() -> GroupContext:
    return GroupContext({"t6": 6}, DELAY)


def described(context: GroupContext) -> DescribeGroupsResponse.DescribedGroup:
    return context.run(lambda ctx: context.shard.describe_groups(ctx, ["g"]), 6)[0].complete()


def classic(context: GroupContext, count: int, **more: object) -> list[ClassicConsumer]:
    members = [ClassicConsumer(context, "g", f"m{i}", ["t6"], **more) for i in range(count)]  # type: ignore[arg-type]
    settle(context, members, {"t6": 6})
    return members


def answered_join(reply: JoinGroupResponse | Waiting) -> JoinGroupResponse:
    response = answered(reply)
    assert isinstance(response, JoinGroupResponse)
    return response


def drive(member: ClassicConsumer) -> Assigned:
    """Runs one turn of a classic consumer: a heartbeat, then a rejoin and a sync if the response requires it."""
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
    """Runs turns of all members until nothing changes; returns the partitions and the epoch of the new member.

    Checks after each turn that no partition has two owners.
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
    # The last member of the consumer protocol leaves: the group is converted back.
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


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_conversion_during_a_rebalance_computes_a_new_target(context: GroupContext, has_joined: bool) -> None:
    """Found by the simulation, seed 1284: a static member returned with the other protocol, and nothing changed."""
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
def test_a_cooperative_member_keeps_its_partitions_until_it_has_revoked_them(
    context: GroupContext, moment: str
) -> None:
    """It keeps consuming while a rebalance is interrupted, whether or not the coordinator has a new assignment."""
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


def test_a_classic_successor_of_a_member_with_an_old_epoch_reaches_the_target_of_its_predecessor(
    context: GroupContext,
) -> None:
    """Found by the simulation, seeds 197 and 351: at the assignment epoch it was stable without partitions."""
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


def test_a_group_before_its_first_generation_becomes_epoch_1() -> None:
    context = GroupContext({"t6": 6}, {"group.initial.rebalance.delay.ms": "3000"})
    ClassicConsumer(context, "g", "a", ["t6"]).join()
    assert context.join("g", NEW, ["t6"]).member_epoch == 2
    values = [record.value for record in context.records]
    assert [value.epoch for value in values if isinstance(value, ConsumerGroupMetadataValue)] == [1, 2]


def test_an_upgrade_keeps_existing_topics_of_an_assignment_and_the_racks_of_the_members() -> None:
    context = GroupContext({"t6": 6, "t9": 9}, DELAY)
    leader, follower = (ClassicConsumer(context, "g", name, ["t6"]) for name in "ab")
    leader.metadata = b"\0\3" + ConsumerProtocolSubscription(topics=["t6"], rack_id="r1").encode(3)
    replies = [(member, member.join()) for member in (leader, follower)]
    context.sleep(0)
    for member, reply in replies:
        member.on_joined(reply)
    assert leader.leads
    leader.sync(
        {leader.member_id: {"t6": [0, 1], "gone": [0, 1], "t9": []}, follower.member_id: {"t6": [2, 3, 4, 5], "t9": []}}
    )
    follower.sync()
    context.join("g", NEW, ["t6"])
    values = [record.value for record in context.records]
    members = [value for value in values if isinstance(value, ConsumerGroupMemberMetadataValue)]
    assert [member.rack_id for member in members] == ["r1", None, None]
    targets = [value for value in values if isinstance(value, ConsumerGroupTargetAssignmentMemberValue)]
    kept = [[(topic.topic_id, topic.partitions) for topic in target.topic_partitions] for target in targets[:2]]
    t6 = context.topic_id("t6")
    assert sorted(kept) == [[(t6, [0, 1])], [(t6, [2, 3, 4, 5])]]


def test_each_conversion_restarts_the_session_timeouts(context: GroupContext) -> None:
    members = classic(context, 2)
    context.sleep(1_000)
    context.join("g", NEW, ["t6"])
    for member in members:
        assert context.timers[session_timer("g", member.member_id)] == context.now_ms + member.session_timeout_ms
        assert heartbeat_timer("g", member.member_id) not in context.timers
    context.sleep(1_000)
    context.heartbeat("g", NEW, -1)
    for member in members:
        assert context.timers[heartbeat_timer("g", member.member_id)] == context.now_ms + member.session_timeout_ms
        assert session_timer("g", member.member_id) not in context.timers


def test_a_full_group_is_converted_in_both_directions() -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.consumer.max.size": "2", "group.max.size": "1"})
    static = ClassicConsumer(context, "g", "a", ["t6"], instance="i1")
    settle(context, [static], {"t6": 6})
    context.join("g", NEW, ["t6"])
    with pytest.raises(KafkaError) as caught:
        context.join("g", "third", ["t6"])
    assert caught.value.error is Errors.GROUP_MAX_SIZE_REACHED
    context.heartbeat("g", NEW, -1)
    assert [member.member_id for member in described(context).members] == [static.member_id]


@pytest.mark.parametrize(("max_size", "error"), [(2, Errors.NONE), (1, Errors.GROUP_ID_NOT_FOUND)])
def test_a_group_with_more_members_than_a_consumer_group_may_have_is_not_converted(
    max_size: int, error: Errors
) -> None:
    context = GroupContext({"t6": 6}, DELAY | {"group.consumer.max.size": str(max_size)})
    static = ClassicConsumer(context, "g", "a", ["t6"], instance="i1")
    settle(context, [static], {"t6": 6})
    other = ClassicConsumer(context, "g", "b", ["t6"])
    waiting = other.join()
    static.on_joined(static.join())
    other.on_joined(waiting)
    raised = Errors.NONE
    try:
        context.join("g", NEW, ["t6"], instance="i1", assignor=None)
    except KafkaError as rejection:
        raised = rejection.error
    assert raised is error


def test_a_member_that_changes_its_protocol_under_its_id_loses_the_timers_of_the_former_one(
    context: GroupContext,
) -> None:
    context.join("g", "a", ["t6"])
    member = ClassicConsumer(context, "g", "m", ["t6"])
    member.on_joined(member.join())
    context.join("g", member.member_id, ["t6"])
    kinds = {key.kind for key in context.timers if key.member_id == member.member_id}
    assert kinds == {GroupTimer.SESSION}
    epoch = context.heartbeat("g", "a", 2, owned={"t6": list(range(6))}).member_epoch
    assert rebalance_timer("g", "a") in context.timers
    former = ClassicConsumer(context, "g", "a", ["t6"])
    former.member_id, former.generation = "a", epoch
    former.on_joined(former.join())
    kinds = {key.kind for key in context.timers if key.member_id == "a"}
    assert kinds == {GroupTimer.SESSION, GroupTimer.CLASSIC_MEMBER_SYNC}
