# SPDX-License-Identifier: Apache-2.0
"""A group with the assignor `uniform-rack`: racks of members and replicas reach it, and a new rack is a new epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.metadata.image import BrokerImage, PartitionImage, TopicImage
from tests.unit.group.group_context import GroupContext

A, B = "member-a", "member-b"


def context_with(assignors: str) -> GroupContext:
    """Returns a shard and topic t with partitions 0 and 1 in rack r1 and 2 and 3 in rack r2."""
    context = GroupContext({"t": 4}, {"group.consumer.assignors": assignors})
    old = context.image.topics["t"]
    topic = TopicImage("t", old.id, [PartitionImage(p, 1 + p // 2, 0, 0, [1 + p // 2], [1 + p // 2]) for p in range(4)])
    brokers = {number: BrokerImage(number, 0, bytes(16), [], f"r{number}", False, []) for number in (1, 2)}
    context.image = replace(
        context.image, epoch=2, topics={"t": topic}, topics_by_id={topic.id: topic}, brokers=brokers
    )
    context.run(lambda ctx: context.shard.on_metadata_update(ctx, context.image))
    return context


def targets(context: GroupContext) -> dict[str, list[int]]:
    group = context.shard.group("g")
    assert isinstance(group, ConsumerGroup)
    (topic_id,) = context.image.topics_by_id
    return {name: sorted(target.get(topic_id, ())) for name, target in group.target_assignment.items()}


def test_members_get_the_partitions_of_their_rack_and_follow_when_it_changes() -> None:
    context = context_with("uniform,uniform-rack")
    context.join("g", A, ["t"], rack="r2", assignor="uniform-rack")
    context.join("g", B, ["t"], rack="r1", assignor="uniform-rack")
    assert targets(context) == {A: [2, 3], B: [0, 1]}
    epoch = context.heartbeat("g", A, 2, owned={"t": [2, 3]}).member_epoch
    assert context.heartbeat("g", A, epoch, rack="r2").member_epoch == epoch
    # In r1 are now both; the partitions of r1 stay with B. A third member in r2 takes those of r2.
    after = context.heartbeat("g", A, epoch, rack="r1").member_epoch
    assert after == epoch + 1
    assert targets(context) == {A: [2, 3], B: [0, 1]}
    context.restart()
    assert context.heartbeat("g", A, after, rack="r1").member_epoch == after


@pytest.mark.parametrize("assignor", ["uniform", "range"])
def test_the_rack_of_a_member_is_no_reason_for_an_epoch_with_the_assignors_of_kafka(assignor: str) -> None:
    context = context_with(f"{assignor},uniform-rack")
    epoch = context.join("g", A, ["t"], rack="r2", assignor=assignor).member_epoch
    assert context.heartbeat("g", A, epoch, rack="r1", owned={"t": [0, 1, 2, 3]}).member_epoch == epoch
