# SPDX-License-Identifier: Apache-2.0
"""The groups and committed offsets of a shard as the parts of a snapshot.

Groups are stored as records. Offsets are stored as the packed rows of the memory, so that a million of them are written
and read without touching single offsets. A snapshot is written in pieces while the shard works; the records after its
offset repeat every change since it began.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from struct import Struct
from struct import error as StructError
from typing import Final

from kcoord.coordinator.group import records
from kcoord.coordinator.group.classic.group import ClassicGroup
from kcoord.coordinator.group.classic.rebalance import GROUP_METADATA_VALUE_VERSION
from kcoord.coordinator.group.consumer.group import ConsumerGroup
from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import (
    CELL_BYTES,
    TIME_BYTES,
    CommittedOffsets,
    Note,
    TopicOffsets,
)
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.snapshot import PackedState, SnapshotPart
from kcoord_protocol.messages import GroupMetadataKey

OFFSETS: Final = 2
"""The kind of the packed part: all committed offsets of one group.

Kind 1 had other rows. A snapshot with such a part is not restored; the whole log is replayed instead.
"""

_GROUP: Final = Struct(">HI")
"""Length of the group id, number of topics."""
_TOPIC: Final = Struct(">H16sII")
"""Length of the name, topic id, number of notes, number of rows."""
_NOTE: Final = Struct(">i16sqI")
"""Partition, topic id, expire timestamp, length of the metadata."""


def parts(groups: Mapping[str, Group], offsets: CommittedOffsets, imports: Collection[str]) -> Iterator[SnapshotPart]:
    """Yields the parts. A group that is deleted before its turn is omitted."""
    for group_id in list(imports):
        yield records.new_group_import_record(group_id)
    for group_id in list(groups):
        yield from _group_records(groups, group_id)
    for group_id in list(offsets.group_ids()):
        topics = offsets.packed(group_id)
        if topics:
            yield PackedState(OFFSETS, _pack(group_id, topics))


def _group_records(groups: Mapping[str, Group], group_id: str) -> Iterator[CoordinatorRecord]:
    group = groups.get(group_id)
    if isinstance(group, ConsumerGroup):
        yield from _consumer_group_records(group)
    elif isinstance(group, ClassicGroup) and group.persisted is not None:
        yield CoordinatorRecord(GroupMetadataKey(group=group_id), group.persisted, GROUP_METADATA_VALUE_VERSION)


def _consumer_group_records(group: ConsumerGroup) -> Iterator[CoordinatorRecord]:
    # Members may change between two parts. The records after the snapshot's offset repeat such changes.
    group_id = group.group_id
    yield records.new_group_epoch_record(
        group_id, group.group_epoch, group.metadata_hash, group.creation_time_ms, None, group.empty_since_ms
    )
    for member_id in list(group.members):
        member = group.members.get(member_id)
        if member is not None:
            yield records.new_member_subscription_record(group_id, member)
            yield records.new_current_assignment_record(group_id, member)
    yield records.new_target_assignment_epoch_record(
        group_id, group.assignment_epoch, group.assignment_timestamp_ms, group.target_assignor, group.assigned_by
    )
    for member_id in list(group.target_assignment):
        target = group.target_assignment.get(member_id)
        if target is not None:
            yield records.new_target_assignment_record(group_id, member_id, target, group.target_metadata_of(member_id))
    for regex, resolved in list(group.resolved_regexes.items()):
        yield records.new_regular_expression_record(
            group_id, regex, resolved.topics, resolved.version, resolved.timestamp_ms
        )


def _pack(group_id: str, topics: Mapping[str, TopicOffsets]) -> bytes:
    name = group_id.encode()
    packed = [_GROUP.pack(len(name), len(topics)), name]
    for topic, offsets in topics.items():
        name = topic.encode()
        notes = offsets.notes or {}
        packed += _TOPIC.pack(len(name), offsets.topic_id, len(notes), len(offsets)), name
        packed += bytes(offsets.cells), bytes(offsets.times)
        for partition, note in notes.items():
            text = note.metadata.encode()
            packed += _NOTE.pack(partition, note.topic_id, note.expire_timestamp_ms, len(text)), text
    return b"".join(packed)


def restore_offsets(groups: dict[str, Group], offsets: CommittedOffsets, data: bytes) -> None:
    """Restores one group's offsets; raises ValueError if the bytes are malformed."""
    try:
        length, topics = _GROUP.unpack_from(data)
        position = _GROUP.size
        group_id = data[position : position + length].decode()
        position += length
        for _ in range(topics):
            length, topic_id, notes_count, rows_count = _TOPIC.unpack_from(data, position)
            position += _TOPIC.size
            topic = data[position : position + length].decode()
            position += length
            cells = bytearray(data[position : position + rows_count * CELL_BYTES])
            position += rows_count * CELL_BYTES
            times = bytearray(data[position : position + rows_count * TIME_BYTES])
            position += rows_count * TIME_BYTES
            notes: dict[int, Note] | None = {} if notes_count else None
            for _ in range(notes_count):
                partition, note_id, expires, length = _NOTE.unpack_from(data, position)
                position += _NOTE.size
                assert notes is not None
                notes[partition] = Note(data[position : position + length].decode(), note_id, expires)
                position += length
            offsets.put_topic(group_id, topic, TopicOffsets(topic_id, cells, times, notes))
    except (StructError, UnicodeDecodeError) as error:
        raise ValueError(f"packed offsets are malformed: {error}") from error
    if position != len(data):
        raise ValueError(f"packed offsets end at {position} of {len(data)} bytes")
    if group_id not in groups:
        groups[group_id] = ClassicGroup(group_id)
