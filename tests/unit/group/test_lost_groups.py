# SPDX-License-Identifier: Apache-2.0
"""Offsets always have a group. If no record describes it, it is listed as Empty and can be deleted or expire."""

from __future__ import annotations

import pytest
from hypothesis import given

from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import (
    TombstoneReason,
    new_classic_group_tombstone,
    new_group_epoch_record,
    new_group_epoch_tombstone,
    new_offset_commit_record,
)
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import make_chunks
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import OffsetDeleteRequest
from kcoord_protocol.record_batch import encode_batch_from_parts
from tests.support.coordinator_log import Step, batches_of, logs, offsets_of, replayed
from tests.unit.group.classic_members import ClassicConsumer
from tests.unit.group.group_context import GroupContext
from tests.unit.logtools.support import NOW_MS

MINUTE_MS = 60_000
RETENTION = {"offsets.retention.minutes": "10", "offsets.retention.check.interval.ms": str(MINUTE_MS)}
MADE = new_group_epoch_record("g", 1, 0, 0, None)
GONE = {
    "classic": [new_classic_group_tombstone("g", TombstoneReason.GROUP_DELETE)],
    "consumer": [new_group_epoch_tombstone("g", TombstoneReason.MIGRATION)],
}
SERDE = CoordinatorSerde()


def orphaned(kind: str) -> GroupContext:
    """Returns a shard that has loaded two offsets, and then the tombstone of their group."""
    context = GroupContext({"t3": 3}, RETENTION)
    commits = [
        new_offset_commit_record("g", "t3", partition, CommittedOffset(40 + partition, -1, "", context.now_ms))
        for partition in range(2)
    ]
    context.log = [*([MADE] if kind == "consumer" else []), *commits, *GONE[kind]]
    context.restart()
    return context


def listed(shard: GroupCoordinatorShard) -> dict[str, tuple[str, str, str]]:
    """Returns group id -> state, protocol type and type."""
    groups = shard.list_groups(OperationContext(NOW_MS, 5), [], []).response
    return {group.group_id: (group.group_state, group.protocol_type, group.group_type) for group in groups}


def delete_offset(context: GroupContext, partition: int) -> int:
    topic = OffsetDeleteRequest.OffsetDeleteRequestTopic(
        name="t3", partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=partition)]
    )
    request = OffsetDeleteRequest(group_id="g", topics=[topic])
    response = context.run(lambda ctx: context.shard.delete_offsets(ctx, request))
    return response.topics[0].partitions[0].error_code


@pytest.mark.parametrize("kind", list(GONE))
def test_offsets_before_the_tombstone_of_their_group_have_a_group_and_can_be_deleted(kind: str) -> None:
    context = orphaned(kind)
    assert listed(context.shard) == {"g": ("Empty", "", "classic")}
    described = context.run(lambda ctx: context.shard.describe_groups(ctx, ["g"]))[0].complete()
    assert (described.error_code, described.group_state, described.protocol_type) == (0, "Empty", "")
    assert delete_offset(context, 0) == 0
    assert delete_offset(context, 3) == Errors.UNKNOWN_TOPIC_OR_PARTITION
    assert context.fetch("g") == {("t3", 1): (41, "")}
    (deleted,) = context.run(lambda ctx: context.shard.delete_groups(ctx, ["g"]))
    assert deleted.error_code == Errors.NONE
    assert (context.fetch("g"), listed(context.shard)) == ({}, {})


@pytest.mark.parametrize("kind", list(GONE))
def test_offsets_before_the_tombstone_of_their_group_expire(kind: str) -> None:
    context = orphaned(kind)
    context.sleep(9 * MINUTE_MS)
    assert len(context.fetch("g")) == 2
    context.sleep(2 * MINUTE_MS)
    assert (context.fetch("g"), listed(context.shard)) == ({}, {})


def test_after_a_crash_while_a_classic_member_joins_an_empty_consumer_group_its_offsets_have_a_group() -> None:
    context = GroupContext({"t3": 3}, RETENTION)
    context.join("g", "a", ["t3"])
    context.commit("g", {"t3": {0: 7}}, member="a", epoch=2)
    context.heartbeat("g", "a", -1)
    ClassicConsumer(context, "g", "b", ["t3"]).join()
    context.restart()
    assert listed(context.shard) == {"g": ("Empty", "consumer", "classic")}
    assert context.fetch("g") == {("t3", 0): (7, "")}


def of_snapshot(shard: GroupCoordinatorShard) -> GroupCoordinatorShard | None:
    """Returns a shard restored from the snapshot; None if there is no snapshot."""
    parts = shard.snapshot()
    if parts is None:
        return None
    restored = replayed([])
    runtime = ShardSet(lambda _: restored, SERDE)
    runtime.load(0, (), NOW_MS, 0, [chunk for slice_ in make_chunks(parts, SERDE) for chunk in slice_])
    return restored


@given(steps=logs(oddities=True))
def test_every_offset_of_any_log_has_a_group(steps: list[Step]) -> None:
    """The shards are loaded from the log and from a snapshot."""
    batches = batches_of(steps)
    loaded = replayed(batches)
    shards = [loaded, of_snapshot(loaded)]
    for shard in shards:
        if shard is not None:
            groups = listed(shard)
            for group in {group for group, _, _ in offsets_of(shard)}:
                assert group in groups
                if isinstance(shard.group(group), ClassicGroup):
                    assert groups[group][0] == "Empty"
    assert shards[1] is None or offsets_of(loaded) == offsets_of(shards[1])


def test_the_fast_path_of_loading_creates_the_group_again() -> None:
    """Batches with nothing but commits are copied into packed rows without becoming records."""
    commit = new_offset_commit_record("g", "t3", 0, CommittedOffset(5, -1, "", NOW_MS))

    records = (commit, *GONE["classic"], commit)
    shard = replayed(
        encode_batch_from_parts([SERDE.serialize(record)], NOW_MS, base_offset)
        for base_offset, record in enumerate(records)
    )
    assert listed(shard) == {"g": ("Empty", "", "classic")}
