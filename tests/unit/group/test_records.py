# SPDX-License-Identifier: Apache-2.0
"""Values of records, in addition to the transcripts: versions, missing fields, and records of other Kafka versions."""

from __future__ import annotations

import pytest

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroupMember
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMetadataValue,
    OffsetCommitValue,
)
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.group.group_context import SERDE

TOPIC_ID = b"\1" * 16


@pytest.mark.parametrize(
    ("expire_timestamp_ms", "topic_id", "version", "leader_epoch", "kept_topic_id"),
    [
        (-1, ZERO_UUID, 3, 7, ZERO_UUID),
        (-1, TOPIC_ID, 4, 7, TOPIC_ID),
        (0, ZERO_UUID, 1, -1, ZERO_UUID),
        (0, TOPIC_ID, 1, -1, ZERO_UUID),
        (1_000, TOPIC_ID, 1, -1, ZERO_UUID),
    ],
)
def test_an_offset_has_the_lowest_version_with_all_its_fields(
    expire_timestamp_ms: int, topic_id: bytes, version: int, leader_epoch: int, kept_topic_id: bytes
) -> None:
    offset = CommittedOffset(5, 7, "note", 6, expire_timestamp_ms, topic_id)
    record = records.new_offset_commit_record("g", "t", 2, offset)
    assert record.value_version == version
    assert record.value == OffsetCommitValue(
        offset=5,
        leader_epoch=leader_epoch,
        metadata="note",
        commit_timestamp=6,
        expire_timestamp=expire_timestamp_ms,
        topic_id=kept_topic_id,
    )
    assert SERDE.deserialize(*SERDE.serialize(record)) == record


@pytest.mark.parametrize(("empty_since_ms", "kept"), [(-1, -1), (0, 0), (1, 1), (2**40, 2**40)])
def test_the_time_when_a_group_became_empty_is_in_the_log(empty_since_ms: int, kept: int) -> None:
    record = records.new_group_epoch_record("g", 3, 4, 5, records.EpochReason.LEAVE, empty_since_ms)
    stored = SERDE.deserialize(*SERDE.serialize(record))
    assert stored is not None
    assert isinstance(stored.value, ConsumerGroupMetadataValue)
    assert records.empty_since_from(stored.value) == kept
    assert not records.is_migration(stored.value)


@pytest.mark.parametrize("assigned", [{1: 5, 16: 7}, {16: 7, 1: 5}])
def test_partitions_are_in_order_in_the_record_of_a_member(assigned: dict[int, int]) -> None:
    value = records.new_current_assignment_record("g", ConsumerGroupMember("m", assigned={TOPIC_ID: assigned})).value
    assert isinstance(value, ConsumerGroupCurrentMemberAssignmentValue)
    topic = value.assigned_partitions[0]
    assert (topic.partitions, topic.assignment_epochs) == ([1, 16], [5, 7])


def test_partitions_without_assignment_epochs_have_the_member_epoch() -> None:
    topic = ConsumerGroupCurrentMemberAssignmentValue.TopicPartitions
    stored = [
        topic(topic_id=TOPIC_ID, partitions=[1, 4]),
        topic(topic_id=b"\2" * 16, partitions=[0, 2], assignment_epochs=[5, 6]),
    ]
    assert records.epoch_assignment_from(stored, 7) == {TOPIC_ID: {1: 7, 4: 7}, b"\2" * 16: {0: 5, 2: 6}}
