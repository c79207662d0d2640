# SPDX-License-Identifier: Apache-2.0
"""KIP-227: for all requests and all failures, the leader reads exactly the requested partitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client.consumer.fetch_session import FetchPosition, FetchSessionHandler
from kcoord.client.types import TopicPartition
from kcoord_protocol.messages import FetchRequest
from tests.unit.client.records_broker import FetchSessions

A0, A1, B0 = TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 0)
ID, OTHER_ID = b"\x01" * 16, b"\x02" * 16


def place(offset: int, topic_id: bytes = ID) -> FetchPosition:
    return FetchPosition(topic_id, offset, 3)


def ask(
    session: FetchSessionHandler, positions: dict[TopicPartition, FetchPosition], version: int = 13
) -> FetchRequest:
    request = session.ask(FetchRequest(), positions, version, 1000)
    return FetchRequest.decode(request.encode(version), version)


def named(request: FetchRequest) -> list[tuple[bytes, int, int]]:
    return [
        (topic.topic_id, partition.partition, partition.fetch_offset)
        for topic in request.topics
        for partition in topic.partitions
    ]


def test_a_request_names_only_changes() -> None:
    session = FetchSessionHandler()
    first = ask(session, {A0: place(0), A1: place(0)})
    assert (first.session_id, first.session_epoch, len(named(first))) == (0, 0, 2)
    session.answered(77)
    second = ask(session, {A0: place(5), A1: place(0)})
    assert (second.session_id, second.session_epoch, named(second)) == (77, 1, [(ID, 0, 5)])
    session.answered(77)
    third = ask(session, {A0: place(5)})
    assert (third.session_epoch, named(third)) == (2, [])
    assert [(topic.topic_id, topic.partitions) for topic in third.forgotten_topics_data] == [(ID, [1])]


def test_a_recreated_topic_is_another_topic() -> None:
    session = FetchSessionHandler()
    ask(session, {A0: place(5)})
    session.answered(77)
    request = ask(session, {A0: place(5, OTHER_ID)})
    assert [(topic.topic_id, topic.partitions) for topic in request.forgotten_topics_data] == [(ID, [0])]
    assert named(request) == [(OTHER_ID, 0, 5)]


def test_a_lost_response_ends_the_session() -> None:
    session = FetchSessionHandler()
    ask(session, {A0: place(0)})
    session.answered(77)
    session.failed()
    again = ask(session, {A0: place(0)})
    assert (again.session_id, again.session_epoch, named(again)) == (77, 0, [(ID, 0, 0)])


def test_old_brokers_have_no_sessions() -> None:
    session = FetchSessionHandler()
    for _ in range(2):
        request = ask(session, {A0: place(0)}, 6)
        assert (request.session_epoch, len(request.topics)) == (-1, 1)
        session.answered(0)


@pytest.mark.parametrize(("version", "has_session"), [(6, False), (7, True)])
def test_sessions_began_with_version_7(version: int, has_session: bool) -> None:
    session = FetchSessionHandler()
    ask(session, {A0: place(0)}, version)
    session.answered(77)
    request = ask(session, {A0: place(0)}, version)
    assert (request.session_id, request.session_epoch) == ((77, 1) if has_session else (0, -1))
    assert len(request.topics) == (0 if has_session else 1)


def test_the_epoch_counts_the_requests() -> None:
    session = FetchSessionHandler()
    epochs = []
    for _ in range(4):
        epochs.append(ask(session, {A0: place(0)}).session_epoch)
        session.answered(77)
    assert epochs == [0, 1, 2, 3]


def test_names_and_ids_are_not_mixed_in_a_session() -> None:
    session = FetchSessionHandler()
    ask(session, {A0: place(0)}, 12)
    session.answered(77)
    request = ask(session, {A0: place(0)}, 13)
    assert (request.session_id, request.session_epoch, len(named(request))) == (77, 0, 1)


STEPS = st.lists(
    st.tuples(
        st.dictionaries(
            st.sampled_from([A0, A1, B0]), st.builds(place, st.integers(0, 2), st.sampled_from([ID, OTHER_ID]))
        ),
        st.sampled_from(["answer", "answer", "answer", "lost request", "lost answer", "evicted", "no room"]),
    ),
    max_size=20,
)


@given(STEPS)
def test_the_leader_reads_exactly_the_requested_partitions(
    steps: list[tuple[dict[TopicPartition, FetchPosition], str]],
) -> None:
    session, leader = FetchSessionHandler(), FetchSessions()
    for positions, fate in steps:
        if fate == "evicted":
            leader.sessions.clear()
        request = session.ask(FetchRequest(), positions, 17, 1000)
        if fate == "lost request":
            session.failed()
            continue
        error, session_id = leader.fetch(request, keeps=fate != "no room")
        if error:
            assert request.session_epoch > 0, "a full request always succeeds"
            session.failed(error)
            continue
        expected = {
            (partition.topic, position.topic_id, partition.partition): (position.offset, position.leader_epoch)
            for partition, position in positions.items()
        }
        assert leader.read == expected
        if fate == "lost answer":
            session.failed()
        else:
            session.answered(session_id)
