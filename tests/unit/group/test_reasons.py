# SPDX-License-Identifier: Apache-2.0
"""What the log says about why: a record header on each tombstone, a tagged field on each group epoch."""

from __future__ import annotations

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.records import EPOCH_REASON_TAG
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import REASON_HEADER, CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.messages import ConsumerGroupMetadataValue, OffsetDeleteRequest
from kcoord_protocol.record_batch import decode_records
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext
from tests.unit.group.images import image_of


def epoch_reasons(context: GroupContext) -> list[str]:
    values = [record.value for record in context.log if isinstance(record.value, ConsumerGroupMetadataValue)]
    return [dict(value.unknown_tagged_fields)[EPOCH_REASON_TAG].decode() for value in values]


def test_every_group_epoch_says_why() -> None:
    context = GroupContext({"t3": 3, "t6": 6})
    context.join("g", "a", ["t3"])
    context.join("g", "b", ["t3"])
    context.heartbeat("g", "b", 3, names=["t3", "t6"])
    context.update_metadata({"t3": 4, "t6": 6})
    context.heartbeat("g", "b", 4)
    context.heartbeat("g", "b", -1)
    context.sleep(45_000)
    assert epoch_reasons(context) == ["join", "join", "subscription", "metadata", "leave", "fenced"]


def test_conversion_says_so() -> None:
    context = GroupContext({"t6": 6}, {"group.initial.rebalance.delay.ms": "0"})
    settle(context, [ClassicConsumer(context, "g", "m", ["t6"])], {"t6": 6})
    context.join("g", "a", ["t6"])
    assert epoch_reasons(context) == ["migration", "join"]
    assert {record.reason for record in context.log if record.value is None} == {"migration"}


def test_every_tombstone_says_why() -> None:
    context = GroupContext({"t3": 3})
    context.commit("g", {"t3": {0: 1}})
    context.join("g", "a", ["t3"], instance="i")
    context.heartbeat("g", "a", -2, instance="i")
    context.join("g", "b", ["t3"], instance="i")
    context.heartbeat("g", "b", -1)
    context.run(lambda ctx: context.shard.delete_groups(ctx, ["g"]))
    context.commit("h", {"t3": {0: 1}})
    context.update_metadata({})
    tombstones = [record for record in context.log if record.value is None]
    assert all(record.reason for record in tombstones)
    assert {record.reason for record in tombstones} == {
        "migration", "replaced", "leave", "group-delete", "topic-delete",
    }  # fmt: skip


def test_the_reason_is_a_record_header() -> None:
    shard = GroupCoordinatorShard(BrokerConfig.from_properties({}), image_of({"t3": 3}, 1))
    runtime = ShardSet(lambda _: shard, CoordinatorSerde())
    runtime.load(0, (), 0)
    context = GroupContext({"t3": 3})
    context.shard = shard
    context.commit("g", {"t3": {0: 1}})
    runtime.run(0, GroupCoordinatorShard.delete_groups, ["g"], OperationContext(5, token=1))
    (append,) = runtime.poll(5).appends
    records = decode_records(append.data)
    assert [record.value for record in records] == [None, None]
    assert [record.headers for record in records] == [[(REASON_HEADER, b"group-delete")]] * 2
    assert {record.timestamp_ms for record in records} == {5}


def test_deleted_and_expired_offsets_say_so() -> None:
    context = GroupContext({"t3": 3}, {"offsets.retention.minutes": "1"})
    context.restart()
    context.commit("g", {"t3": {0: 1, 1: 1}})
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
        name="t3", partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)]
    )
    context.run(lambda ctx: context.shard.delete_offsets(ctx, OffsetDeleteRequest(group_id="g", topics=[topic])))
    assert [record.reason for record in context.records] == ["offset-delete"]
    context.join("h", "a", ["t3"])
    context.sleep(20 * 60_000)
    tombstones = [record for record in context.log if record.value is None]
    assert {record.reason for record in tombstones} == {"offset-delete", "expired", "fenced"}
    assert epoch_reasons(context) == ["join", "fenced"]
    assert context.rebuilt().hard_state() == GroupContext({"t3": 3}).shard.hard_state()
