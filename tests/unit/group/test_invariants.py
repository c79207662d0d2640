# SPDX-License-Identifier: Apache-2.0
"""Breaks each named invariant of the group coordinator (docs/contributing/invariants.md) and sees its assertion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.assignor import Assignment, MemberSpec, PartitionRacks
from kcoord.coordinator.group.assignor.range import RangeAssignor
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import Rebalance
from kcoord.coordinator.group.consumer.assignment import CurrentAssignmentBuilder
from kcoord.coordinator.group.consumer.group import ConsumerGroup, ConsumerGroupMember
from kcoord.coordinator.group.deletion import Deletion
from kcoord.coordinator.group.group import GroupState
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffsets, TopicOffsets
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.offsets.transactional_offsets import TransactionalOffsets
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext
from tests.unit.group.test_packed_commit import Shape, cells_of, commit, new_shard, read


def consumer_group(context: GroupContext) -> ConsumerGroup:
    group = context.shard.group("g")
    assert isinstance(group, ConsumerGroup)
    return group


def with_member() -> GroupContext:
    context = GroupContext({"foo": 2})
    context.join("g", "A", ["foo"])
    return context


def test_a_group_epoch_does_not_fall() -> None:
    group = consumer_group(with_member())
    records.next_group_epoch_record(group, group.group_epoch + 1, 0, None)
    with pytest.raises(AssertionError, match="G-1: "):
        records.next_group_epoch_record(group, group.group_epoch, 0, None)


def test_an_assignment_epoch_is_not_above_the_group_epoch() -> None:
    records.next_assignment_epoch_record("g", 3, 3, 0)
    with pytest.raises(AssertionError, match="G-2: "):
        records.next_assignment_epoch_record("g", 4, 3, 0)


def test_a_member_epoch_does_not_pass_the_epoch_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    build = CurrentAssignmentBuilder.build

    def too_far(builder: CurrentAssignmentBuilder) -> ConsumerGroupMember:
        member = build(builder)
        return replace(member, member_epoch=member.member_epoch + 1)

    context = GroupContext({"foo": 2})
    monkeypatch.setattr(CurrentAssignmentBuilder, "build", too_far)
    with pytest.raises(AssertionError, match="G-3: "):
        context.join("g", "A", ["foo"])


def test_a_partition_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    build = CurrentAssignmentBuilder.build
    context = with_member()
    monkeypatch.setattr(
        CurrentAssignmentBuilder, "build", lambda builder: build(replace(builder, owners_of=lambda topic_id: {}))
    )
    with pytest.raises(AssertionError, match="G-4: member B gets partition 1 of member A"):
        context.join("g", "B", ["foo"])


def test_a_member_does_not_revoke_what_it_is_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    build = CurrentAssignmentBuilder.build

    def both(builder: CurrentAssignmentBuilder) -> ConsumerGroupMember:
        member = build(builder)
        return replace(member, pending_revocation=member.assigned)

    context = GroupContext({"foo": 2})
    monkeypatch.setattr(CurrentAssignmentBuilder, "build", both)
    with pytest.raises(AssertionError, match="G-5: "):
        context.join("g", "A", ["foo"])


@pytest.mark.parametrize("partitions", [(), (0,), (0, 1, 2)])
def test_a_target_has_every_partition_once(monkeypatch: pytest.MonkeyPatch, partitions: tuple[int, ...]) -> None:
    def assign(
        _: RangeAssignor, members: Mapping[str, MemberSpec], counts: Mapping[bytes, int], _racks: PartitionRacks
    ) -> Assignment:
        return {member_id: dict.fromkeys(counts, frozenset(partitions)) for member_id in members}

    context = GroupContext({"foo": 2})
    monkeypatch.setattr(RangeAssignor, "assign", assign)
    with pytest.raises(AssertionError, match="G-6: "):
        context.join("g", "A", ["foo"])


def test_a_classic_group_makes_only_legal_transitions() -> None:
    with pytest.raises(AssertionError, match="G-7: group g cannot go from Empty to Stable"):
        ClassicGroup("g").transition_to(GroupState.STABLE, 0)


def test_a_generation_gets_its_assignments_once() -> None:
    context = GroupContext({"foo": 2}, {"group.initial.rebalance.delay.ms": "0"})
    settle(context, [ClassicConsumer(context, "g", "A", ["foo"])], {"foo": 2})
    group = context.shard.group("g")
    assert isinstance(group, ClassicGroup)
    assert group.state is GroupState.STABLE
    with pytest.raises(AssertionError, match="G-8: "):
        Rebalance(context.config, group, context.now_ms).complete_generation({})


@pytest.mark.parametrize(("partitions", "name"), [([3], "G-9"), ([3, 5], "G-10")])
def test_a_prepared_commit_is_written_into_its_rows(partitions: list[int], name: str) -> None:
    shard = new_shard()
    request = Shape("g", {"t": partitions}).request(7, 1)
    commit(shard, request, 1, 0)
    plan = CommitPlan(read(request).shape, 9)
    assert shard.commit_packed(plan, cells_of(request), 2)
    commit(shard, Shape("g", {"t": [0]}).request(7, 1), 3, 1)
    with pytest.raises(AssertionError, match=f"{name}: "):
        plan.replay()


def test_offsets_are_stored_in_the_rows_of_their_partitions() -> None:
    offsets = TopicOffsets(ZERO_UUID, bytearray(), bytearray(), None)
    with pytest.raises(AssertionError, match="G-11: "):
        offsets.put_first([1], b"", b"")


def test_a_group_with_members_is_not_deleted() -> None:
    group = consumer_group(with_member())
    with pytest.raises(AssertionError, match="G-12: "):
        Deletion(CommittedOffsets(), TransactionalOffsets()).of_group(group)


def test_a_broken_invariant_fails_the_shard_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    context = GroupContext({"foo": 2})
    shards = ShardSet(lambda _: GroupCoordinatorShard(context.config, context.image), CoordinatorSerde())
    shards.load(0, (), context.now_ms, 0, ())
    monkeypatch.setattr(RangeAssignor, "assign", lambda *_: {})
    request = ConsumerGroupHeartbeatRequest(
        group_id="g",
        member_id="A",
        rebalance_timeout_ms=1000,
        subscribed_topic_names=["foo"],
        server_assignor="range",
        topic_partitions=[],
    )
    with pytest.raises(KafkaError) as raised:
        shards.run(
            0, GroupCoordinatorShard.consumer_group_heartbeat, request, OperationContext(context.now_ms, api_version=1)
        )
    assert raised.value.error is Errors.NOT_COORDINATOR
    assert str(raised.value.__cause__).startswith("G-6: ")
    assert shards.machine(0) is None
    assert not shards.poll(context.now_ms).appends
