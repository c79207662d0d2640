# SPDX-License-Identifier: Apache-2.0
"""Subscriptions and assignments of the classic protocol, against bytes written by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kcoord.coordinator.group.classic.consumer_protocol import (
    read_all_topics,
    read_assignment,
    read_subscription,
    read_topics,
    read_version,
    write_assignment,
)
from kcoord_protocol.messages import ConsumerProtocolSubscription

TOPICS = b"\0\0\0\1\0\1t"
"""An array of one topic, t."""
NO_USER_DATA = b"\xff\xff\xff\xff"
OWNED = b"\0\0\0\1\0\1t\0\0\0\2\0\0\0\3\0\0\0\5"
"""Partitions 3 and 5 of t."""
GENERATION = b"\0\0\0\7"
RACK = b"\0\1r"


@pytest.mark.parametrize(
    ("data", "version"),
    [
        (b"", None),
        (b"\0", None),
        (b"\0\0", 0),
        (b"\0\3rest", 3),
        (b"\1\0", 256),
        (b"\xff\xff", None),
        (b"\x7f\xff", 32767),
    ],
)
def test_the_version_is_the_first_two_bytes(data: bytes, version: int | None) -> None:
    assert read_version(data) == version


@pytest.mark.parametrize(
    ("version", "rest", "owned", "generation", "rack"),
    [
        (0, b"", [], -1, None),
        (1, OWNED, [3, 5], -1, None),
        (2, OWNED + GENERATION, [3, 5], 7, None),
        (3, OWNED + GENERATION + RACK, [3, 5], 7, "r"),
        (4, OWNED + GENERATION + RACK + b"more", [3, 5], 7, "r"),
        (32767, OWNED + GENERATION + RACK, [3, 5], 7, "r"),
    ],
)
def test_each_version_of_a_subscription_has_more_fields(
    version: int, rest: bytes, owned: list[int], generation: int, rack: str | None
) -> None:
    data = version.to_bytes(2, "big") + TOPICS + NO_USER_DATA + rest
    read = read_subscription(data)
    assert read is not None
    assert [p for partitions in read.owned_partitions for p in partitions.partitions] == owned
    assert (read.topics, read.generation_id, read.rack_id) == (["t"], generation, rack)
    assert read_topics(data) == ["t"]
    if rest:
        cut = data[: -len(rest)]
        assert read_subscription(cut) is None, "a field of its version is missing"
        assert read_topics(cut) == ["t"], "the fields of all versions are there"


@pytest.mark.parametrize("version", [0, 1, 2, 3, 9])
def test_an_assignment_is_the_same_in_all_versions(version: int) -> None:
    data = version.to_bytes(2, "big") + OWNED + NO_USER_DATA
    read = read_assignment(data + b"more")
    assert read is not None
    assert [(topic.topic, topic.partitions) for topic in read.assigned_partitions] == [("t", [3, 5])]
    assert write_assignment({"t": [3, 5]}, version) == min(version, 3).to_bytes(2, "big") + data[2:]


def test_no_bytes_are_an_empty_assignment_and_too_few_bytes_are_malformed() -> None:
    nothing = read_assignment(b"")
    assert nothing is not None
    assert nothing.assigned_partitions == []
    for data in (b"\0", b"\0\0", b"\xff\xff" + OWNED + NO_USER_DATA, b"\0\0" + OWNED):
        assert read_assignment(data) is None
    assert read_subscription(b"\xff\xff" + TOPICS + NO_USER_DATA) is None
    assert read_topics(b"\0") is None


OTHER = b"\0\0\0\1\0\1u"
USER_DATA = b"\0\0\0\1x"


@pytest.mark.parametrize(
    ("bodies", "topics", "decoded"),
    [
        ([], [], 0),
        ([TOPICS + NO_USER_DATA], ["t"], 1),
        ([TOPICS + NO_USER_DATA, TOPICS + NO_USER_DATA + OWNED, TOPICS + NO_USER_DATA + RACK], ["t"], 1),
        ([TOPICS + NO_USER_DATA, TOPICS + USER_DATA], ["t"], 2),
        ([TOPICS + NO_USER_DATA, OTHER + NO_USER_DATA, TOPICS + NO_USER_DATA], ["t", "u"], 3),
        ([TOPICS + USER_DATA, TOPICS + USER_DATA[:-1]], None, 2),
        ([TOPICS + NO_USER_DATA, b""], None, 2),
        ([b"", TOPICS + NO_USER_DATA], None, 1),
    ],
)
def test_subscriptions_that_differ_in_later_fields_are_decoded_once(
    monkeypatch: pytest.MonkeyPatch, bodies: Sequence[bytes], topics: list[str] | None, decoded: int
) -> None:
    count, decode = 0, ConsumerProtocolSubscription.decode_prefix

    def decode_and_count(data: bytes, offset: int, version: int) -> tuple[ConsumerProtocolSubscription, int]:
        nonlocal count
        count += 1
        return decode(data, offset, version)

    monkeypatch.setattr(ConsumerProtocolSubscription, "decode_prefix", decode_and_count)
    read = read_all_topics([version.to_bytes(2, "big") + body for version, body in enumerate(bodies)])
    assert (read if read is None else sorted(read), count) == (topics, decoded)
