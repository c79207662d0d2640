# SPDX-License-Identifier: Apache-2.0
"""The state of groups at a moment, by replaying what Kafka's own kafka-dump-log printed up to there: one dictionary per
kind of key, nothing of the lake.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tests.support.offsets_sample import Dumped, Key

COMMIT, CLASSIC_GROUP, MEMBER, OWNED = 1, 2, 5, 8


class State(NamedTuple):
    """`members`: group and member id. `owned`: group, member id, topic (its id in KIP-848 groups), partition, and
    whether it is being given up.
    """

    offsets: dict[Key, int]
    members: set[tuple[str, str]]
    owned: set[tuple[str, str, str, int, bool]]


def replay(records: Iterable[Dumped], moment_ms: int) -> State:
    values: dict[tuple[int, str], tuple[dict[str, object], dict[str, object]]] = {}
    for each in records:
        if each.timestamp_ms > moment_ms:
            continue
        assert isinstance(each.key, dict)
        kind, key = int(each.key["type"]), each.key["data"]
        name = (kind, str(sorted(key.items())))
        if each.payload is None:
            values.pop(name, None)
        else:
            assert isinstance(each.payload, dict)
            values[name] = (key, each.payload["data"])
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
