# SPDX-License-Identifier: Apache-2.0
"""Fetches records ahead of `poll`.

Theory of operation. `_run` plans a request for each leader without a request in flight. The request has all fetchable
partitions of that leader with fewer than two buffered responses. `_run` plans again after each change: `poll` emptied a
buffer, a response arrived, or a partition got a position.

Each partition has a queue of responses, and a fetch begins after the last one. `poll` takes records from the queues in
turn and moves the positions. Only `poll` moves them forward, so records that are fetched and not yet returned are never
committed.

A response counts only if the partition still has the `generation` of the request. So records from before a seek, a
revocation or a reset are dropped.

Errors: a moved leader is looked up again and fetched from after a backoff. A lost fetch session is opened again. A
position that is out of range goes back to `Positions`. `poll` raises all other errors.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final, NamedTuple

from kcoord.client.cluster import Cluster, Purpose
from kcoord.client.config import ConsumerConfig
from kcoord.client.consumer.fetch_session import (
    FIRST_VERSION_WITH_TOPIC_IDS,
    SESSION_ERRORS,
    FetchPosition,
    FetchSessionHandler,
)
from kcoord.client.consumer.fetched import AbortedProducer, FetchedRecords
from kcoord.client.consumer.metadata_updater import MetadataUpdater
from kcoord.client.consumer.positions import Positions
from kcoord.client.consumer.subscription import PartitionState, SubscriptionState
from kcoord.client.errors import is_retriable
from kcoord.client.results import error_of
from kcoord.client.signal import Signal
from kcoord.client.tasks import spawn, stop
from kcoord.client.types import ConsumerRecord, TopicPartition
from kcoord_protocol.errors import CorruptBatchError, Errors, KafkaError
from kcoord_protocol.messages import FetchRequest, FetchResponse
from kcoord_protocol.uuid import ZERO_UUID

_log = logging.getLogger(__name__)

_CHUNKS_AHEAD: Final = 2
_READ_COMMITTED: Final = "read_committed"
# The leader has moved, or the broker does not have the current metadata yet.
_OUTDATED: Final = frozenset(
    {
        Errors.NOT_LEADER_OR_FOLLOWER,
        Errors.FENCED_LEADER_EPOCH,
        Errors.UNKNOWN_LEADER_EPOCH,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.UNKNOWN_TOPIC_ID,
        Errors.INCONSISTENT_TOPIC_ID,
        Errors.REPLICA_NOT_AVAILABLE,
        Errors.LEADER_NOT_AVAILABLE,
        Errors.KAFKA_STORAGE_ERROR,
        Errors.OFFSET_NOT_AVAILABLE,
    }
)


class _PartitionFetch(NamedTuple):
    """A partition in a request, with its state at that time."""

    state: PartitionState
    generation: object
    offset: int
    leader_epoch: int


class Fetcher:
    """The buffers of fetched records, one per partition, and the tasks that fill them."""

    def __init__(
        self,
        cluster: Cluster,
        config: ConsumerConfig,
        subscription: SubscriptionState,
        positions: Positions,
        updater: MetadataUpdater,
        changed: Signal,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._subscription = subscription
        self._positions = positions
        self._updater = updater
        self._changed = changed
        self._buffers: dict[TopicPartition, deque[FetchedRecords]] = {}
        self._order: deque[TopicPartition] = deque()
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._failures: dict[int, int] = {}
        self._sessions: dict[int, FetchSessionHandler] = {}
        self._failure: KafkaError | CorruptBatchError | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = spawn(self._run(), "kcoord consumer fetches")

    async def stop(self) -> None:
        await stop([self._task, *self._busy.values()])

    # Called by poll.

    def take_failure(self) -> KafkaError | CorruptBatchError | None:
        """Returns the error that `poll` has to raise, once."""
        failure, self._failure = self._failure, None
        return failure

    def _fail(self, error: KafkaError | CorruptBatchError) -> None:
        self._failure = error
        self._changed.notify()

    def take(self, count: int) -> list[ConsumerRecord]:
        """Returns up to `count` records and moves the positions after them. Partitions take turns.

        A corrupt batch is a failure for the next `take_failure`. The partition is then fetched again from there on.
        """
        records: list[ConsumerRecord] = []
        for _ in range(len(self._order)):
            partition = self._order[0]
            records += self._take_from(partition, count - len(records))
            if partition not in self._buffers:
                self._order.popleft()
            elif len(records) < count:
                self._order.rotate(-1)
            else:
                break
        return records

    def _take_from(self, partition: TopicPartition, count: int) -> list[ConsumerRecord]:
        state = self._subscription.get(partition)
        buffer = self._buffers[partition]
        taken: list[ConsumerRecord] = []
        while buffer and len(taken) < count:
            fetched = buffer[0]
            if state is None or fetched.generation != state.generation:
                buffer.popleft()
                continue
            if not state.is_fetchable:
                return taken
            try:
                taken += fetched.take(count - len(taken))
            except CorruptBatchError as error:
                # The next `poll` raises the error. The positions are after the records taken so far, of this partition
                # and of others, so an exception here would lose them.
                self._fail(error)
                state.begin_generation()
                break
            state.position = fetched.next_offset
            if fetched.leader_epoch >= 0:
                state.leader_epoch = fetched.leader_epoch
            if fetched.is_drained:
                buffer.popleft()
                self._changed.notify()
        if not buffer:
            del self._buffers[partition]
        return taken

    # Fetching.

    async def _run(self) -> None:
        while True:
            ticket = self._changed.ticket()
            for leader, fetches in self._plan().items():
                self._busy[leader] = spawn(self._fetch(leader, fetches), f"kcoord fetch from {leader}")
            await ticket.wait()

    def _plan(self) -> dict[int, dict[TopicPartition, _PartitionFetch]]:
        """Returns the partitions to fetch, for each leader without a request in flight."""
        plan: dict[int, dict[TopicPartition, _PartitionFetch]] = {}
        metadata = self._cluster.metadata
        for partition, state in self._subscription.items():
            if not state.is_fetchable or not self._has_room(partition, state):
                continue
            leader = metadata.leader(partition)
            if not self._subscription.uses_group:
                # The group assigns topic ids. The application assigns names, whose topics may be created again.
                state.topic_id = metadata.topic_id(partition.topic)
            if leader is None:
                error = metadata.topic_error(partition.topic)
                if error and not error.retriable:
                    self._failure = KafkaError(error, partition.topic)
                self._updater.request(names=[partition.topic])
            elif leader not in self._busy:
                fetch = _PartitionFetch(
                    state, state.generation, self._fetch_offset(partition, state), metadata.leader_epoch(partition)
                )
                plan.setdefault(leader, {})[partition] = fetch
        return plan

    def _current(self, partition: TopicPartition, state: PartitionState) -> list[FetchedRecords]:
        return [fetched for fetched in self._buffers.get(partition, ()) if fetched.generation == state.generation]

    def _has_room(self, partition: TopicPartition, state: PartitionState) -> bool:
        return len(self._current(partition, state)) < _CHUNKS_AHEAD

    def _fetch_offset(self, partition: TopicPartition, state: PartitionState) -> int:
        """Returns the offset after the buffered records."""
        offset = state.position
        for fetched in self._current(partition, state):
            offset = fetched.end_offset
        return offset

    async def _fetch(self, leader: int, fetches: dict[TopicPartition, _PartitionFetch]) -> None:
        try:
            await self._try_fetch(leader, fetches)
            if self._failures[leader]:
                await self._cluster.sleep_backoff(self._failures[leader])
        finally:
            del self._busy[leader]
            self._changed.notify()

    async def _try_fetch(self, leader: int, fetches: dict[TopicPartition, _PartitionFetch]) -> None:
        session = self._sessions.setdefault(leader, FetchSessionHandler())
        try:
            was_incremental = session.is_incremental
            response = await self._request(leader, session, fetches)
            error_code = error_of(response.error_code)
            if was_incremental and error_code in SESSION_ERRORS:
                _log.debug("fetch session %d of broker %d: %s", session.id, leader, error_code.name)
                session.failed(error_code)
                self._failures[leader] = 0
                return
            if error_code:
                raise KafkaError(error_code, "Fetch")
            session.answered(response.session_id)
            is_outdated = self._take_response(response, fetches)
            self._failures[leader] = self._failures.get(leader, 0) + 1 if is_outdated else 0
        except KafkaError as error:
            session.failed(error.error)
            _log.debug("fetch from broker %d: %s", leader, error)
            self._failures[leader] = self._failures.get(leader, 0) + 1
            if is_retriable(error):
                self._updater.request(names={partition.topic for partition in fetches})
            else:
                self._fail(error)

    async def _request(
        self, leader: int, session: FetchSessionHandler, fetches: dict[TopicPartition, _PartitionFetch]
    ) -> FetchResponse:
        connection = await self._cluster.connection(leader, Purpose.FETCHES)
        knows_ids = all(fetch.state.topic_id != ZERO_UUID for fetch in fetches.values())
        version = connection.versions.choose(FetchRequest, 4, None if knows_ids else FIRST_VERSION_WITH_TOPIC_IDS - 1)
        config = self._config
        positions = {
            partition: FetchPosition(fetch.state.topic_id, fetch.offset, fetch.leader_epoch)
            for partition, fetch in fetches.items()
        }
        request = session.ask(
            FetchRequest(
                max_wait_ms=config.fetch_max_wait_ms,
                min_bytes=config.fetch_min_bytes,
                max_bytes=config.fetch_max_bytes,
                isolation_level=int(config.isolation_level == _READ_COMMITTED),
            ),
            positions,
            version,
            config.max_partition_fetch_bytes,
        )
        timeout_ms = config.request_timeout_ms + config.fetch_max_wait_ms
        return await connection.call_version(request, FetchResponse, version, timeout_ms=timeout_ms)

    def _take_response(self, response: FetchResponse, fetches: dict[TopicPartition, _PartitionFetch]) -> bool:
        """Buffers the records of a response. Returns whether a partition has to be fetched again after a backoff."""
        names = {fetch.state.topic_id: partition.topic for partition, fetch in fetches.items()}
        is_outdated = False
        for topic in response.responses:
            name = topic.topic or names.get(topic.topic_id, "")
            for data in topic.partitions:
                partition = TopicPartition(name, data.partition_index)
                fetch = fetches.get(partition)
                if fetch is None or self._subscription.get(partition) is not fetch.state:
                    continue
                if fetch.generation == fetch.state.generation:
                    is_outdated |= self._take_partition(partition, fetch, data)
        return is_outdated

    def _take_partition(
        self, partition: TopicPartition, fetch: _PartitionFetch, data: FetchResponse.PartitionData
    ) -> bool:
        error = error_of(data.error_code)
        if error is Errors.NONE:
            if data.records:
                self._buffer(partition, fetch, data)
            return False
        if error is Errors.OFFSET_OUT_OF_RANGE:
            return not self._out_of_range(partition, fetch)
        if error in _OUTDATED:
            self._updater.request(names=[partition.topic])
            return True
        self._fail(KafkaError(error, f"Fetch of {partition} at {fetch.offset}"))
        return True

    def _buffer(self, partition: TopicPartition, fetch: _PartitionFetch, data: FetchResponse.PartitionData) -> None:
        aborted = None
        if self._config.isolation_level == _READ_COMMITTED:
            aborted = [
                AbortedProducer(transaction.first_offset, transaction.producer_id)
                for transaction in data.aborted_transactions or ()
            ]
        fetched = FetchedRecords(
            partition,
            fetch.offset,
            data.records or b"",
            generation=fetch.generation,
            check_crcs=self._config.check_crcs,
            aborted=aborted,
        )
        if partition not in self._buffers:
            self._buffers[partition] = deque()
            self._order.append(partition)
        self._buffers[partition].append(fetched)

    def _out_of_range(self, partition: TopicPartition, fetch: _PartitionFetch) -> bool:
        """Resets the partition if its position is out of range. Returns whether it is.

        If only the fetch offset is out of range, `poll` can still return the buffered records before it.
        """
        if fetch.offset != fetch.state.position:
            return False
        _log.info("%s: position %d is out of range", partition, fetch.offset)
        fetch.state.out_of_range()
        self._positions.wake()
        return True
