# SPDX-License-Identifier: Apache-2.0
"""Incremental fetch sessions (KIP-227): a leader remembers what it was asked for, and is told only what has changed.

One session per leader. A first, full request opens it; each further one names new and moved partitions, and those to
forget; the answer leaves out partitions without news. After any failure the next request is a full one again, which
ends the session that the leader may still have. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kcoord.client.types import TopicPartition
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import FetchRequest

NO_SESSION: Final = 0
FULL_EPOCH: Final = 0
FIRST_VERSION_WITH_SESSIONS: Final = 7
FIRST_VERSION_WITH_TOPIC_IDS: Final = 13

SESSION_ERRORS: Final = frozenset(
    {
        Errors.FETCH_SESSION_ID_NOT_FOUND,
        Errors.INVALID_FETCH_SESSION_EPOCH,
        Errors.FETCH_SESSION_TOPIC_ID_ERROR,
        Errors.INCONSISTENT_TOPIC_ID,
    }
)
"""The leader has lost the session, or remembers something else: a full request mends it."""

_LARGEST_EPOCH: Final = 0x7FFF_FFFF


class FetchPosition(NamedTuple):
    """Where to read a partition."""

    topic_id: bytes
    offset: int
    leader_epoch: int


class FetchSessionHandler:
    """`ask` fills in a request, then `answered` or `failed` says how it went; one request is under way at a time."""

    def __init__(self) -> None:
        self._id = NO_SESSION
        self._epoch = FULL_EPOCH
        self._with_ids = False
        self._known: dict[TopicPartition, FetchPosition] = {}

    @property
    def id(self) -> int:
        """The session that the leader has, as far as is known; 0 for none."""
        return self._id

    @property
    def is_incremental(self) -> bool:
        """Whether the next request names only what has changed."""
        return self._epoch != FULL_EPOCH

    def ask(
        self, request: FetchRequest, wanted: Mapping[TopicPartition, FetchPosition], version: int, max_bytes: int
    ) -> FetchRequest:
        """Adds session and partitions to a request of that version; each partition may bring `max_bytes`."""
        with_ids = version >= FIRST_VERSION_WITH_TOPIC_IDS
        if with_ids != self._with_ids or version < FIRST_VERSION_WITH_SESSIONS:
            self.failed()
        self._with_ids = with_ids
        forgotten: list[tuple[TopicPartition, bytes]] = []
        named = wanted
        if self.is_incremental:
            forgotten = [
                (partition, place.topic_id)
                for partition, place in self._known.items()
                if partition not in wanted or wanted[partition].topic_id != place.topic_id
            ]
            named = {partition: place for partition, place in wanted.items() if self._known.get(partition) != place}
        if version >= FIRST_VERSION_WITH_SESSIONS:
            request.session_id, request.session_epoch = self._id, self._epoch
            request.forgotten_topics_data = _forgotten_topics(forgotten)
        request.topics = _topics(named, max_bytes)
        self._known = dict(wanted)
        return request

    def answered(self, session_id: int) -> None:
        """The leader answered without an error of its own; id 0 says that it keeps no session."""
        if session_id == NO_SESSION:
            self._id, self._epoch = NO_SESSION, FULL_EPOCH
        else:
            self._id, self._epoch = session_id, self._epoch % _LARGEST_EPOCH + 1

    def failed(self, error: Errors | None = None) -> None:
        """It is not known what the leader remembers."""
        if error is Errors.FETCH_SESSION_ID_NOT_FOUND:
            self._id = NO_SESSION
        self._epoch = FULL_EPOCH


def _topics(named: Mapping[TopicPartition, FetchPosition], max_bytes: int) -> list[FetchRequest.FetchTopic]:
    topics: dict[tuple[str, bytes], FetchRequest.FetchTopic] = {}
    for partition, place in named.items():
        key = (partition.topic, place.topic_id)
        topic = topics.get(key)
        if topic is None:
            topic = topics[key] = FetchRequest.FetchTopic(topic=partition.topic, topic_id=place.topic_id)
        topic.partitions.append(
            FetchRequest.FetchPartition(
                partition=partition.partition,
                current_leader_epoch=place.leader_epoch,
                fetch_offset=place.offset,
                partition_max_bytes=max_bytes,
            )
        )
    return list(topics.values())


def _forgotten_topics(forgotten: Iterable[tuple[TopicPartition, bytes]]) -> list[FetchRequest.ForgottenTopic]:
    topics: dict[tuple[str, bytes], FetchRequest.ForgottenTopic] = {}
    for partition, topic_id in forgotten:
        key = (partition.topic, topic_id)
        topic = topics.get(key)
        if topic is None:
            topic = topics[key] = FetchRequest.ForgottenTopic(topic=partition.topic, topic_id=topic_id)
        topic.partitions.append(partition.partition)
    return list(topics.values())
