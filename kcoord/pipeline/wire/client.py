# SPDX-License-Identifier: Apache-2.0
"""Blocking requests to the brokers of a cluster, for tasks and planners of Spark, which have no event loop.

Theory of operation. The connections live in an event loop that runs in a thread of its own. So a fetch makes progress
while its caller decodes the previous one, and a caller may have another event loop, as a notebook does. Requests are
repeated until `default.api.timeout.ms` if their error may pass: the leader moved, or the broker restarts. A broker that
lags behind in the metadata may not know a topic yet, so a topic counts as unknown only after _UNKNOWN_SECONDS.

A quota may throttle the fetches of the client. The response is then empty, and the broker reads no request during the
throttle (KIP-219). The client waits for that time and fetches again, with a new timeout, so a read that is only slow
does not fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from concurrent.futures import Future
from functools import cache
from typing import Final, NamedTuple, TypeVar

from kcoord.client.cluster import Cluster
from kcoord.client.config import CommonConfig
from kcoord.client.connection import Connection
from kcoord.client.errors import (
    DisconnectException,
    ThrottledException,
    TimeoutException,
    UnsupportedVersionException,
    is_retriable,
)
from kcoord.client.leaders import ActiveProducers, ask_leaders, describe_producers, fetch_batches, list_offsets
from kcoord.client.metadata import TopicMetadata
from kcoord.client.offset_messages import by_topic
from kcoord.client.repeat import repeat
from kcoord.client.types import TopicPartition
from kcoord.pipeline.errors import BrokerError, BrokerUnavailableError
from kcoord.pipeline.wire.place import Properties
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    FetchResponse,
)

FetchedPartition = FetchResponse.PartitionData

CLIENT_ID: Final = "kcoord-pipeline"
"""The client id of all requests, if the settings have none. Operators give a quota to it."""
EARLIEST: Final = -2
LATEST: Final = -1
UNKNOWN_TOPIC: Final = frozenset(
    {Errors.UNKNOWN_TOPIC_OR_PARTITION, Errors.UNKNOWN_TOPIC_ID, Errors.INCONSISTENT_TOPIC_ID}
)
_UNKNOWN_SECONDS: Final = 3.0

T = TypeVar("T")
V = TypeVar("V")


@cache
def client_of(properties: Properties) -> BrokerClient:
    """Returns the client of this process for a cluster. The tasks of a worker share its connections."""
    return BrokerClient(dict(properties))


class _Throttle(NamedTuple):
    """A fetch that returned nothing, because a quota throttles the client."""

    throttle_ms: int


class BrokerClient:
    """The connections to one cluster. Each method raises BrokerError if the brokers do not answer or refuse."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        """Raises ConfigException for a bad setting. Connects with the first request."""
        config = CommonConfig.from_properties({"client.id": CLIENT_ID, **properties})
        self._servers = properties.get("bootstrap.servers", "")
        self._cluster = Cluster(config)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="kcoord broker client", daemon=True).start()

    def topic(self, name: str) -> TopicMetadata | None:
        """Returns a topic's id and partitions, None if the topic does not exist."""
        return self._run(self._topic(name), name)

    def cluster_id(self) -> str | None:
        """Returns the id of the cluster."""

        async def ask() -> str | None:
            deadline = self._cluster.deadline()
            await self._cluster.retry("find the cluster", deadline, lambda: self._cluster.refresh_metadata(()))
            return self._cluster.metadata.cluster_id

        return self._run(ask(), "")

    def offsets(
        self, topic: str, partitions: Collection[int], timestamp: int, *, read_committed: bool = False
    ) -> dict[int, int]:
        """Looks up an offset of each partition by time: EARLIEST, LATEST, or a time in ms.

        With `read_committed` LATEST is the last stable offset, else the high watermark.
        """

        async def ask() -> dict[int, int]:
            places = [TopicPartition(topic, partition) for partition in partitions]
            attempt = list_offsets(
                self._cluster,
                self._cluster.deadline(),
                dict.fromkeys(places, timestamp),
                read_committed=read_committed,
            )
            return {place.partition: result.offset for place, result in (await self._repeat(places, attempt)).items()}

        return self._run(ask(), topic)

    def producers(self, topic: str, partitions: Collection[int]) -> dict[int, ActiveProducers]:
        """Returns the active producers of each partition, with their open transactions."""

        async def ask() -> dict[int, ActiveProducers]:
            places = [TopicPartition(topic, partition) for partition in partitions]
            states = await self._repeat(places, describe_producers(self._cluster))
            return {place.partition: producers for place, producers in states.items()}

        return self._run(ask(), topic)

    def sizes(self, topic: str, partitions: Collection[int]) -> dict[int, int]:
        """Returns the size of each log in bytes, of those that the brokers tell.

        Without DESCRIBE on the cluster they tell none.
        """

        async def attempt() -> dict[int, int]:
            places = [TopicPartition(topic, partition) for partition in partitions]
            outcomes = await ask_leaders(self._cluster, places, _log_sizes)
            return {place.partition: size for place, size in outcomes.items() if not isinstance(size, KafkaError)}

        return self._run(attempt(), topic)

    def fetch(
        self, partition: TopicPartition, topic_id: bytes, offset: int, end: int, max_bytes: int
    ) -> Future[FetchedPartition]:
        """Starts a fetch, whose result has the batches from `offset` on, or the error OFFSET_OUT_OF_RANGE.

        A new leader may not have the high watermark `end` yet. If there are no batches, the fetch waits for it, and
        returns without it at the end of the timeout.
        """

        async def ask() -> FetchedPartition:
            latest: dict[TopicPartition, FetchedPartition] = {}
            once = fetch_batches(self._cluster, offset, max_bytes, topic_id)

            async def attempt(
                pending: list[TopicPartition],
            ) -> Mapping[TopicPartition, FetchedPartition | _Throttle | KafkaError]:
                outcomes = dict(await once(pending))
                fetched = outcomes[partition]
                if isinstance(fetched, ThrottledException):
                    return {partition: _Throttle(fetched.throttle_ms)}
                if isinstance(fetched, FetchedPartition) and not fetched.error_code and _is_behind(fetched, end):
                    latest[partition] = fetched
                    outcomes[partition] = KafkaError(Errors.OFFSET_NOT_AVAILABLE)
                return outcomes

            while True:
                try:
                    outcome: dict[TopicPartition, FetchedPartition | _Throttle]
                    outcome = await self._repeat([partition], attempt)
                except KafkaError as error:
                    if error.error is Errors.OFFSET_NOT_AVAILABLE and latest:
                        return latest[partition]
                    raise
                fetched = outcome[partition]
                if isinstance(fetched, FetchedPartition):
                    return fetched
                await asyncio.sleep(fetched.throttle_ms / 1000)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop)

    def result(self, future: Future[T], topic: str) -> T:
        """Waits for the result of a request about a topic."""
        try:
            return future.result()
        except KafkaError as error:
            failure = BrokerUnavailableError if is_retriable(error) else BrokerError
            raise failure(f"{self._servers}: {_reason(error, topic)}") from error

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        asyncio.run_coroutine_threadsafe(self._cluster.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)

    # In the thread of the event loop.

    async def _topic(self, name: str) -> TopicMetadata | None:
        deadline = self._cluster.deadline()
        unknown_from = self._loop.time()
        while True:
            await self._cluster.retry("find the cluster", deadline, lambda: self._cluster.refresh_metadata([name]))
            error = self._cluster.metadata.topic_error(name)
            if not error:
                return self._cluster.metadata.topics[name]
            if not error.retriable or deadline.is_over:
                raise KafkaError(error, name)
            if error in UNKNOWN_TOPIC and self._loop.time() - unknown_from >= _UNKNOWN_SECONDS:
                return None
            await self._cluster.sleep_backoff(1, deadline)

    async def _repeat(
        self,
        places: list[TopicPartition],
        attempt: Callable[[list[TopicPartition]], Awaitable[Mapping[TopicPartition, V | KafkaError]]],
    ) -> dict[TopicPartition, V]:
        """Repeats an attempt while errors may pass. Returns the values, or raises the first error."""
        deadline = self._cluster.deadline()
        unknown_until = self._loop.time() + _UNKNOWN_SECONDS
        values: dict[TopicPartition, V] = {}
        pending = places
        while True:
            outcomes = await repeat(self._cluster, deadline, pending, attempt)
            pending = []
            for place, outcome in outcomes.items():
                if not isinstance(outcome, KafkaError):
                    values[place] = outcome
                elif outcome.error in UNKNOWN_TOPIC and self._loop.time() < unknown_until:
                    pending.append(place)
                else:
                    raise outcome
            if not pending:
                return values
            await self._cluster.sleep_backoff(1, deadline)

    def _run(self, work: Coroutine[object, object, T], topic: str) -> T:
        return self.result(asyncio.run_coroutine_threadsafe(work, self._loop), topic)


