# SPDX-License-Identifier: Apache-2.0
"""Groups with members of both protocols that share a custom assignor: conversion, user data, and conversion back."""

from __future__ import annotations

import random
from itertools import count

import pytest

from kcoord.coordinator.group.classic.consumer_protocol import read_assignment
from kcoord.coordinator.group.consumer.client_assignors import ClientAssignor
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.migration import CUSTOM_ASSIGNOR_TEXT
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeGroupsResponse, GroupMetadataValue, JoinGroupResponse
from tests.unit.group.classic_members import ClassicConsumer, answered, settle
from tests.unit.group.group_context import Assigned
from tests.unit.group.test_client_assignors import ClientContext, Targets, offered

DELAY = {"group.initial.rebalance.delay.ms": "0"}
READER = offered("x", -1, 1, 1, metadata=b"weight")


def mixed_context(partitions: int = 6) -> ClientContext:
    return ClientContext(partitions, DELAY)


def custom_member(context: ClientContext, name: str, **more: object) -> ClassicConsumer:
    member = ClassicConsumer(context, "g", name, ["t"], **more)  # type: ignore[arg-type]
    member.protocols = ["x"]
    member.user_data = f"from {name}".encode()
    return member


def custom_group(
    context: ClientContext, number: int = 2, *, given: bytes = b"plan", **more: object
) -> list[ClassicConsumer]:
    """Returns the members of a stable classic group with the protocol x, whose leader gave user data to all."""
    members = [custom_member(context, f"m{i}", **more) for i in range(number)]
    settle(context, members, {"t": len(context.image.topics["t"].partitions)}, given)
    return members


def drive(member: ClassicConsumer) -> None:
    """Runs one turn of a classic consumer: a heartbeat, then a rejoin and a sync if the response requires it."""
    if member.heartbeat() == Errors.REBALANCE_IN_PROGRESS:
        rejoin(member)


def rejoin(member: ClassicConsumer) -> None:
    if not member.cooperative:
        member.owned = {}
    joined = member.join()
    assert isinstance(joined, JoinGroupResponse), "classic members of a consumer group never wait"
    assert member.on_joined(joined).protocol_name == member.protocols[0]
    member.on_synced(member.sync())


def described(context: ClientContext) -> DescribeGroupsResponse.DescribedGroup:
    return context.run(lambda ctx: context.shard.describe_groups(ctx, ["g"]), 6)[0].complete()


def refusal(context: ClientContext, *assignors: ClientAssignor) -> KafkaError:
    before = context.shard.hard_state()
    with pytest.raises(KafkaError) as refused:
        context.enter("N", *assignors)
    assert context.shard.hard_state() == before
    return refused.value


def test_the_user_data_of_assignments_becomes_metadata_of_version_minus_1() -> None:
    context = mixed_context()
    first, second = custom_group(context)
    joined = context.enter("N", READER)
    assert (joined.error_code, joined.should_compute_assignment) == (0, True)
    members = {member.member_id: member for member in context.describe("g").members}
    for member in (first, second):
        for assignment in (members[member.member_id].assignment, members[member.member_id].target_assignment):
            assert (assignment.metadata_version, assignment.metadata_bytes) == (-1, b"plan")
    # They go on as before while the new member computes: a rejoin would give them nothing new.
    assert [first.heartbeat(), second.heartbeat()] == [0, 0]
    before = context.shard.hard_state()
    context.restart()
    assert context.shard.hard_state() == before


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_computation_reads_and_writes_user_data_of_classic_members(cooperative: bool) -> None:
    context = mixed_context()
    first, second = custom_group(context, cooperative=cooperative)
    context.enter("N", READER)
    prepared = {member.member_id: member for member in context.prepare("N").members}
    for member in (first, second):
        assignor = prepared[member.member_id].assignor
        assert (assignor.metadata_version, assignor.metadata_bytes) == (-1, member.user_data)
    targets = {first.member_id: {"t": [0, 2]}, second.member_id: {"t": [1, 3]}, "N": {"t": [4, 5]}}
    wrong = context.install("N", 2, targets, version=0)
    assert wrong.error_code == Errors.INVALID_ASSIGNMENT
    assert "reads metadata of versions -1 to -1, not 0" in (wrong.error_message or "")
    # After a round without success the only member that can compute has a pause.
    assert not context.beat("N").should_compute_assignment
    context.sleep(2_000)
    assert context.beat("N").should_compute_assignment
    context.compute("N", targets, version=-1, metadata=b"new plan")
    for _ in range(3):
        drive(first)
        drive(second)
        context.beat("N")
    assert (first.owned, second.owned) == ({"t": [0, 2]}, {"t": [1, 3]})
    assert (first.given, second.given) == (b"new plan", b"new plan")
    assert context.describe("g").group_state == "Stable"


