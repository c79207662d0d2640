# SPDX-License-Identifier: Apache-2.0
"""Sends the requests of shard logs to the leaders of their partitions in the upstream.

Theory of operation. Each method sends a request once. Whether a failed one is repeated is the decision of the log
(`kcoord.runtime.upstream_log`).

A Kafka broker handles one request of a connection at a time, and answers a Produce with acks=all when the replicas have
the batches. So there is at most one Produce in flight to each broker. Batches that arrive meanwhile wait, and share the
next request (group commit). A request has at most one batch for each partition, because a log has one batch in flight.

All transactional batches of a request have one transactional id, so they rarely share requests. They have a queue and a
connection of their own to each broker, and do not delay the others.

An error may mean that the leader of a partition has changed. Then the leaders of the topic are forgotten, and the next
batch or fetch looks them up, once for all that wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kcoord.client.cluster import Cluster, CoordinatorType, Purpose
from kcoord.client.connection import Connection
from kcoord.client.leaders import list_offsets
from kcoord.client.results import error_of
from kcoord.client.tasks import Tasks, spawn
from kcoord.client.types import TopicPartition
from kcoord.upstream.rights import naming_right
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    FetchRequest,
    FetchResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    ProduceRequest,
    ProduceResponse,
)
from kcoord_protocol.uuid import ZERO_UUID

MOST_REQUEST_BYTES: Final = 16 << 20
"""A Produce request with several batches is at most this large. Kafka accepts 100 MiB (socket.request.max.bytes)."""
FETCH_BYTES: Final = 256 << 10
MOST_FETCHED_BYTES: Final = 4 << 20
FETCH_WAIT_MS: Final = 100
_HIGHEST_PRODUCE: Final = 11
"""v12 belongs to the second transaction protocol (KIP-890), and v13 identifies topics by id."""
_HIGHEST_FETCH: Final = 13
_FETCH_WITH_NAMES: Final = 12
"""From v13 on, topics have ids in a request. So nothing is read from another topic with the same name."""
_LOWEST_PRODUCE: Final = 3
_LOWEST_FETCH: Final = 4
_EARLIEST: Final = -2
_ALL_REPLICAS: Final = -1
_TRANSACTION_TIMEOUT_MS: Final = 1_000
"""Required by InitProducerId. The logs make no transactions, and the upstream may allow short ones only."""
_ANSWER_MARGIN_MS: Final = 500
_GATHERING_TURNS: Final = 4
"""The turns of the event loop after an answer, before the next request. Meanwhile the logs that the answer was for make
their next batches, and these join the request.
"""
_SAME_LEADER: Final = frozenset(
    {Errors.REQUEST_TIMED_OUT, Errors.NOT_ENOUGH_REPLICAS, Errors.NOT_ENOUGH_REPLICAS_AFTER_APPEND}
)
"""Retriable errors of a leader that stays the leader."""


_Queue: TypeAlias = tuple[int, Purpose]
"""A leader, and the connection to it."""


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch to produce. `may_send` is called right before it is sent, and `done` once, unless it may not be sent.

    `done` gets the offset of the batch, or the error.
    """

    partition: int
    data: bytes = field(repr=False)
    may_send: Callable[[], bool]
    done: Callable[[int | KafkaError], None]
    transactional_id: str | None = None


class Fetched(NamedTuple):
    """Fetched batches of a partition. The last one may be cut off, and the first ones may be below the offset."""

    data: bytes
    high_watermark: int