def _is_behind(fetched: FetchedPartition, end: int) -> bool:
    return not fetched.records and fetched.high_watermark < end


def _reason(error: KafkaError, topic: str) -> str:
    if error.error is Errors.TOPIC_AUTHORIZATION_FAILED:
        # Some requests need DESCRIBE only. READ includes it, and a client that reads needs READ sooner or later.
        return f"{error.error.name}: the client needs an ACL that allows READ on the topic {topic}"
    if isinstance(error, UnsupportedVersionException):
        return f"the broker is too old, Kafka 3.1 is the oldest release that can be read: {error.message}"
    return str(error.message if isinstance(error, DisconnectException | TimeoutException) else error)


async def _log_sizes(connection: Connection, asked: list[TopicPartition]) -> dict[TopicPartition, int | KafkaError]:
    request = DescribeLogDirsRequest(
        topics=[
            DescribeLogDirsRequest.DescribableLogDirTopic(topic=name, partitions=indexes)
            for name, indexes in by_topic(asked).items()
        ]
    )
    response = await connection.call(request, DescribeLogDirsResponse)
    return {
        TopicPartition(topic.name, partition.partition_index): partition.partition_size
        for folder in response.results
        for topic in folder.topics
        for partition in topic.partitions
        if not partition.is_future_key
    }