@pytest.mark.parametrize(
    ("assignors", "text"),
    [
        ([offered("y", -1, 1, 1)], "ClientAssignors has no assignor of that name"),
        ([offered("x", 0, 1, 1)], "the MinimumVersion of that client assignor is 0, not -1"),
    ],
)
@pytest.mark.parametrize("part", ["subscription", "assignment"])
def test_assignors_that_cannot_read_the_user_data_of_a_member_are_refused(
    assignors: list[ClientAssignor], text: str, part: str
) -> None:
    context = mixed_context()
    members = custom_group(context, given=b"plan" if part == "assignment" else b"")
    if part == "assignment":
        for member in members:
            member.user_data = b""
        settle(context, members, {"t": 6}, b"plan")
    refused = refusal(context, *assignors)
    assert refused.error is Errors.INVALID_REQUEST
    assert refused.message == (
        f"Classic group g cannot become a consumer group: the {part} of member {members[0].member_id} has user data of "
        f"the assignor x, and {text}."
    )


def test_a_member_without_client_assignors_gets_the_text_of_kafka() -> None:
    context = mixed_context()
    custom_group(context)
    refused = refusal(context)
    assert (refused.error, refused.message) == (Errors.GROUP_ID_NOT_FOUND, CUSTOM_ASSIGNOR_TEXT.format("g"))
    context.config.kcoord_client_assignors_enable = False
    refused = refusal(context, READER)
    assert (refused.error, refused.message) == (Errors.GROUP_ID_NOT_FOUND, CUSTOM_ASSIGNOR_TEXT.format("g"))


def test_user_data_only_in_subscriptions_does_not_stop_a_member_without_client_assignors() -> None:
    context = mixed_context()
    custom_group(context, given=b"")
    assert context.enter("N").error_code == 0


def test_a_group_without_user_data_is_converted_by_any_assignor() -> None:
    """The broker then computes, because the classic members do not have the assignor."""
    context = mixed_context()
    member = ClassicConsumer(context, "g", "a", ["t"])
    settle(context, [member], {"t": 6})
    assert not context.enter("N", offered("y")).should_compute_assignment
    assert context.group.assignment_epoch == context.group.group_epoch


def mixed_group() -> tuple[ClientContext, ClassicConsumer]:
    """Returns a stable group of a classic member and of N, which has computed the target."""
    context = mixed_context()
    (member,) = custom_group(context, 1)
    context.enter("N", READER)
    context.compute("N", {member.member_id: {"t": [0, 1, 2]}, "N": {"t": [3, 4, 5]}}, version=-1, metadata=b"1")
    for _ in range(3):
        drive(member)
        context.beat("N")
    assert (member.owned, member.given) == ({"t": [0, 1, 2]}, b"1")
    return context, member


def test_changed_user_data_of_a_classic_member_starts_a_new_group_epoch() -> None:
    context, member = mixed_group()
    epoch = context.group.group_epoch
    rejoin(member)
    assert context.group.group_epoch == epoch
    member.user_data = b"changed"
    rejoin(member)
    assert context.group.group_epoch == epoch + 1
    assert context.beat("N").should_compute_assignment
    prepared = {m.member_id: m.assignor.metadata_bytes for m in context.prepare("N").members}
    assert prepared == {member.member_id: b"changed", "N": b"weight"}


def test_user_data_that_tells_the_last_assignment_does_not_make_epochs_without_an_end() -> None:
    """Sticky assignors tell what they owned in each rejoin."""
    context, member = mixed_group()
    context.update_metadata({"t": 7})
    for _ in range(10):
        if context.beat("N").should_compute_assignment:
            targets: Targets = {member.member_id: {"t": [0, 1, 2]}, "N": {"t": [3, 4, 5, 6]}}
            context.compute("N", targets, version=-1)
        member.user_data = f"{member.generation} {member.owned}".encode()
        drive(member)
    assert (context.group.group_epoch, context.group.assignment_epoch) == (3, 3)


