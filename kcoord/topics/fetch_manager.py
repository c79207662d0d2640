# SPDX-License-Identifier: Apache-2.0
"""Fetch requests from arrival to response.

Reads the partitions, and parks a request whose `min_bytes` are not there yet (long poll).

States of a request:

* *Answered*: `fetch` reads the partitions once and returns the response. It does so if the data has `min_bytes`, if a
  partition has an error or a diverging epoch, if no partition exists, or if `max_wait_ms` is 0.
* *Parked*: `fetch` returns None and keeps the request under its token, as a watcher of every partition that it reads.
  A partition whose log is still being opened has no data yet, and `on_change` touches the request when it is open.
* *Touched*: a watched partition has grown enough (`on_append`) or has changed (`on_change`). `wake` is called, and the
  next `poll` reads the partitions again. That read completes the request, or leaves it parked.
* *Completed*: `poll` returns the response, also when `max_wait_ms` has passed. `cancel` drops a request whose client is
  gone.

Everything runs in the event loop. `on_append` and `on_change` only mark requests: an append never reads for a fetch.
Data is therefore read at most once per `poll`, however many appends come between two polls.
Nothing here is stored. After a crash the clients send their requests again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, cast

from kcoord.runtime.shard_log import Append
from kcoord.storage.file_system import FileSlice
from kcoord.topics.fetch_session import FetchContext, FetchPartition, FetchSessions
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH
from kcoord.topics.log_opening import LogBeingOpenedError
from kcoord.topics.producer_state import AbortedTransaction
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FetchResponse
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord_protocol.messages import FetchRequest

_logger = logging.getLogger(__name__)

READ_UNCOMMITTED = 0
READ_COMMITTED = 1


def check_isolation_level(level: int) -> None:
    """Raises UNKNOWN_SERVER_ERROR, as Kafka does, for a level that does not exist."""
    if level not in (READ_UNCOMMITTED, READ_COMMITTED):
        raise KafkaError(Errors.UNKNOWN_SERVER_ERROR, f"Unknown isolation level {level}.")


def replica_id(request: FetchRequest, api_version: int) -> int:
    """Returns the id of the broker that sends the request, -1 if a consumer sends it."""
    return request.replica_state.replica_id if api_version >= _OLDEST_VERSION_WITH_REPLICA_STATE else request.replica_id


_OLDEST_VERSION_WITH_REPLICA_STATE = 15
_OLDEST_VERSION_WITH_LEADER_HINT = 16
MAX_POLL_BYTES = 4 << 20
"""Number of bytes of records at which a poll ends. One response may be larger."""
_SPARE_DEADLINES = 64
"""The deadlines of ended requests that may stay beside as many as there are of parked ones."""


ReadableTopics: TypeAlias = Callable[[set[str]], set[str]]
"""Returns those of the topics that a client may read."""
Throttle: TypeAlias = Callable[[FetchResponse], int]
"""Counts a response. Returns for how many milliseconds to throttle the client; the response is then withheld."""


@dataclass(slots=True)
class ReadResult:
    """The data and offsets of one partition."""

    records: bytes
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted_transactions: list[AbortedTransaction] | None = None
    diverging_epoch: tuple[int, int] | None = None
    unread_records: FileSlice | None = None
    """In place of `records`, if they are many: the connection sends them."""


class FetchSource(Protocol):
    """The partitions, as FetchManager reads them."""

    def topic_name(self, topic_id: bytes) -> str | None: ...

    def topic_id(self, topic: str) -> bytes | None: ...

    def has_partition(self, topic: str, partition: int) -> bool: ...

    def leader_of(self, topic: str, partition: int) -> tuple[int, int]: ...

    def read(
        self, request: FetchPartition, *, max_bytes: int, whole_first_batch: bool, read_committed: bool, now_ms: int
    ) -> ReadResult: ...


class FetchParameters(NamedTuple):
    """The limits of one request."""

    max_bytes: int
    min_bytes: int
    isolation_level: int
    replica_id: int
    api_version: int
    candidate_session_id: int
    hidden: Collection[str]
    """Topics that the client may not read, whether they exist or not."""
    throttle: Throttle | None


class CompletedFetch(NamedTuple):
    """The response to a parked request."""

    token: Hashable
    response: FetchResponse


@dataclass(slots=True)
class _Reading:
    """The result of one pass over the partitions of a request."""

    answers: list[tuple[FetchPartition, FetchResponse.PartitionData]] = field(default_factory=list)
    total_bytes: int = 0
    answer_now: bool = False
    watched: list[tuple[str, int]] = field(default_factory=list)


@dataclass(slots=True)
class _ParkedFetch:
    token: Hashable
    context: FetchContext
    parameters: FetchParameters
    deadline_ms: int
    watched: list[tuple[str, int]]
    available_bytes: int
    """The bytes of the last reading plus those appended since. Below min_bytes there is no need to read again."""


@dataclass(slots=True)
class _ShardFeed:
    """The appends to the logs of a coordinator's topic. `observe` is among `observers` while requests wait there."""

    observers: list[Callable[[Append], None]]
    observe: Callable[[Append], None]
    waiting: int = 0

    def join(self) -> None:
        if self.waiting == 0:
            self.observers.append(self.observe)
        self.waiting += 1

    def leave(self) -> None:
        self.waiting -= 1
        if self.waiting == 0:
            self.observers.remove(self.observe)


