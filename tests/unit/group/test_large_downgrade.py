# SPDX-License-Identifier: Apache-2.0
"""A mixed group whose classic members have so much metadata that its record exceeds Kafka's limit for a batch."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import MAX_BATCH_BYTES, OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, JoinGroupRequest, LeaveGroupRequest
from tests.unit.group.classic_members import subscription
from tests.unit.group.images import image_of

NOW_MS = 1_000_000
MEMBERS = 12
METADATA = subscription(["t3"], user_data=bytes(MAX_BATCH_BYTES // 10))
LEAVES = {
    "heartbeat": ConsumerGroupHeartbeatRequest(group_id="g", member_id="a", member_epoch=-1),
    "LeaveGroup": LeaveGroupRequest(group_id="g", members=[LeaveGroupRequest.MemberIdentity(member_id="a")]),
    "session timeout": None,
}


@pytest.mark.parametrize("leave", list(LEAVES))
def test_the_last_member_of_the_consumer_protocol_can_go(leave: str) -> None:
    shards = mixed_group()
    request = LEAVES[leave]
    now_ms = NOW_MS
    if isinstance(request, ConsumerGroupHeartbeatRequest):
        shards.run(0, GroupCoordinatorShard.consumer_group_heartbeat, request, OperationContext(NOW_MS, 1))
    elif isinstance(request, LeaveGroupRequest):
        shards.run(0, GroupCoordinatorShard.leave_group, request, OperationContext(NOW_MS, 5))
    else:
        now_ms += 45_000
    shards.poll(now_ms)
    machine = shards.machine(0)
    assert machine is not None
    group = machine.group("g")
    assert isinstance(group, ClassicGroup)
    assert len(group.members) == MEMBERS


def mixed_group() -> ShardSet[GroupCoordinatorShard]:
    """Returns the shard of a group with one member of the consumer protocol, "a", and classic members."""
    image = image_of({"t3": 3}, epoch=1)
    config = BrokerConfig.from_properties({})
    shards = ShardSet(lambda _: GroupCoordinatorShard(config, image), CoordinatorSerde())
    shards.load(0, (), NOW_MS, 0)
    joining = ConsumerGroupHeartbeatRequest(
        group_id="g", member_id="a", rebalance_timeout_ms=60_000, subscribed_topic_names=["t3"], topic_partitions=[]
    )
    shards.run(0, GroupCoordinatorShard.consumer_group_heartbeat, joining, OperationContext(NOW_MS, 1))
    for number in range(MEMBERS):
        request = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=300_000,
            rebalance_timeout_ms=300_000,
            member_id=f"m{number}",
            protocol_type="consumer",
            protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=METADATA)],
        )
        shards.run(0, GroupCoordinatorShard.join_group, request, OperationContext(NOW_MS, 5, token=number))
    [append] = shards.poll(NOW_MS).appends
    shards.written(append)
    return shards