def test_without_an_assignor_that_is_present_classic_members_rejoin_so_that_the_broker_computes() -> None:
    context = ClientContext(6, DELAY | {"group.consumer.assignment.interval.ms": "5000"})
    (member,) = custom_group(context, 1)
    context.enter("N", READER, instance="i")
    context.compute("N", {member.member_id: {"t": [0, 1, 2]}, "N": {"t": [3, 4, 5]}}, version=-1)
    for _ in range(3):
        drive(member)
        context.beat("N")
    context.heartbeat("g", "N", -2, instance="i")
    other = custom_member(context, "b")
    other.on_joined(answered(other.join()))
    assert (context.group.group_epoch, context.group.assignment_epoch) == (3, 2)
    context.sleep(5_000)
    drive(member)
    assert (context.group.group_epoch, context.group.assignment_epoch) == (3, 3)


def test_a_classic_member_that_does_not_name_the_assignor_moves_the_group_to_the_broker() -> None:
    """Classic members must share a protocol with each other, but not with the others."""
    context = ClientContext(6)
    context.enter("N", READER)
    context.compute("N", {"N": {"t": [0, 1, 2, 3, 4, 5]}}, version=1, metadata=b"of version 1")
    context.beat("N")
    other = ClassicConsumer(context, "g", "b", ["t"])
    other.on_joined(answered(other.join()))
    assert not context.beat("N").should_compute_assignment
    assert context.group.target_assignor == ""
    third = custom_member(context, "c")
    with pytest.raises(KafkaError) as refused:
        third.join()
    assert refused.value.error is Errors.INCONSISTENT_GROUP_PROTOCOL


def test_the_protocol_of_classic_members_is_the_assignor_that_computes() -> None:
    context = mixed_context()
    member = custom_member(context, "a")
    member.protocols = ["range", "x"]
    other = custom_member(context, "b")
    settle(context, [other, member], {"t": 6}, b"plan")
    context.enter("N", READER)
    targets = {member.member_id: {"t": [1, 3]}, other.member_id: {"t": [0, 2]}, "N": {"t": [4, 5]}}
    context.compute("N", targets, version=-1, metadata=b"new")
    member.owned = {}
    joined = answered(member.join())
    assert isinstance(joined, JoinGroupResponse)
    assert member.on_joined(joined).protocol_name == "x"
    synced = answered(member.sync())
    assert synced.protocol_name == "x"
    assert member.on_synced(synced) == {"t": [1, 3]}
    assert member.given == b"new"


def test_a_classic_successor_does_not_get_metadata_of_another_version_as_user_data() -> None:
    context = ClientContext(6)
    context.enter("S", READER, instance="i")
    context.compute("S", {"S": {"t": [0, 1, 2, 3, 4, 5]}}, version=1, metadata=b"of version 1")
    context.beat("S")
    context.enter("N", READER)
    successor = custom_member(context, "s", instance="i")
    successor.on_joined(answered(successor.join()))
    successor.on_synced(successor.sync())
    assert (successor.owned, successor.given) == ({"t": [0, 1, 2, 3, 4, 5]}, b"")


def test_when_the_last_new_member_leaves_the_classic_leader_computes_and_user_data_stays() -> None:
    context, member = mixed_group()
    context.heartbeat("g", "N", -1)
    stored = [record.value for record in context.records if isinstance(record.value, GroupMetadataValue)][-1]
    assignment = read_assignment(stored.members[0].assignment)
    assert assignment is not None
    assert (assignment.user_data, assignment.assigned_partitions[0].partitions) == (b"1", [0, 1, 2])
    context.restart()
    context.sleep(0)
    assert member.heartbeat() == Errors.REBALANCE_IN_PROGRESS
    settle(context, [member], {"t": 6}, b"by the leader")
    assert (member.owned, member.given) == ({"t": [0, 1, 2, 3, 4, 5]}, b"by the leader")
    assert described(context).group_state == "Stable"
    assert context.enter("N", READER).should_compute_assignment


