# SPDX-License-Identifier: Apache-2.0
"""A broker with records, committed offsets and a group of one member, for tests of the consumer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kcoord_protocol.record_batch import Record, encode_batch
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.client.fake_broker import Answer, FakeBroker
from tests.unit.client.virtual_loop import now_ms

TOPIC, TOPIC_ID = "t", b"T" * 16
ZERO, ONE = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)

Place = tuple[str, bytes, int]
"""A topic by name or id, and a partition."""


class FetchSessions:
    """The fetch session cache of a broker (KIP-227). `read` has the positions that the last request reads."""

    def __init__(self) -> None:
        self.sessions: dict[int, tuple[int, dict[Place, tuple[int, int]]]] = {}
        self.read: dict[Place, tuple[int, int]] = {}
        """Maps partitions to offset and leader epoch."""
        self._next_id = 1

    def fetch(self, request: FetchRequest, *, keeps: bool = True) -> tuple[Errors, int]:
        """Returns the error of the whole request and the session id of the response."""
        named = {
            (topic.topic, topic.topic_id, partition.partition): (partition.fetch_offset, partition.current_leader_epoch)
            for topic in request.topics
            for partition in topic.partitions
        }
        if request.session_epoch <= 0:
            self.sessions.pop(request.session_id, None)
            self.read = named
            if request.session_epoch < 0 or not keeps:
                return Errors.NONE, 0
            self._next_id += 1
            self.sessions[self._next_id] = (1, named)
            return Errors.NONE, self._next_id
        if request.session_id not in self.sessions:
            return Errors.FETCH_SESSION_ID_NOT_FOUND, 0
        epoch, positions = self.sessions[request.session_id]
        if epoch != request.session_epoch:
            return Errors.INVALID_FETCH_SESSION_EPOCH, 0
        for topic in request.forgotten_topics_data:
            for partition in topic.partitions:
                del positions[topic.topic, topic.topic_id, partition]
        positions.update(named)
        self.sessions[request.session_id] = (epoch + 1, positions)
        self.read = dict(positions)
        return Errors.NONE, request.session_id


@dataclass
class Log:
    """The batches of a partition from `start` on: (first offset, offset after the last, bytes, timestamp)."""

    start: int = 0
    end: int = 0
    batches: list[tuple[int, int, bytes, int]] = field(default_factory=list)
    aborted: list[tuple[int, int]] = field(default_factory=list)
    """(producer id, first offset) of aborted transactions."""

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Returns whole batches, beginning with the batch that has the offset, and at least one batch."""
        batches = b""
        for _, behind, data, _ in self.batches:
            if behind > offset:
                if batches and len(batches) + len(data) > most_bytes:
                    break
                batches += data
        return batches

    def offset_at(self, timestamp: int) -> tuple[int, int]:
        """Returns (offset, timestamp) by the rules of ListOffsets."""
        if timestamp == -1:
            return self.end, -1
        if timestamp == -2:
            return self.start, -1
        return next(
            ((max(first, self.start), time_ms) for first, _, _, time_ms in self.batches if time_ms >= timestamp),
            (-1, -1),
        )


