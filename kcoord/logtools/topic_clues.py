# SPDX-License-Identifier: Apache-2.0
"""Guesses topics from a `__consumer_offsets` log, for an import without the source's metadata log.

Offset commits contain the name and the id of a topic. For topics without such commits, the subscribed names and the
assigned ids of members are compared: if an id can have only one name, it belongs to that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kcoord.coordinator.group.classic.consumer_protocol import read_assignment
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    GroupMetadataValue,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kcoord_protocol.uuid import ZERO_UUID


@dataclass(slots=True)
class GuessedTopic:
    """A topic that a log mentions. `id` is zero if it is unknown."""

    name: str
    id: bytes
    partitions: int


@dataclass(slots=True)
class TopicClues:
    """Collects clues. The caller notes every record that counts, then asks for the topics of the final state."""

    _ids: dict[str, bytes] = field(default_factory=dict)
    _partitions: dict[str, int] = field(default_factory=dict)
    _partitions_by_id: dict[bytes, int] = field(default_factory=dict)
    _subscriptions: dict[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    _candidates: dict[bytes, frozenset[str]] = field(default_factory=dict)

    def note(self, record: CoordinatorRecord) -> None:
        match record.key, record.value:
            case OffsetCommitKey() as key, OffsetCommitValue() as value:
                self._note_commit(key, value)
            case ConsumerGroupMemberMetadataKey() as key, ConsumerGroupMemberMetadataValue() as value:
                names = frozenset(value.subscribed_topic_names) if not value.subscribed_topic_regex else frozenset()
                self._subscriptions[key.group_id, key.member_id] = names
            case ConsumerGroupTargetAssignmentMemberKey() as key, ConsumerGroupTargetAssignmentMemberValue() as value:
                for target in value.topic_partitions:
                    self._note_assigned(key.group_id, key.member_id, target.topic_id, target.partitions)
            case ConsumerGroupCurrentMemberAssignmentKey() as key, ConsumerGroupCurrentMemberAssignmentValue() as value:
                for owned in (*value.assigned_partitions, *value.partitions_pending_revocation):
                    self._note_assigned(key.group_id, key.member_id, owned.topic_id, owned.partitions)
            case _, GroupMetadataValue() as value:
                self._note_classic(value)
            case _, ConsumerGroupRegularExpressionValue() as value:
                for name in value.topics:
                    self._partitions.setdefault(name, 0)
            case _:
                return

    def _note_commit(self, key: OffsetCommitKey, value: OffsetCommitValue) -> None:
        if value.topic_id != ZERO_UUID:
            if self._ids.get(key.topic) != value.topic_id:
                # The topic was created again, so the partition count of the old topic does not apply.
                self._partitions.pop(key.topic, None)
            self._ids[key.topic] = value.topic_id
        self._note_partition(key.topic, key.partition)

    def _note_partition(self, name: str, partition: int) -> None:
        self._partitions[name] = max(self._partitions.get(name, 0), partition + 1)

    def _note_assigned(self, group_id: str, member_id: str, topic_id: bytes, partitions: Iterable[int]) -> None:
        count = max(partitions, default=-1) + 1
        self._partitions_by_id[topic_id] = max(self._partitions_by_id.get(topic_id, 0), count)
        names = self._subscriptions.get((group_id, member_id))
        if names:
            earlier = self._candidates.get(topic_id)
            self._candidates[topic_id] = (names & earlier or names) if earlier is not None else names

    def _note_classic(self, value: GroupMetadataValue) -> None:
        for member in value.members:
            assignment = read_assignment(member.assignment) if value.protocol_type == "consumer" else None
            for topic in assignment.assigned_partitions if assignment is not None else ():
                for partition in topic.partitions:
                    self._note_partition(topic.topic, partition)

    def topics(self, topic_names: Iterable[str], topic_ids: Iterable[bytes]) -> list[GuessedTopic]:
        """Returns the topics with these names, and those of these ids whose name follows from the clues."""
        ids = self._solved()
        names_by_id = {topic_id: name for name, topic_id in ids.items()}
        names = {*topic_names, *(names_by_id[topic_id] for topic_id in topic_ids if topic_id in names_by_id)}
        topics = []
        for name in sorted(names):
            topic_id = ids.get(name, ZERO_UUID)
            partitions = max(self._partitions.get(name, 0), self._partitions_by_id.get(topic_id, 0), 1)
            topics.append(GuessedTopic(name, topic_id, partitions))
        return topics

    def _solved(self) -> Mapping[str, bytes]:
        """Returns ids by name, as far as they follow. An id with one possible name takes that name from other ids."""
        ids = dict(self._ids)
        used = set(ids.values())
        left = {topic_id: names for topic_id, names in self._candidates.items() if topic_id not in used}
        progress = True
        while progress:
            progress = False
            for topic_id, names in sorted(left.items()):
                free = [name for name in sorted(names) if name not in ids]
                if len(free) == 1:
                    ids[free[0]] = topic_id
                    del left[topic_id]
                    progress = True
        return ids
