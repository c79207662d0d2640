# SPDX-License-Identifier: Apache-2.0
"""Fetch sessions (KIP-227): a client names its partitions once; then requests and responses hold only changes.

How a request uses sessions depends on its session epoch:

* -1 (`FINAL_EPOCH`): ends the session of the request, if any. The request itself has no session.
* 0 (`INITIAL_EPOCH`): ends the old session and asks for a new one. The response carries the new session id, or 0 if
  the cache is full. The session then has epoch 1.
* Any other: the epoch must be the session's own. Each request raises it by one, so a repeated or reordered request
  fails with INVALID_FETCH_SESSION_EPOCH. This also fails a parked request whose session has moved on.

A session whose partitions are all forgotten ends, and so does one that grows beyond MOST_PARTITIONS. Sessions are soft
state: they are lost in a crash or when the cache evicts them, and the client then begins again with a full fetch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

from kcoord.topics.leader_epochs import UNDEFINED_EPOCH
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FetchResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import FetchRequest

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
TOPIC_IDS_SINCE_VERSION: Final = 13
EVICTION_AGE_MS: Final = 120_000
"""A session unused for longer is evicted for any new session. One created longer ago is evicted for a larger one."""

MOST_PARTITIONS: Final = 1_000_000
"""The most partitions of all sessions together. Each takes 300 bytes, and clients may name any that do not exist."""

_MAX_EPOCH = 2**31 - 1

PartitionKey: TypeAlias = "tuple[str | bytes, int]"
"""A partition as its client names it: topic name or (from version 13) topic id, and index."""


def next_epoch(epoch: int) -> int:
    """Returns the epoch of the following request. Epochs grow from 1 and skip 0 and negative values."""
    if epoch < 0:
        return FINAL_EPOCH
    return 1 if epoch == _MAX_EPOCH else epoch + 1


@dataclass(slots=True)
class FetchPartition:
    """A client's request for one partition and, in a session, the offsets that the last response carried."""

    topic: str
    topic_id: bytes
    partition: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int = UNDEFINED_EPOCH
    last_fetched_epoch: int = UNDEFINED_EPOCH
    high_watermark: int = -1
    log_start_offset: int = -1

    def update(self, other: FetchPartition) -> None:
        self.fetch_offset = other.fetch_offset
        self.max_bytes = other.max_bytes
        self.current_leader_epoch = other.current_leader_epoch
        self.last_fetched_epoch = other.last_fetched_epoch

    def note_answer(self, data: FetchResponse.PartitionData) -> bool:
        """Returns whether an incremental response must hold this partition, and remembers the offsets in `data`."""
        changed = (
            bool(data.records)
            or data.error_code != 0
            or data.diverging_epoch.epoch >= 0
            or data.preferred_read_replica >= 0
        )
        if data.high_watermark != self.high_watermark or data.log_start_offset != self.log_start_offset:
            changed = True
        # After an error the partition is sent again, even if nothing else changed.
        self.high_watermark = -1 if data.error_code != 0 else data.high_watermark
        self.log_start_offset = data.log_start_offset
        return changed


@dataclass(slots=True)
class FetchSession:
    """One client's partitions in the order in which they are served."""

    session_id: int
    epoch: int
    uses_topic_ids: bool
    partitions: dict[PartitionKey, FetchPartition]
    created_ms: int
    last_used_ms: int


class FetchMode(Enum):
    """How a request uses sessions."""

    SESSIONLESS = "sessionless"
    FULL = "full"
    INCREMENTAL = "incremental"


@dataclass(slots=True)
class FetchContext:
    """One request: its partitions, and the session that it belongs to."""

    mode: FetchMode
    partitions: list[FetchPartition]
    uses_topic_ids: bool
    session: FetchSession | None = None
    expected_epoch: int = FINAL_EPOCH


