# SPDX-License-Identifier: Apache-2.0
"""The groups, offsets and topics that exist after the last record of a log of group records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    GroupMetadataKey,
    OffsetCommitKey,
)

CONSUMER = "consumer"
CLASSIC = "classic"


class LiveState:
    """Collects the live state. The caller notes every record that counts, in order."""

    def __init__(self) -> None:
        self._types: dict[str, str] = {}
        self._offsets: dict[str, set[tuple[str, int]]] = {}
        self._lost: set[str] = set()
        self._assigned: dict[tuple[str, str, str], frozenset[bytes]] = {}

    def note(self, record: CoordinatorRecord) -> None:
        if record.value is not None:
            group_id = getattr(record.key, "group_id", getattr(record.key, "group", ""))
            self._lost.discard(group_id)
        match record.key:
            case OffsetCommitKey() as key:
                self._note_offset(key, is_tombstone=record.value is None)
            case ConsumerGroupMetadataKey() as key:
                self._note_group(key.group_id, CONSUMER, is_tombstone=record.value is None)
            case GroupMetadataKey() as key:
                self._note_group(key.group, CLASSIC, is_tombstone=record.value is None)
            case (ConsumerGroupTargetAssignmentMemberKey() | ConsumerGroupCurrentMemberAssignmentKey()) as key:
                place = (type(key).message_name, key.group_id, key.member_id)
                self._assigned.pop(place, None)
                ids = _topic_ids(record)
                if ids:
                    self._assigned[place] = ids
            case _:
                return

    def note_unknown(self, group_id: str) -> None:
        """Notes that a group has a record of an unknown type, such as a share or streams group: it is not lost."""
        self._lost.discard(group_id)

    def _note_offset(self, key: OffsetCommitKey, *, is_tombstone: bool) -> None:
        offsets = self._offsets.setdefault(key.group, set())
        if not is_tombstone:
            offsets.add((key.topic, key.partition))
            return
        offsets.discard((key.topic, key.partition))
        if not offsets:
            del self._offsets[key.group]
            self._lost.discard(key.group)

    def _note_group(self, group_id: str, group_type: str, *, is_tombstone: bool) -> None:
        """Notes a group record. A tombstone of either type deletes a group that has only offsets, as in Kafka."""
        if not is_tombstone:
            self._types[group_id] = group_type
        elif self._types.get(group_id, group_type) == group_type:
            self._types.pop(group_id, None)
            if group_id in self._offsets:
                self._lost.add(group_id)

    @property
    def groups(self) -> Counter[str]:
        """The number of groups by type. A group that has only offsets counts as classic."""
        simple = self._offsets.keys() - self._types.keys()
        return Counter(self._types.values()) + Counter({CLASSIC: len(simple)})

    @property
    def lost_groups(self) -> Mapping[str, int]:
        """The number of offsets of every lost group: its last group record is a tombstone (see `lost_groups`)."""
        return {group_id: len(self._offsets[group_id]) for group_id in sorted(self._lost)}

    @property
    def offsets(self) -> int:
        return sum(map(len, self._offsets.values()))

    @property
    def topic_names(self) -> set[str]:
        """The names of topics with committed offsets."""
        return {topic for offsets in self._offsets.values() for topic, _ in offsets}

    @property
    def topic_ids(self) -> set[bytes]:
        """The ids of topics in current or target assignments."""
        return {topic_id for ids in self._assigned.values() for topic_id in ids}


def _topic_ids(record: CoordinatorRecord) -> frozenset[bytes]:
    match record.value:
        case ConsumerGroupTargetAssignmentMemberValue() as target:
            return frozenset(topic.topic_id for topic in target.topic_partitions)
        case ConsumerGroupCurrentMemberAssignmentValue() as current:
            owned = (*current.assigned_partitions, *current.partitions_pending_revocation)
            return frozenset(topic.topic_id for topic in owned)
        case _:
            return frozenset()
