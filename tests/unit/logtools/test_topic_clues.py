# SPDX-License-Identifier: Apache-2.0
"""Topics that are guessed from group records alone."""

from __future__ import annotations

from collections.abc import Sequence

from kcoord.coordinator.group import records
from kcoord.coordinator.group.consumer.group import ConsumerGroupMember
from kcoord.logtools.topic_clues import GuessedTopic, TopicClues
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import OffsetCommitKey, OffsetCommitValue
from kcoord_protocol.uuid import ZERO_UUID

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def commit(topic: str, partition: int, topic_id: bytes = ZERO_UUID) -> CoordinatorRecord:
    value = OffsetCommitValue(offset=1, topic_id=topic_id)
    return CoordinatorRecord(OffsetCommitKey(group="g", topic=topic, partition=partition), value, 4)


def subscribed(member_id: str, names: Sequence[str]) -> CoordinatorRecord:
    member = ConsumerGroupMember(member_id, subscribed_topic_names=tuple(names))
    return records.new_member_subscription_record("g", member)


def target(member_id: str, *assigned: tuple[bytes, Sequence[int]]) -> CoordinatorRecord:
    return records.new_target_assignment_record(
        "g", member_id, {topic_id: frozenset(numbers) for topic_id, numbers in assigned}
    )


def clues(*noted_records: CoordinatorRecord) -> TopicClues:
    made = TopicClues()
    for record in noted_records:
        made.note(record)
    return made


def test_commits_name_topics_ids_and_partitions() -> None:
    topic_clues = clues(commit("orders", 4, A), commit("orders", 1, A), commit("old", 2))
    assert topic_clues.topics(["orders", "old"], []) == [
        GuessedTopic("old", ZERO_UUID, 3),
        GuessedTopic("orders", A, 5),
    ]


def test_a_topic_that_was_created_again_has_its_new_id_and_partitions() -> None:
    assert clues(commit("orders", 9, A), commit("orders", 1, B)).topics(["orders"], []) == [
        GuessedTopic("orders", B, 2)
    ]


def test_partitions_without_commits_are_counted_from_assignments() -> None:
    topic_clues = clues(commit("orders", 0, A), subscribed("m", ["orders"]), target("m", (A, range(12))))
    assert topic_clues.topics(["orders"], []) == [GuessedTopic("orders", A, 12)]


def test_an_id_belongs_to_the_only_name_that_is_left() -> None:
    topic_clues = clues(
        subscribed("one", ["a", "b"]),
        target("one", (A, [0]), (B, [0, 1])),
        subscribed("two", ["a"]),
        target("two", (A, [1])),
    )
    assert topic_clues.topics([], [A, B]) == [GuessedTopic("a", A, 2), GuessedTopic("b", B, 2)]


def test_an_ambiguous_id_is_not_guessed() -> None:
    topic_clues = clues(subscribed("one", ["a", "b"]), target("one", (A, [0]), (B, [0])))
    assert topic_clues.topics([], [A, B, C]) == []


def test_only_requested_topics_are_returned() -> None:
    assert clues(commit("gone", 0, A), commit("here", 0, B)).topics(["here"], []) == [GuessedTopic("here", B, 1)]
