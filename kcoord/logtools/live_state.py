# SPDX-License-Identifier: Apache-2.0
"""Which groups, offsets and topics a log of group records speaks of in the end: what was not deleted again."""

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
    """Show it every record that counts, in order."""

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
        """A record of a type that is not known here, a share group's or a streams group's: the group is there."""
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
        """A group that is there by its offsets alone goes with a tombstone of either type, as it does in Kafka."""
        if not is_tombstone:
            self._types[group_id] = group_type
        elif self._types.get(group_id, group_type) == group_type:
            self._types.pop(group_id, None)
            if group_id in self._offsets:
                self._lost.add(group_id)

    @property
    def groups(self) -> Counter[str]:
        """By type. A group that has nothing but offsets is a classic one."""
        simple = self._offsets.keys() - self._types.keys()
        return Counter(self._types.values()) + Counter({CLASSIC: len(simple)})

    @property
    def lost_groups(self) -> Mapping[str, int]:
        """The groups that have offsets although their tombstone came last, and how many (see `lost_groups`)."""
        return {group_id: len(self._offsets[group_id]) for group_id in sorted(self._lost)}

    @property
    def offsets(self) -> int:
        return sum(map(len, self._offsets.values()))

    @property
    def topic_names(self) -> set[str]:
        """Topics with committed offsets."""
        return {topic for offsets in self._offsets.values() for topic, _ in offsets}

    @property
    def topic_ids(self) -> set[bytes]:
        """Topics that members own or are to own."""
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
