# SPDX-License-Identifier: Apache-2.0
"""A change of the metadata costs the same for any number of groups, and reaches each group that depends on it."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest
from tests.support.calls import count_calls
from tests.unit.group.group_context import GroupContext
from tests.unit.group.images import image_of

A = "A" * 22


def calls_of_a_change(groups: int) -> int:
    image = image_of({"t": 1}, epoch=1)
    shard = GroupCoordinatorShard(BrokerConfig.from_properties({}), image)
    context = OperationContext(1_000, 1)
    for number in range(groups):
        request = ConsumerGroupHeartbeatRequest(
            group_id=f"g{number}",
            member_id="m",
            rebalance_timeout_ms=1_000,
            subscribed_topic_names=["t"],
            topic_partitions=[],
        )
        for record in shard.consumer_group_heartbeat(context, request).records:
            shard.replay(record)
    newer = image_of({"t": 2}, epoch=2, previous=image)
    return count_calls(lambda: shard.on_metadata_update(context, newer))


def test_calls_do_not_grow_with_the_groups() -> None:
    assert calls_of_a_change(10) == calls_of_a_change(500)


@pytest.mark.parametrize("later_changes", [0, 1, 63, 64, 100])
def test_a_group_learns_of_a_change_at_its_next_heartbeat(later_changes: int) -> None:
    context = GroupContext({"foo": 1, "other": 1})
    epoch = context.join("g", A, ["foo"]).member_epoch
    context.update_metadata({"foo": 2, "other": 1})
    for number in range(later_changes):
        context.update_metadata({"foo": 2, "other": 2 + number})
    response = context.heartbeat("g", A, epoch)
    assert response.member_epoch == epoch + 1
    assert context.assigned(response) == {"foo": [0, 1]}


@pytest.mark.parametrize("changes", [1, 64, 100])
def test_changes_of_other_topics_change_nothing(changes: int) -> None:
    context = GroupContext({"foo": 1, "other": 1})
    epoch = context.join("g", A, ["foo"]).member_epoch
    for number in range(changes):
        context.update_metadata({"foo": 1, "other": 2 + number})
    assert context.heartbeat("g", A, epoch).member_epoch == epoch
    assert context.records == []
    assert context.tasks == []