class Life:
    """Members of both protocols with the assignor x come, go, compute and crash at random.

    The plan of each computation is in the metadata that it gives: each member must get the plan of its epoch.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.context = mixed_context(5)
        self.names = count()
        self.classics = custom_group(self.context, self.random.randint(1, 3), cooperative=self.random.random() < 0.5)
        self.news: dict[str, Assigned] = {}
        self.conversions = 0

    @property
    def is_consumer_group(self) -> bool:
        return isinstance(self.context.shard.group("g"), ConsumerGroup)

    def step(self) -> None:
        action = self.random.choice(["classic", "classic", "new", "new", "new", "join", "leave", "restart", "change"])
        was = self.is_consumer_group
        if action == "restart":
            self.context.restart()
        elif action == "join" and len(self.news) < 3:
            name = f"N{next(self.names)}"
            self.take(name, self.context.enter(name, READER))
        elif action == "leave" and self.news:
            self.leave(self.random.choice([*self.news]))
        elif action == "change" and self.classics:
            self.random.choice(self.classics).user_data = self.random.randbytes(2)
        elif action == "new" and self.news:
            self.beat(self.random.choice([*self.news]))
        elif was and self.classics:
            drive(self.random.choice(self.classics))
        self.conversions += was is not self.is_consumer_group
        self.check()

    def beat(self, name: str) -> None:
        context = self.context
        epoch = context.group.members[name].member_epoch
        answer = context.heartbeat("g", name, epoch, owned=self.news[name])
        self.take(name, answer)
        if answer.should_compute_assignment and self.random.random() < 0.7:
            prepared = context.prepare(name)
            ids = [member.member_id for member in prepared.members]
            self.random.shuffle(ids)
            targets: Targets = {member_id: {"t": []} for member_id in ids}
            for partition in range(5):
                targets[self.random.choice(ids)]["t"].append(partition)
            plan = b"plan of epoch %d" % prepared.group_epoch
            installed = context.install(name, prepared.group_epoch, targets, version=-1, metadata=plan)
            assert installed.error_code == 0

    def take(self, name: str, answer: object) -> None:
        assigned = self.context.assigned(answer)  # type: ignore[arg-type]
        self.news[name] = self.news.get(name, {}) if assigned is None else assigned

    def leave(self, name: str) -> None:
        self.context.heartbeat("g", name, -1)
        del self.news[name]
        if not self.is_consumer_group:
            given = {member.member_id: member.given for member in self.classics}
            assert self.stored_user_data().items() <= given.items()
            self.context.sleep(0)
            settle(self.context, self.classics, {"t": 5}, b"plan of the leader")

    def stored_user_data(self) -> dict[str, bytes]:
        """Returns the user data that the conversion kept for members that have reached the last target."""
        reached = {m.member_id for m in self.classics if m.given.startswith(b"plan of epoch")}
        stored = {}
        for value in (record.value for record in self.context.records):
            if isinstance(value, GroupMetadataValue):
                for member in value.members:
                    assignment = read_assignment(member.assignment)
                    assert assignment is not None
                    stored[member.member_id] = assignment.user_data or b""
        return {member_id: data for member_id, data in stored.items() if member_id in reached}

    def check(self) -> None:
        owned = [member.owned for member in self.classics] + [*self.news.values()]
        partitions = [partition for assigned in owned for partition in assigned.get("t", [])]
        assert len(partitions) == len(set(partitions)), owned

    def settle(self) -> None:
        """Without faults every partition gets one owner, and each classic member the plan of the group's epoch."""
        if not self.news:
            self.take("last", self.context.enter("last", READER))
        for _ in range(12):
            for name in [*self.news]:
                self.beat(name)
            for member in self.classics:
                drive(member)
            self.check()
        group = self.context.group
        assert group.is_converged
        owned = [member.owned for member in self.classics] + [*self.news.values()]
        assert sorted(p for assigned in owned for p in assigned.get("t", [])) == [0, 1, 2, 3, 4]
        assert {member.given for member in self.classics} == {b"plan of epoch %d" % group.assignment_epoch}


@pytest.mark.parametrize("seed", range(24))
def test_random_lives(seed: int) -> None:
    life = Life(seed)
    for _ in range(50):
        life.step()
    life.settle()


def test_random_lives_have_conversions_in_both_directions() -> None:
    lives = [Life(seed) for seed in range(4)]
    for life in lives:
        for _ in range(60):
            life.step()
    assert sum(life.conversions for life in lives) > 8