def requested_partitions(request: FetchRequest, *, uses_topic_ids: bool) -> dict[PartitionKey, FetchPartition]:
    """Returns the partitions of a request by the keys that the client uses.

    A negative epoch counts as absent, as in Kafka.
    """
    partitions: dict[PartitionKey, FetchPartition] = {}
    for topic in request.topics:
        name: str | bytes = topic.topic_id if uses_topic_ids else topic.topic
        for partition in topic.partitions:
            partitions[name, partition.partition] = FetchPartition(
                topic.topic,
                topic.topic_id,
                partition.partition,
                partition.fetch_offset,
                partition.partition_max_bytes,
                max(partition.current_leader_epoch, UNDEFINED_EPOCH),
                max(partition.last_fetched_epoch, UNDEFINED_EPOCH),
            )
    return partitions


class FetchSessions:
    """The cache of sessions, at most `slots` of them."""

    __slots__ = ("_sessions", "_slots")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        # Least recently used first: a used session moves to the end.
        self._sessions: dict[int, FetchSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, request: FetchRequest, api_version: int, now_ms: int) -> FetchContext:
        """Returns what to fetch for a request.

        Raises KafkaError if the session does not exist, has another epoch, or names topics by id and the request by
        name (or the other way round).
        """
        uses_topic_ids = api_version >= TOPIC_IDS_SINCE_VERSION
        epoch = request.session_epoch
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._sessions.pop(request.session_id, None)
            mode = FetchMode.FULL if epoch == INITIAL_EPOCH else FetchMode.SESSIONLESS
            return FetchContext(
                mode, list(requested_partitions(request, uses_topic_ids=uses_topic_ids).values()), uses_topic_ids
            )
        session = self._checked(request, uses_topic_ids)
        self._update(session, request)
        if not session.partitions:
            del self._sessions[session.session_id]
            return FetchContext(FetchMode.SESSIONLESS, [], uses_topic_ids)
        session.epoch = next_epoch(session.epoch)
        self._touch(session, now_ms)
        return FetchContext(
            FetchMode.INCREMENTAL, list(session.partitions.values()), uses_topic_ids, session, session.epoch
        )

    def _checked(self, request: FetchRequest, uses_topic_ids: bool) -> FetchSession:
        session = self._sessions.get(request.session_id)
        if session is None:
            raise KafkaError(Errors.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != request.session_epoch:
            raise KafkaError(Errors.INVALID_FETCH_SESSION_EPOCH)
        if session.uses_topic_ids != uses_topic_ids:
            raise KafkaError(Errors.FETCH_SESSION_TOPIC_ID_ERROR)
        return session

    def _has_place(self, partitions: int) -> bool:
        return partitions + sum(len(session.partitions) for session in self._sessions.values()) <= MOST_PARTITIONS

    def _update(self, session: FetchSession, request: FetchRequest) -> None:
        size = len(session.partitions)
        for key, partition in requested_partitions(request, uses_topic_ids=session.uses_topic_ids).items():
            old = session.partitions.get(key)
            if old is None:
                session.partitions[key] = partition
            else:
                old.update(partition)
        for topic in request.forgotten_topics_data:
            name: str | bytes = topic.topic_id if session.uses_topic_ids else topic.topic
            for index in topic.partitions:
                session.partitions.pop((name, index), None)
        if len(session.partitions) > size and not self._has_place(0):
            del self._sessions[session.session_id]
            raise KafkaError(Errors.FETCH_SESSION_ID_NOT_FOUND)

    def _touch(self, session: FetchSession, now_ms: int) -> None:
        session.last_used_ms = now_ms
        del self._sessions[session.session_id]
        self._sessions[session.session_id] = session

    def respond(
        self,
        context: FetchContext,
        answers: list[tuple[FetchPartition, FetchResponse.PartitionData]],
        *,
        candidate_session_id: int,
        now_ms: int,
    ) -> FetchResponse:
        """Returns the response for the data that was read; opens the session that a full fetch asked for."""
        match context.mode:
            case FetchMode.SESSIONLESS:
                return build_response(NO_SESSION, answers, context.uses_topic_ids)
            case FetchMode.FULL:
                session_id = self._create(context, answers, candidate_session_id, now_ms)
                return build_response(session_id, answers, context.uses_topic_ids)
            case FetchMode.INCREMENTAL:
                return self._respond_incrementally(context, answers)

    def _respond_incrementally(
        self, context: FetchContext, answers: list[tuple[FetchPartition, FetchResponse.PartitionData]]
    ) -> FetchResponse:
        session = context.session
        assert session is not None
        if session.epoch != context.expected_epoch:
            return FetchResponse(error_code=Errors.INVALID_FETCH_SESSION_EPOCH, session_id=session.session_id)
        changed = [(partition, data) for partition, data in answers if partition.note_answer(data)]
        for partition, data in changed:
            if data.records:
                self._move_to_end(session, partition)
        return build_response(session.session_id, changed, context.uses_topic_ids)

    def withhold(self, context: FetchContext, response: FetchResponse, throttle_ms: int) -> FetchResponse:
        """Returns an empty response in place of `response`. The next response has all that this one would have."""
        if context.session is None:
            self._sessions.pop(response.session_id, None)
            return FetchResponse(throttle_time_ms=throttle_ms)
        withheld = {(topic.topic, data.partition_index) for topic in response.responses for data in topic.partitions}
        for partition in context.partitions:
            if (partition.topic, partition.partition) in withheld:
                # An unknown offset differs from that of the next response, so the partition is part of it.
                partition.high_watermark = -1
        return FetchResponse(throttle_time_ms=throttle_ms, session_id=context.session.session_id)

    def _move_to_end(self, session: FetchSession, partition: FetchPartition) -> None:
        """Serves a partition that returned data last next time, so that a busy partition cannot starve the others."""
        key: PartitionKey = (partition.topic_id if session.uses_topic_ids else partition.topic, partition.partition)
        if session.partitions.pop(key, None) is not None:
            session.partitions[key] = partition

    def _create(
        self,
        context: FetchContext,
        answers: list[tuple[FetchPartition, FetchResponse.PartitionData]],
        candidate_session_id: int,
        now_ms: int,
    ) -> int:
        if candidate_session_id in self._sessions or not self._make_room(len(answers), now_ms):
            return NO_SESSION
        partitions: dict[PartitionKey, FetchPartition] = {}
        for partition, data in answers:
            partition.note_answer(data)
            partitions[partition.topic_id if context.uses_topic_ids else partition.topic, partition.partition] = (
                partition
            )
        epoch = next_epoch(INITIAL_EPOCH)
        self._sessions[candidate_session_id] = FetchSession(
            candidate_session_id, epoch, context.uses_topic_ids, partitions, now_ms, now_ms
        )
        return candidate_session_id

    def _make_room(self, size: int, now_ms: int) -> bool:
        """Returns whether a new session of `size` partitions has a place in the cache.

        A full cache evicts the session that was unused longest, if that is longer than EVICTION_AGE_MS.
        Otherwise, if it lacks a slot, it evicts the smallest session that was created before EVICTION_AGE_MS, if the
        new one is larger.
        """
        is_too_large = not self._has_place(size)
        if len(self._sessions) < self._slots and not is_too_large:
            return True
        if not self._sessions:
            return False
        stalest = next(iter(self._sessions.values()))
        if now_ms - stalest.last_used_ms > EVICTION_AGE_MS:
            del self._sessions[stalest.session_id]
            return self._has_place(size)
        if is_too_large:
            return False
        old = [session for session in self._sessions.values() if now_ms - session.created_ms > EVICTION_AGE_MS]
        smallest = min(old, key=lambda session: len(session.partitions), default=None)
        if smallest is None or len(smallest.partitions) >= size:
            return False
        del self._sessions[smallest.session_id]
        return True


def build_response(
    session_id: int, answers: list[tuple[FetchPartition, FetchResponse.PartitionData]], uses_topic_ids: bool
) -> FetchResponse:
    """Returns the response. Neighbouring partitions of one topic share an entry; the order stays."""
    topics: list[FetchResponse.FetchableTopicResponse] = []
    last: PartitionKey | None = None
    for partition, data in answers:
        name: str | bytes = partition.topic_id if uses_topic_ids else partition.topic
        if last is None or last[0] != name:
            topics.append(FetchResponse.FetchableTopicResponse(topic=partition.topic, topic_id=partition.topic_id))
            last = (name, 0)
        topics[-1].partitions.append(data)
    return FetchResponse(session_id=session_id, responses=topics)