class RecordsBroker(FakeBroker):
    """A broker whose group assigns the partitions `assigned` to its member.

    `errors` are the next errors of an API, for each partition in the request or for the whole request. The broker
    rejects a commit with an epoch that is not the member's.
    """

    def __init__(self, partitions: int = 2, /, **versions: tuple[int, int]) -> None:
        super().__init__(
            {
                ApiKey.FETCH: self._fetch,
                ApiKey.LIST_OFFSETS: self._list_offsets,
                ApiKey.OFFSET_FETCH: self._offset_fetch,
                ApiKey.OFFSET_COMMIT: self._offset_commit,
                ApiKey.CONSUMER_GROUP_HEARTBEAT: self._heartbeat,
            },
            **versions,
        )
        self.add_topic(TOPIC, TOPIC_ID, [-1] * partitions)
        for partition in self.topics[0].partitions:
            partition.leader_epoch = 3
        self.logs = {TopicPartition(TOPIC, index): Log() for index in range(partitions)}
        self.sessions = FetchSessions()
        self.errors: dict[ApiKey, list[Errors]] = {}
        self.fetch_errors: list[Errors] = []
        """The next errors of whole Fetch requests."""
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}
        self.commits: list[tuple[float, str, int, dict[TopicPartition, int]]] = []
        """(time, member id, epoch, offsets) of each commit."""
        self.assigned: list[int] | None = None
        self.heartbeat_interval_ms = 1000
        self.creation_time_ms = -1
        self.member_epoch = 0
        self._is_member = False
        self._told: list[int] | None = None
        self._appended = asyncio.Event()

    def append(
        self,
        partition: TopicPartition,
        *values: str,
        timestamp_ms: int = 1,
        producer_id: int = -1,
        data: bytes | None = None,
    ) -> None:
        """Appends one batch of these values, or the bytes `data`."""
        log = self.logs[partition]
        if data is None:
            data = encode_batch(
                [Record(value=value.encode(), timestamp_ms=timestamp_ms) for value in values],
                base_offset=log.end,
                partition_leader_epoch=3,
                producer_id=producer_id,
                producer_epoch=0 if producer_id >= 0 else -1,
                base_sequence=0 if producer_id >= 0 else -1,
                is_transactional=producer_id >= 0,
            )
        log.batches.append((log.end, log.end + len(values), data, timestamp_ms))
        log.end += len(values)
        self._appended.set()
        self._appended = asyncio.Event()

    def has_member(self) -> bool:
        return self._is_member

    def fetches(self) -> list[FetchRequest]:
        return [request for request in self.requests_of(ApiKey.FETCH) if isinstance(request, FetchRequest)]

    def heartbeats(self) -> list[ConsumerGroupHeartbeatRequest]:
        requests = self.requests_of(ApiKey.CONSUMER_GROUP_HEARTBEAT)
        return [request for request in requests if isinstance(request, ConsumerGroupHeartbeatRequest)]

    def _next_error(self, key: ApiKey) -> Errors:
        errors = self.errors.get(key)
        return errors.pop(0) if errors else Errors.NONE

    async def _fetch(self, request: Message, version: int) -> Answer:
        assert isinstance(request, FetchRequest)
        if self.fetch_errors:
            return FetchResponse(error_code=self.fetch_errors.pop(0))
        error, session_id = self.sessions.fetch(request)
        if error:
            return FetchResponse(error_code=error)
        read = dict(self.sessions.read)
        limits = {
            partition.partition: partition.partition_max_bytes
            for topic in request.topics
            for partition in topic.partitions
        }
        error = self._next_error(ApiKey.FETCH)
        appended = self._appended
        answers = self._read(read, limits, error)
        if not answers:
            try:
                async with asyncio.timeout(request.max_wait_ms / 1000):
                    await appended.wait()
            except TimeoutError:
                pass
            answers = self._read(read, limits, Errors.NONE)
        topics: dict[tuple[str, bytes], FetchResponse.FetchableTopicResponse] = {}
        for (name, topic_id, _), data in answers.items():
            topic = topics.setdefault(
                (name, topic_id), FetchResponse.FetchableTopicResponse(topic=name, topic_id=topic_id)
            )
            topic.partitions.append(data)
        return FetchResponse(session_id=session_id, responses=list(topics.values()))

    def _read(
        self, places: dict[Place, tuple[int, int]], limits: dict[int, int], error: Errors
    ) -> dict[Place, FetchResponse.PartitionData]:
        """Returns the partitions with records or an error, which a response of an incremental session has."""
        answers = {}
        for place, (offset, leader_epoch) in places.items():
            log = self.logs[TopicPartition(TOPIC, place[2])]
            data = FetchResponse.PartitionData(partition_index=place[2], high_watermark=log.end)
            assert leader_epoch == self.topics[0].partitions[place[2]].leader_epoch
            if error:
                data.error_code = error
            elif place[1] not in (ZERO_UUID, self.topics[0].topic_id):
                data.error_code = Errors.UNKNOWN_TOPIC_ID
            elif not log.start <= offset <= log.end:
                data.error_code = Errors.OFFSET_OUT_OF_RANGE
            else:
                data.records = log.read(offset, limits.get(place[2], 1 << 20))
                data.aborted_transactions = [
                    FetchResponse.AbortedTransaction(producer_id=producer_id, first_offset=first)
                    for producer_id, first in log.aborted
                ]
            if data.error_code or data.records:
                answers[place] = data
        return answers

    def _list_offsets(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ListOffsetsRequest)
        error = self._next_error(ApiKey.LIST_OFFSETS)
        topics = []
        for topic in request.topics:
            answers = []
            for partition in topic.partitions:
                offset, time_ms = self.logs[TopicPartition(topic.name, partition.partition_index)].offset_at(
                    partition.timestamp
                )
                answers.append(
                    ListOffsetsResponse.ListOffsetsPartitionResponse(
                        partition_index=partition.partition_index,
                        error_code=error,
                        offset=offset,
                        timestamp=time_ms,
                        leader_epoch=3,
                    )
                )
            topics.append(ListOffsetsResponse.ListOffsetsTopicResponse(name=topic.name, partitions=answers))
        return ListOffsetsResponse(topics=topics)

    def looked_up(self) -> list[tuple[int, int]]:
        """Returns (partition, timestamp) of all look-ups."""
        return [
            (partition.partition_index, partition.timestamp)
            for request in self.requests_of(ApiKey.LIST_OFFSETS)
            for topic in request.topics  # type: ignore[attr-defined]
            for partition in topic.partitions
        ]

    def _offset_fetch(self, request: Message, version: int) -> Answer:
        assert isinstance(request, OffsetFetchRequest)
        (group,) = request.groups
        error = self._next_error(ApiKey.OFFSET_FETCH)
        if self._is_member and group.member_id and group.member_epoch != self.member_epoch:
            error = Errors.STALE_MEMBER_EPOCH
        topics = []
        for topic in group.topics or ():
            partitions = []
            for index in topic.partition_indexes:
                committed = self.committed.get(TopicPartition(topic.name, index), OffsetAndMetadata(-1))
                partitions.append(
                    OffsetFetchResponse.OffsetFetchResponsePartitions(
                        partition_index=index,
                        committed_offset=committed.offset,
                        committed_leader_epoch=committed.leader_epoch,
                        metadata=committed.metadata,
                    )
                )
            topics.append(OffsetFetchResponse.OffsetFetchResponseTopics(name=topic.name, partitions=partitions))
        answer = OffsetFetchResponse.OffsetFetchResponseGroup(group_id=group.group_id, error_code=error)
        answer.topics = [] if error else topics
        return OffsetFetchResponse(groups=[answer])

    def _offset_commit(self, request: Message, version: int) -> Answer:
        assert isinstance(request, OffsetCommitRequest)
        error = self._next_error(ApiKey.OFFSET_COMMIT)
        if not error and self._is_member and request.generation_id_or_member_epoch != self.member_epoch:
            error = Errors.STALE_MEMBER_EPOCH if request.member_id else Errors.UNKNOWN_MEMBER_ID
        offsets = {
            TopicPartition(topic.name, partition.partition_index): OffsetAndMetadata(
                partition.committed_offset, partition.committed_metadata or "", partition.committed_leader_epoch
            )
            for topic in request.topics
            for partition in topic.partitions
        }
        if not error:
            self.committed |= offsets
            plain = {partition: committed.offset for partition, committed in offsets.items()}
            self.commits.append((now_ms(), request.member_id, request.generation_id_or_member_epoch, plain))
        result = OffsetCommitResponse.OffsetCommitResponsePartition
        return OffsetCommitResponse(
            topics=[
                OffsetCommitResponse.OffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        result(partition_index=partition.partition_index, error_code=error)
                        for partition in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _heartbeat(self, request: Message, version: int) -> Answer:
        assert isinstance(request, ConsumerGroupHeartbeatRequest)
        error = self._next_error(ApiKey.CONSUMER_GROUP_HEARTBEAT)
        if error:
            return ConsumerGroupHeartbeatResponse(error_code=error, error_message="by script")
        if request.member_epoch < 0:
            self._is_member = False
            return ConsumerGroupHeartbeatResponse(member_epoch=request.member_epoch)
        if request.member_epoch == 0:
            self._told = None
        elif not self._is_member or request.member_epoch != self.member_epoch:
            return ConsumerGroupHeartbeatResponse(error_code=Errors.FENCED_MEMBER_EPOCH)
        self._is_member = True
        assignment = None
        if self._told != self.assigned or request.member_epoch == 0:
            self._told = list(self.assigned or ())
            self.assigned = list(self._told)
            self.member_epoch += 1
            topic = ConsumerGroupHeartbeatResponse.TopicPartitions(topic_id=TOPIC_ID, partitions=self._told)
            assignment = ConsumerGroupHeartbeatResponse.Assignment(topic_partitions=[topic] if self._told else [])
        return ConsumerGroupHeartbeatResponse(
            group_creation_time_ms=self.creation_time_ms,
            member_epoch=self.member_epoch,
            heartbeat_interval_ms=self.heartbeat_interval_ms,
            assignment=assignment,
        )


def numbers(first: int, end: int) -> Iterable[str]:
    """Returns values that equal the offsets of their records, from `first` to before `end`."""
    return map(str, range(first, end))
