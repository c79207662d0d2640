# SPDX-License-Identifier: Apache-2.0
"""Compaction relies on this: a tombstone gives the state without the record."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroupMember
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import TombstoneReason
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import CoordinatorRecord

TOPIC_ID = b"\1" * 16
MEMBERS = [
    ConsumerGroupMember(
        name,
        member_epoch=3,
        previous_member_epoch=2,
        subscribed_topic_regex="t.*",
        rebalance_timeout_ms=1_000,
        assigned={TOPIC_ID: {partition: 3}},
    )
    for partition, name in enumerate(("a", "b"))
]
REMOVED = TombstoneReason.REPLACED

LOG = [
    records.new_group_epoch_record("g", 3, 5, 7, None),
    *(records.new_member_subscription_record("g", member) for member in MEMBERS),
    records.new_regular_expression_record("g", "t.*", ["t"], 1, 2),
    *(
        records.new_target_assignment_record("g", member.member_id, {TOPIC_ID: frozenset({partition})})
        for partition, member in enumerate(MEMBERS)
    ),
    records.new_target_assignment_epoch_record("g", 3, 4),
    *(records.new_current_assignment_record("g", member) for member in MEMBERS),
    records.new_offset_commit_record("g", "t", 0, CommittedOffset(5, 1, "", 6)),
    records.new_offset_commit_record("g", "t", 1, CommittedOffset(5, 1, "note", 6)),
]


def state_of(log: Sequence[CoordinatorRecord]) -> object:
    shard = GroupCoordinatorShard(BrokerConfig.from_properties({}), MetadataImage.empty())
    for record in log:
        shard.replay(record)
    return shard.hard_state()


@pytest.mark.parametrize(
    "tombstone",
    [
        lambda: records.new_current_assignment_tombstone("g", "a", REMOVED),
        lambda: records.new_target_assignment_tombstone("g", "b", REMOVED),
        lambda: records.new_regular_expression_tombstone("g", "t.*", REMOVED),
        lambda: records.new_offset_commit_tombstone("g", "t", 0, REMOVED),
        lambda: records.new_offset_commit_tombstone("g", "t", 1, REMOVED),
    ],
)
def test_a_tombstone_gives_the_state_without_the_record(tombstone: Callable[[], CoordinatorRecord]) -> None:
    removed = tombstone()
    without = [record for record in LOG if record.key != removed.key]
    assert len(without) == len(LOG) - 1
    assert state_of([*LOG, removed]) == state_of(without)
    assert state_of([*LOG, removed, removed]) == state_of(without)
    assert state_of([removed, *LOG]) == state_of(LOG), "the record did not exist yet"
    assert state_of([removed]) == state_of([]), "a tombstone creates no group"
    assert state_of(LOG) != state_of(without)


def test_the_tombstones_of_a_member_delete_only_this_member() -> None:
    tombstones = [
        records.new_current_assignment_tombstone("g", "a", REMOVED),
        records.new_target_assignment_tombstone("g", "a", REMOVED),
        records.new_member_subscription_tombstone("g", "a", REMOVED),
    ]
    keys = [tombstone.key for tombstone in tombstones]
    assert state_of([*LOG, *tombstones]) == state_of([record for record in LOG if record.key not in keys])