class PartitionRequests:
    """Requests to the leaders of one topic's partitions; the module describes what they share.

    `attempt_timeout_ms` is the time in which a broker has to answer one request, and `fetch_wait_ms` the time that it
    waits for a record.
    """

    def __init__(
        self, cluster: Cluster, topic: str, *, attempt_timeout_ms: int, fetch_wait_ms: int = FETCH_WAIT_MS
    ) -> None:
        self._cluster = cluster
        self._topic = topic
        self._attempt_timeout_ms = attempt_timeout_ms
        self._fetch_wait_ms = fetch_wait_ms
        self._new: list[PendingBatch] = []
        self._queues: dict[_Queue, list[PendingBatch]] = {}
        """The batches that wait. A queue exists while a request of it is in flight."""
        self._tasks = Tasks()
        self._lookup: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """Cancels all requests. Their outcomes are not reported."""
        await self._tasks.stop()

    def start(self, work: Coroutine[object, object, None], name: str) -> None:
        """Starts a task that `stop` cancels."""
        self._tasks.add(spawn(work, f"kcoord upstream log, {name}"))

    async def init_producer_id(self, transactional_id: str, may_send: Callable[[], bool]) -> tuple[int, int]:
        """Returns the producer id and the next epoch of a transactional id. Raises KafkaError.

        `may_send` is called right before the request is sent. If it returns False, REQUEST_TIMED_OUT is raised.
        """
        try:
            connection = await self._cluster.coordinator(CoordinatorType.TRANSACTION, transactional_id)
        except KafkaError as error:
            raise naming_right(error, "Write", f"transactional id {transactional_id}") from None
        await connection.ready()
        if not may_send():
            raise KafkaError(Errors.REQUEST_TIMED_OUT, "this instance may not claim logs now")
        request = InitProducerIdRequest(
            transactional_id=transactional_id, transaction_timeout_ms=_TRANSACTION_TIMEOUT_MS
        )
        answer = await self._cluster.call_coordinator(
            CoordinatorType.TRANSACTION,
            transactional_id,
            request,
            InitProducerIdResponse,
            lambda response: [response.error_code],
        )
        if answer.error_code:
            refusal = KafkaError(error_of(answer.error_code))
            raise naming_right(refusal, "Write", f"transactional id {transactional_id}")
        return answer.producer_id, answer.producer_epoch

    async def fetch(self, partition: int, offset: int) -> bytes:
        """Returns batches from an offset on, up to the high watermark, possibly none. Raises KafkaError."""
        leader = await self._leader(partition)
        answer = (await self.fetch_all(leader, {partition: offset}, self._fetch_wait_ms, Purpose.FETCHES))[partition]
        if isinstance(answer, KafkaError):
            raise answer
        return answer.data

    async def fetch_all(
        self, leader: int, offsets: Mapping[int, int], wait_ms: int, purpose: Purpose
    ) -> dict[int, Fetched | KafkaError]:
        """Returns batches, or an error, for each of the partitions, after at most `wait_ms` if there are none.

        Repeats the request only if a quota of the upstream throttles it: such a response has no partitions. Raises
        KafkaError if the request fails as a whole.
        """
        topic_id = self.topic_id
        request = FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=MOST_FETCHED_BYTES,
            topics=[
                FetchRequest.FetchTopic(
                    topic=self._topic,
                    topic_id=topic_id,
                    partitions=[
                        FetchRequest.FetchPartition(
                            partition=partition, fetch_offset=offset, partition_max_bytes=FETCH_BYTES
                        )
                        for partition, offset in offsets.items()
                    ],
                )
            ],
        )
        try:
            connection = await self._cluster.connection(leader, purpose)
            while True:
                answer = await connection.call(
                    request,
                    FetchResponse,
                    lowest=_LOWEST_FETCH,
                    highest=_FETCH_WITH_NAMES if topic_id == ZERO_UUID else _HIGHEST_FETCH,
                    timeout_ms=wait_ms + self._attempt_timeout_ms,
                )
                if answer.error_code:
                    raise KafkaError(error_of(answer.error_code))
                if answer.responses or not answer.throttle_time_ms:
                    break
                # The request was over a quota of the upstream. Until then the broker reads nothing more.
                await asyncio.sleep(answer.throttle_time_ms / 1000)
        except KafkaError as error:
            self.note(error)
            raise
        results: dict[int, Fetched | KafkaError] = {}
        for topic in answer.responses:
            for data in topic.partitions:
                if data.error_code:
                    refusal = KafkaError(error_of(data.error_code))
                    refusal = naming_right(refusal, "Read", f"topic {self._topic}")
                    self.note(refusal)
                    results[data.partition_index] = refusal
                else:
                    results[data.partition_index] = Fetched(bytes(data.records or b""), data.high_watermark)
        lacking = KafkaError(Errors.UNKNOWN_SERVER_ERROR, "the response does not have the partition")
        return {partition: results.get(partition, lacking) for partition in offsets}

    async def first_offset(self, partition: int) -> int:
        """Returns the first offset of a partition. Raises KafkaError."""
        asked = TopicPartition(self._topic, partition)
        deadline = self._cluster.deadline(self._attempt_timeout_ms)
        outcome = (await list_offsets(self._cluster, deadline, {asked: _EARLIEST})([asked]))[asked]
        if isinstance(outcome, KafkaError):
            raise outcome
        return outcome.offset

    def produce(self, batch: PendingBatch) -> None:
        """Sends a batch with acks=all, together with all that are added in this turn of the event loop."""
        self._new.append(batch)
        if len(self._new) == 1:
            asyncio.get_running_loop().call_soon(self._distribute)

    # Leaders.

    @property
    def topic_id(self) -> bytes:
        """The id of the topic, as far as it is known. The zero id if the upstream has no topic ids."""
        return self._cluster.metadata.topic_id(self._topic)

    def leader_now(self, partition: int) -> int | None:
        """Returns the leader of a partition, None if it is not known."""
        return self._cluster.metadata.leader(TopicPartition(self._topic, partition))

    async def _leader(self, partition: int) -> int:
        if self.leader_now(partition) is None:
            await self.look_up_leaders()
        leader = self.leader_now(partition)
        if leader is None:
            raise self._no_leader(partition)
        return leader

    def _no_leader(self, partition: int) -> KafkaError:
        error = self._cluster.metadata.topic_error(self._topic) or Errors.LEADER_NOT_AVAILABLE
        return KafkaError(error, f"{self._topic}-{partition} has no leader")

    async def look_up_leaders(self) -> None:
        """Fetches the topic's metadata. All callers of the same time share one request. Raises KafkaError."""
        if self._lookup is None:
            self._lookup = asyncio.ensure_future(self._refresh())
        await asyncio.shield(self._lookup)

    async def _refresh(self) -> None:
        try:
            await self._cluster.refresh_metadata([self._topic])
        finally:
            self._lookup = None

    def note(self, error: KafkaError) -> None:
        """Forgets the leaders if the error may mean that one of them has changed."""
        if error.error.retriable and error.error not in _SAME_LEADER:
            self._cluster.metadata.topics.pop(self._topic, None)

    # Produce.

    def _distribute(self) -> None:
        """Puts new batches into the queues of their leaders."""
        batches, self._new = self._new, []
        homeless: list[PendingBatch] = []
        for batch in batches:
            leader = self.leader_now(batch.partition)
            if leader is None:
                homeless.append(batch)
                continue
            queue = leader, Purpose.APPENDS if batch.transactional_id is None else Purpose.TRANSACTIONS
            if queue in self._queues:
                self._queues[queue].append(batch)
            else:
                self._queues[queue] = [batch]
                self.start(self._serve(*queue), f"broker {leader}, {queue[1].value}")
        if homeless:
            self.start(self._find_home(homeless), "leaders")

    async def _find_home(self, batches: Sequence[PendingBatch]) -> None:
        try:
            await self.look_up_leaders()
        except KafkaError as error:
            _finish(batches, error)
            return
        for batch in batches:
            if self.leader_now(batch.partition) is None:
                batch.done(self._no_leader(batch.partition))
            else:
                self.produce(batch)

    async def _serve(self, leader: int, purpose: Purpose) -> None:
        """Sends the batches of one queue, a request at a time, until none wait."""
        queue = self._queues[leader, purpose]
        try:
            while queue:
                try:
                    connection = await self._cluster.connection(leader, purpose)
                    # Nothing is between the call of `may_send` and the request.
                    await connection.ready()
                except KafkaError as error:
                    self.note(error)
                    failed = queue[:]
                    queue.clear()
                    _finish(failed, error)
                    continue
                batches = self._take(queue)
                if batches:
                    await self._send(connection, batches)
                    for _ in range(_GATHERING_TURNS):
                        await asyncio.sleep(0)
        finally:
            del self._queues[leader, purpose]

    @staticmethod
    def _take(queue: list[PendingBatch]) -> list[PendingBatch]:
        """Removes and returns the batches of the next request.

        They are one for each partition, not too many bytes, and have the same transactional id, if any.
        """
        taken: dict[int, PendingBatch] = {}
        left: list[PendingBatch] = []
        size_bytes = 0
        for batch in queue:
            if not batch.may_send():
                continue
            is_other = taken and batch.transactional_id != next(iter(taken.values())).transactional_id
            is_too_large = taken and size_bytes + len(batch.data) > MOST_REQUEST_BYTES
            if batch.partition in taken or is_other or is_too_large:
                left.append(batch)
                continue
            taken[batch.partition] = batch
            size_bytes += len(batch.data)
        queue[:] = left
        return list(taken.values())

    async def _send(self, connection: Connection, batches: Sequence[PendingBatch]) -> None:
        request = ProduceRequest(
            transactional_id=batches[0].transactional_id,
            acks=_ALL_REPLICAS,
            timeout_ms=self._attempt_timeout_ms,
            topic_data=[
                ProduceRequest.TopicProduceData(
                    name=self._topic,
                    partition_data=[
                        ProduceRequest.PartitionProduceData(index=batch.partition, records=batch.data)
                        for batch in batches
                    ],
                )
            ],
        )
        try:
            answer = await connection.call(
                request,
                ProduceResponse,
                lowest=_LOWEST_PRODUCE,
                highest=_HIGHEST_PRODUCE,
                timeout_ms=self._attempt_timeout_ms + _ANSWER_MARGIN_MS,
            )
        except KafkaError as error:
            self.note(error)
            _finish(batches, error)
            return
        answers = {data.index: data for topic in answer.responses for data in topic.partition_responses}
        for batch in batches:
            data = answers.get(batch.partition)
            if data is None:
                batch.done(KafkaError(Errors.UNKNOWN_SERVER_ERROR, "the response does not have the partition"))
            elif data.error_code:
                refusal = KafkaError(error_of(data.error_code), data.error_message)
                is_about_id = refusal.error is Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
                resource = f"transactional id {batch.transactional_id}" if is_about_id else f"topic {self._topic}"
                refusal = naming_right(refusal, "Write", resource)
                self.note(refusal)
                batch.done(refusal)
            else:
                batch.done(data.base_offset)


def _finish(batches: Sequence[PendingBatch], error: KafkaError) -> None:
    for batch in batches:
        batch.done(error)
