# SPDX-License-Identifier: Apache-2.0
"""Computes the state of groups at a moment from the output of Kafka's kafka-dump-log, without code of the lake."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.support.offsets_sample import Dumped, Key

COMMIT, CLASSIC_GROUP, MEMBER, OWNED = 1, 2, 5, 8


class State(NamedTuple):
    """The state of all groups.

    `members` has group and member id. `owned` has group, member id, topic (the topic id in KIP-848 groups), partition,
    and whether the member has to revoke it.
    """

    offsets: dict[Key, int]
    members: set[tuple[str, str]]
    owned: set[tuple[str, str, str, int, bool]]


def replay(records: Iterable[Dumped], moment_ms: int) -> State:
    values: dict[tuple[int, str], tuple[dict[str, object], dict[str, object]]] = {}
    for record in records:
        if record.timestamp_ms > moment_ms:
            continue
        assert isinstance(record.key, dict)
        kind, key = int(record.key["type"]), record.key["data"]
        name = (kind, str(sorted(key.items())))
        if record.payload is None:
            values.pop(name, None)
        else:
            assert isinstance(record.payload, dict)
            values[name] = (key, record.payload["data"])
    state = State({}, set(), set())
    for (kind, _), (key, value) in values.items():
        _add(state, kind, key, value)
    return state


def _add(state: State, kind: int, key: dict[str, object], value: dict[str, object]) -> None:
    if kind == COMMIT:
        state.offsets[str(key["group"]), str(key["topic"]), int(str(key["partition"]))] = int(str(value["offset"]))
    elif kind == MEMBER:
        state.members.add((str(key["groupId"]), str(key["memberId"])))
    elif kind == OWNED:
        owner = str(key["groupId"]), str(key["memberId"])
        for field, revoking in (("assignedPartitions", False), ("partitionsPendingRevocation", True)):
            state.owned.update((*owner, *place, revoking) for place in _partitions(value[field], "topicId"))
    elif kind == CLASSIC_GROUP:
        for member in _list(value["members"]):
            owner = str(key["group"]), str(member["memberId"])
            state.members.add(owner)
            assignment = member["assignment"]
            assert isinstance(assignment, dict)
            places = _partitions(assignment["assignedPartitions"], "topic")
            state.owned.update((*owner, *place, False) for place in places)


def _list(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list)
    return value


def _partitions(topics: object, name: str) -> Iterator[tuple[str, int]]:
    for topic in _list(topics):
        numbers = topic["partitions"]
        assert isinstance(numbers, list)
        yield from ((str(topic[name]), number) for number in numbers)
