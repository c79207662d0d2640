# SPDX-License-Identifier: Apache-2.0
"""Incremental fetch sessions (KIP-227): a leader remembers the partitions of a session. Pure.

Theory of operation. There is one session per leader. A full request (epoch 0) opens it. Each later request is
incremental: it names only new partitions, partitions with a new position, and partitions to forget. Its response omits
partitions without new records. The epoch grows by one with each response.

After any failure the client does not know what the leader remembers. The next request is then a full one, which also
closes the session that the leader may still have.
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
"""The leader has lost the session, or remembers other partitions. A full request opens a new session."""

_LARGEST_EPOCH: Final = 0x7FFF_FFFF


class FetchPosition(NamedTuple):
    """The topic id, offset and leader epoch of a partition in a Fetch request."""

    topic_id: bytes
    offset: int
    leader_epoch: int


class FetchSessionHandler:
    """The session with one leader. At most one request is in flight.

    `ask` fills in a request. After it the caller calls `answered` or `failed`.
    """

    def __init__(self) -> None:
        self._id = NO_SESSION
        self._epoch = FULL_EPOCH
        self._with_ids = False
        self._known: dict[TopicPartition, FetchPosition] = {}

    @property
    def id(self) -> int:
        """The id of the session that the leader should have, 0 for none."""
        return self._id

    @property
    def is_incremental(self) -> bool:
        """Whether the next request names only the changes."""
        return self._epoch != FULL_EPOCH

    def ask(
        self, request: FetchRequest, positions: Mapping[TopicPartition, FetchPosition], version: int, max_bytes: int
    ) -> FetchRequest:
        """Adds the session and the partitions to a request of that version. `max_bytes` is the limit per partition."""
        with_ids = version >= FIRST_VERSION_WITH_TOPIC_IDS
        if with_ids != self._with_ids or version < FIRST_VERSION_WITH_SESSIONS:
            self.failed()
        self._with_ids = with_ids
        forgotten: list[tuple[TopicPartition, bytes]] = []
        named = positions
        if self.is_incremental:
            forgotten = [
                (partition, position.topic_id)
                for partition, position in self._known.items()
                if partition not in positions or positions[partition].topic_id != position.topic_id
            ]
            named = {
                partition: position
                for partition, position in positions.items()
                if self._known.get(partition) != position
            }
        if version >= FIRST_VERSION_WITH_SESSIONS:
            request.session_id, request.session_epoch = self._id, self._epoch
            request.forgotten_topics_data = _forgotten_topics(forgotten)
        request.topics = _topics(named, max_bytes)
        self._known = dict(positions)
        return request

    def answered(self, session_id: int) -> None:
        """Records a response without a session error. Session id 0 means that the leader keeps no session."""
        if session_id == NO_SESSION:
            self._id, self._epoch = NO_SESSION, FULL_EPOCH
        else:
            self._id, self._epoch = session_id, self._epoch % _LARGEST_EPOCH + 1

    def failed(self, error: Errors | None = None) -> None:
        """Makes the next request a full one, because the leader's state is unknown."""
        if error is Errors.FETCH_SESSION_ID_NOT_FOUND:
            self._id = NO_SESSION
        self._epoch = FULL_EPOCH


def _topics(named: Mapping[TopicPartition, FetchPosition], max_bytes: int) -> list[FetchRequest.FetchTopic]:
    topics: dict[tuple[str, bytes], FetchRequest.FetchTopic] = {}
    for partition, position in named.items():
        key = (partition.topic, position.topic_id)
        topic = topics.get(key)
        if topic is None:
            topic = topics[key] = FetchRequest.FetchTopic(topic=partition.topic, topic_id=position.topic_id)
        topic.partitions.append(
            FetchRequest.FetchPartition(
                partition=partition.partition,
                current_leader_epoch=position.leader_epoch,
                fetch_offset=position.offset,
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