class FetchManager:
    """Answers and parks the fetch requests of one broker.

    `wake`, if set, is called when `poll` has something to do before the next deadline.
    """

    def __init__(self, source: FetchSource, node_id: int, session_slots: int, max_bytes: int) -> None:
        self.sessions = FetchSessions(session_slots)
        self.wake: Callable[[], None] | None = None
        self._source = source
        self._node_id = node_id
        self._max_bytes = max_bytes
        self._parked: dict[Hashable, _ParkedFetch] = {}
        self._watchers: dict[tuple[str, int], dict[Hashable, _ParkedFetch]] = {}
        self._shard_feeds: dict[str, _ShardFeed] = {}
        self._deadlines: list[tuple[int, int, Hashable]] = []
        self._sequence = 0
        self._touched: dict[Hashable, None] = {}

    # --- the shell's side ---------------------------------------------------------------------------------------------

    @property
    def parked_count(self) -> int:
        return len(self._parked)

    def fetch(
        self,
        request: FetchRequest,
        api_version: int,
        now_ms: int,
        *,
        token: Hashable,
        candidate_session_id: int,
        readable: ReadableTopics | None = None,
        throttle: Throttle | None = None,
    ) -> FetchResponse | None:
        """Returns the response, or None if the request is parked under `token`."""
        try:
            context = self.sessions.open(request, api_version, now_ms)
        except KafkaError as error:
            return FetchResponse(error_code=error.error)
        hidden = self._hidden(context, readable) if readable is not None else ()
        parameters = self._parameters(request, api_version, candidate_session_id, hidden, throttle)
        reading = self._read(context, parameters, now_ms)
        enough = reading.answer_now or not reading.watched or reading.total_bytes >= parameters.min_bytes
        if enough or request.max_wait_ms <= 0:
            return self._respond(context, parameters, reading, now_ms)
        deadline_ms = now_ms + request.max_wait_ms
        self._park(_ParkedFetch(token, context, parameters, deadline_ms, reading.watched, reading.total_bytes))
        return None

    def poll(self, now_ms: int) -> list[CompletedFetch]:
        """Returns the responses of parked requests that have enough data now, or whose time is up.

        An unexpected error fails only the request that it happens to. One append may complete many requests, so those
        beyond MAX_POLL_BYTES of records are left for the next poll.
        """
        completions: list[CompletedFetch] = []
        left_bytes = MAX_POLL_BYTES
        touched, self._touched = self._touched, {}
        for token in touched:
            if left_bytes <= 0:
                self._touched[token] = None
            elif (parked := self._parked.get(token)) is not None:
                left_bytes -= self._retry(parked, now_ms, completions)
        while left_bytes > 0 and self._deadlines and self._deadlines[0][0] <= now_ms:
            parked = self._parked.get(heappop(self._deadlines)[2])
            if parked is not None:
                left_bytes -= self._retry(parked, now_ms, completions)
        if self._touched and self.wake is not None:
            self.wake()
        return completions

    def next_deadline_ms(self) -> int | None:
        """Returns the latest time at which `poll` must be called, None if no request is parked."""
        while self._deadlines and self._deadlines[0][2] not in self._parked:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def cancel(self, token: Hashable) -> None:
        """Drops a parked request whose client is gone."""
        parked = self._parked.get(token)
        if parked is not None:
            self._unpark(parked)

    # --- the partitions' side -----------------------------------------------------------------------------------------

    def on_append(self, topic: str, partition: int, size_bytes: int) -> None:
        """Touches the requests that have enough data now that a partition grew by `size_bytes`."""
        if not self._watchers:
            return
        for parked in self._watchers.get((topic, partition), {}).values():
            parked.available_bytes += size_bytes
            if parked.available_bytes >= parked.parameters.min_bytes:
                self._touch(parked)

    def follow_shards(self, topic: str, observers: list[Callable[[Append], None]]) -> None:
        """Watches the logs of `topic`, which a coordinator's shards write: they call `observers` at each append.

        Fetches rarely wait there. `observers` therefore holds a callback only while a request is parked.
        """
        self._shard_feeds[topic] = _ShardFeed(observers, partial(self._on_shard_append, topic))

    def _on_shard_append(self, topic: str, append: Append) -> None:
        self.on_append(topic, append.shard_id, len(append.data))

    def on_change(self, topic: str, partition: int) -> None:
        """Touches every request that waits for a partition: the partition is gone, or its last stable offset moved."""
        for parked in self._watchers.get((topic, partition), {}).values():
            parked.available_bytes = max(parked.available_bytes, parked.parameters.min_bytes)
            self._touch(parked)

    def watched(self, partitions: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Returns those of the partitions that requests wait for."""
        return [key for key in partitions if key in self._watchers] if self._watchers else []

    def _touch(self, parked: _ParkedFetch) -> None:
        self._touched[parked.token] = None
        if self.wake is not None:
            self.wake()

    # --- parking ------------------------------------------------------------------------------------------------------

    def _park(self, parked: _ParkedFetch) -> None:
        self._parked[parked.token] = parked
        for key in parked.watched:
            self._watchers.setdefault(key, {})[parked.token] = parked
            feed = self._shard_feeds.get(key[0])
            if feed is not None:
                feed.join()
        self._sequence += 1
        heappush(self._deadlines, (parked.deadline_ms, self._sequence, parked.token))
        if len(self._deadlines) > 2 * len(self._parked) + _SPARE_DEADLINES:
            # Most requests end long before their time is up, and max.wait may be days.
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._parked]
            heapify(self._deadlines)

    def _unpark(self, parked: _ParkedFetch) -> None:
        del self._parked[parked.token]
        for key in parked.watched:
            watchers = self._watchers[key]
            del watchers[parked.token]
            if not watchers:
                del self._watchers[key]
            feed = self._shard_feeds.get(key[0])
            if feed is not None:
                feed.leave()

    def _retry(self, parked: _ParkedFetch, now_ms: int, completions: list[CompletedFetch]) -> int:
        """Reads again, and adds the response to `completions` if the request is complete. Returns its record bytes."""
        try:
            reading = self._read(parked.context, parked.parameters, now_ms)
            # A request with a deleted topic completes at once, as Kafka's delayed fetch does.
            is_complete = reading.answer_now or reading.watched != parked.watched or parked.deadline_ms <= now_ms
            if is_complete or reading.total_bytes >= parked.parameters.min_bytes:
                self._unpark(parked)
                response = self._respond(parked.context, parked.parameters, reading, now_ms)
                completions.append(CompletedFetch(parked.token, response))
                return reading.total_bytes
        except Exception:
            # Other requests of this poll are complete and not parked any more. An error here would lose them.
            _logger.exception("A Fetch request that waited for data failed")
            self.cancel(parked.token)
            completions.append(CompletedFetch(parked.token, FetchResponse(error_code=Errors.UNKNOWN_SERVER_ERROR)))
            return 0
        parked.available_bytes = reading.total_bytes
        return 0

    def _respond(
        self, context: FetchContext, parameters: FetchParameters, reading: _Reading, now_ms: int
    ) -> FetchResponse:
        response = self.sessions.respond(
            context, reading.answers, candidate_session_id=parameters.candidate_session_id, now_ms=now_ms
        )
        if parameters.throttle is None or response.error_code or not (throttle_ms := parameters.throttle(response)):
            return response
        return self.sessions.withhold(context, response, throttle_ms)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _hidden(self, context: FetchContext, readable: ReadableTopics) -> set[str]:
        names = {
            self._source.topic_name(partition.topic_id) if context.uses_topic_ids else partition.topic
            for partition in context.partitions
        }
        topics = {name for name in names if name is not None}
        return topics - readable(topics)

    def _parameters(
        self,
        request: FetchRequest,
        api_version: int,
        candidate_session_id: int,
        hidden: Collection[str],
        throttle: Throttle | None,
    ) -> FetchParameters:
        max_bytes = min(request.max_bytes, self._max_bytes)
        return FetchParameters(
            max_bytes,
            min(request.min_bytes, max_bytes),
            request.isolation_level,
            replica_id(request, api_version),
            api_version,
            candidate_session_id,
            hidden,
            throttle,
        )

    def _read(self, context: FetchContext, parameters: FetchParameters, now_ms: int) -> _Reading:
        """Reads the partitions in order.

        Partitions that do not exist come last in the response, and do not complete a request early.
        """
        reading = _Reading()
        missing: list[tuple[FetchPartition, FetchResponse.PartitionData]] = []
        for partition in context.partitions:
            error = self._resolve(partition, context, parameters.hidden)
            if error is not Errors.NONE:
                missing.append((partition, error_data(partition.partition, error)))
                continue
            check_isolation_level(parameters.isolation_level)
            reading.watched.append((partition.topic, partition.partition))
            reading.answers.append((partition, self._read_partition(partition, parameters, reading, now_ms)))
        reading.answers.extend(missing)
        return reading

    def _resolve(self, partition: FetchPartition, context: FetchContext, hidden: Collection[str]) -> Errors:
        """Fills in the topic's name by its id, or the id by the name.

        Returns the error if the partition is unknown, or its topic hidden.
        """
        if context.uses_topic_ids:
            name = self._source.topic_name(partition.topic_id)
            if name is None:
                return Errors.UNKNOWN_TOPIC_ID
            partition.topic = name
        else:
            partition.topic_id = self._source.topic_id(partition.topic) or ZERO_UUID
        if partition.topic in hidden:
            return Errors.TOPIC_AUTHORIZATION_FAILED
        exists = self._source.has_partition(partition.topic, partition.partition)
        return Errors.NONE if exists else Errors.UNKNOWN_TOPIC_OR_PARTITION

    def _read_partition(
        self, partition: FetchPartition, parameters: FetchParameters, reading: _Reading, now_ms: int
    ) -> FetchResponse.PartitionData:
        left = max(0, parameters.max_bytes - reading.total_bytes)
        try:
            if parameters.replica_id >= 0:
                raise KafkaError(
                    self._error_for_replica(partition),
                    f"Broker {parameters.replica_id} is not a replica of {partition.topic}-{partition.partition}.",
                )
            result = self._source.read(
                partition,
                max_bytes=min(left, partition.max_bytes),
                whole_first_batch=reading.total_bytes == 0,
                read_committed=parameters.isolation_level == READ_COMMITTED,
                now_ms=now_ms,
            )
        except KafkaError as error:
            if not isinstance(error, LogBeingOpenedError):
                reading.answer_now = True
            return self._failure(partition, error.error, parameters.api_version)
        reading.total_bytes += len(result.records if result.unread_records is None else result.unread_records)
        if result.diverging_epoch is not None:
            reading.answer_now = True
        return partition_data(partition.partition, result)

    def _error_for_replica(self, partition: FetchPartition) -> Errors:
        """Returns the error for a broker that fetches, since no broker is a replica. It may name its leader epoch."""
        leader_id, leader_epoch = self._source.leader_of(partition.topic, partition.partition)
        if leader_id != self._node_id or partition.current_leader_epoch == UNDEFINED_EPOCH:
            return Errors.NOT_LEADER_OR_FOLLOWER
        is_old = partition.current_leader_epoch < leader_epoch
        return Errors.FENCED_LEADER_EPOCH if is_old else Errors.UNKNOWN_LEADER_EPOCH

    def _failure(self, partition: FetchPartition, error: Errors, api_version: int) -> FetchResponse.PartitionData:
        data = error_data(partition.partition, error)
        data.aborted_transactions = None
        if api_version >= _OLDEST_VERSION_WITH_LEADER_HINT and error in (
            Errors.NOT_LEADER_OR_FOLLOWER,
            Errors.FENCED_LEADER_EPOCH,
        ):
            leader_id, leader_epoch = self._source.leader_of(partition.topic, partition.partition)
            data.current_leader = FetchResponse.LeaderIdAndEpoch(leader_id=leader_id, leader_epoch=leader_epoch)
        return data


def partition_data(index: int, result: ReadResult) -> FetchResponse.PartitionData:
    """Returns a partition's part of the response."""
    aborted = result.aborted_transactions
    data = FetchResponse.PartitionData(
        partition_index=index,
        high_watermark=result.high_watermark,
        last_stable_offset=result.last_stable_offset,
        log_start_offset=result.log_start_offset,
        aborted_transactions=None
        if aborted is None
        else [
            FetchResponse.AbortedTransaction(producer_id=transaction.producer_id, first_offset=transaction.first_offset)
            for transaction in aborted
        ],
        # The encoder needs only the length of a part of a file, and passes it on.
        records=result.records if result.unread_records is None else cast(bytes, result.unread_records),
    )
    if result.diverging_epoch is not None:
        epoch, end_offset = result.diverging_epoch
        data.diverging_epoch = FetchResponse.EpochEndOffset(epoch=epoch, end_offset=end_offset)
    return data


def error_data(index: int, error: Errors) -> FetchResponse.PartitionData:
    """Returns the part of a partition that is not read.

    Every offset in it is unknown (observed in Kafka 4.3.1, also for OFFSET_OUT_OF_RANGE). The list of aborted
    transactions is empty. If a read fails, Kafka returns null in place of the list.
    """
    return FetchResponse.PartitionData(partition_index=index, error_code=error, high_watermark=-1, records=b"")
