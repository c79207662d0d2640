# SPDX-License-Identifier: Apache-2.0
"""How a client reaches the brokers: bootstrap list, metadata, connections, coordinators, controller and retries.

Theory of operation. Everything runs in one event loop. A `Cluster` belongs to one client, and the tasks of that client
share it.

Connections: there is one per broker and `Purpose`. It is opened at its first use; a lock per connection keeps two tasks
from opening it twice. A closed connection stays in the table until its next use replaces it, after a backoff that grows
with the failures in a row. Requests on one connection reach the broker in the order of the calls. Requests on different
connections have no order.

Metadata: each Metadata response is merged into `metadata`. The client sends the request to any broker: to the least
busy connected one, else to one that the metadata names, else to one of the bootstrap list.

Coordinators and controller: the client remembers them until a response or a lost connection shows that they may have
moved. Then it forgets them, and the next request looks them up again.

Retries: a connection sends each request once. `retry` repeats a whole attempt, which looks up brokers and coordinators
again, while its error is retriable and its deadline has not passed. A request that was retried may have been executed
twice.

Another cluster: REBOOTSTRAP_REQUIRED (KIP-1102, KIP-1242) discards brokers, coordinators and connections. The next
request starts again at the bootstrap list.

After `close` every call raises IllegalStateException; a connection that was being opened meanwhile is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from enum import Enum, IntEnum
from typing import Final, TypeVar

from kcoord.client.backoff import Backoff
from kcoord.client.config import CommonConfig
from kcoord.client.connection import Connection, ExpectedBroker, open_connection
from kcoord.client.errors import DisconnectException, IllegalStateException, TimeoutException, is_retriable
from kcoord.client.metadata import NO_NODE, ClusterMetadata
from kcoord.client.results import error_of
from kcoord.client.tasks import spawn, stop
from kcoord.client.types import Node
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse, MetadataRequest, MetadataResponse

_log = logging.getLogger(__name__)

Response = TypeVar("Response", bound=Message)
T = TypeVar("T")

COORDINATOR_MOVED: Final = frozenset({Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE})
MOST_COORDINATORS: Final = 10_000
"""The client remembers the coordinators of at most so many groups and transactional ids."""
_FIRST_VERSION_WITH_KEYS: Final = 4
_FIRST_VERSION_WITH_TOPIC_IDS: Final = 12


class CoordinatorType(IntEnum):
    """The key types of FindCoordinator."""

    GROUP = 0
    TRANSACTION = 1


class Purpose(Enum):
    """The purpose of a connection.

    A long poll would delay a heartbeat on the same connection, so each purpose has its own connection.
    """

    REQUESTS = "requests"
    FETCHES = "fetches"
    FOLLOWING = "following"
    APPENDS = "appends"
    TRANSACTIONS = "transactions"
    COORDINATOR = "coordinator"


class Deadline:
    """The time at which a call must end, on the event loop's clock."""

    __slots__ = ("_at", "timeout_ms")

    def __init__(self, timeout_ms: float) -> None:
        self.timeout_ms = timeout_ms
        self._at = asyncio.get_running_loop().time() + timeout_ms / 1000

    def left_ms(self) -> float:
        """Returns the time left; negative after the deadline."""
        return (self._at - asyncio.get_running_loop().time()) * 1000

    @property
    def is_over(self) -> bool:
        return self.left_ms() <= 0


class Cluster:
    """The brokers as one client sees them: connections, metadata, coordinators and retries."""

    def __init__(self, config: CommonConfig) -> None:
        self.config = config
        self.metadata = ClusterMetadata()
        self._backoff = Backoff(config.retry_backoff_ms, config.retry_backoff_max_ms)
        self._reconnect_backoff = Backoff(config.reconnect_backoff_ms, config.reconnect_backoff_max_ms)
        self._connections: dict[tuple[int, Purpose], Connection] = {}
        self._locks: dict[tuple[int, Purpose], asyncio.Lock] = {}
        self._bootstrap: Connection | None = None
        self._bootstrap_lock = asyncio.Lock()
        self._connect_failures: dict[int, int] = {}
        self._coordinators: dict[tuple[CoordinatorType, str], Node] = {}
        self._random = random.Random()
        self._is_closed = False
        self._refresher: asyncio.Task[None] | None = None

    # Time and retries.

    @staticmethod
    def wall_clock_ms() -> int:
        return int(time.time() * 1000)

    def deadline(self, timeout_ms: float | None = None) -> Deadline:
        """Returns the deadline of a call that begins now. None stands for `default_api_timeout_ms`."""
        return Deadline(self.config.default_api_timeout_ms if timeout_ms is None else timeout_ms)

    async def sleep_backoff(self, failures: int, deadline: Deadline | None = None) -> None:
        """Waits before the next attempt after `failures` failures in a row, at most until the deadline."""
        delay = self._backoff.delay_ms(failures, self._random.random())
        if deadline is not None:
            delay = min(delay, max(deadline.left_ms(), 0))
        await asyncio.sleep(delay / 1000)

    async def retry(self, what: str, deadline: Deadline, attempt: Callable[[], Awaitable[T]]) -> T:
        """Runs `attempt` until it succeeds, fails with an error that is not retriable, or the deadline passes.

        At the deadline a running attempt is cancelled. Raises TimeoutException, with the last failure as its cause.
        """
        failures = 0
        failure: KafkaError | None = None
        while True:
            try:
                async with asyncio.timeout(max(deadline.left_ms(), 0) / 1000):
                    return await attempt()
            except KafkaError as error:
                if not is_retriable(error) or self._is_closed:
                    raise
                failures += 1
                failure = error
            except TimeoutError:
                failure = failure or TimeoutException("no response")
            if deadline.is_over:
                raise TimeoutException(f"{what}: timed out after {deadline.timeout_ms:g} ms: {failure}") from failure
            await self.sleep_backoff(failures, deadline)

    # Connections.

    async def close(self) -> None:
        """Closes all connections. Requests in flight fail, and later calls raise IllegalStateException."""
        self._is_closed = True
        await stop([self._refresher])
        await self._close_connections()

    async def connection(self, node_id: int, purpose: Purpose = Purpose.REQUESTS) -> Connection:
        """Returns the connection to a broker. Opens it if there is none or if it was closed."""
        key = node_id, purpose
        async with self._locks.setdefault(key, asyncio.Lock()):
            self._check_open()
            connection = self._connections.get(key)
            if connection is None or connection.is_closed:
                connection = self._connections[key] = await self._connect_node(node_id)
            return connection

    async def _connect_node(self, node_id: int) -> Connection:
        node = self.metadata.brokers.get(node_id)
        if node is None:
            raise DisconnectException(f"broker {node_id} is not in the metadata")
        failures = self._connect_failures.get(node_id, 0)
        await asyncio.sleep(self._reconnect_backoff.delay_ms(failures, self._random.random()) / 1000)
        try:
            connection = await self._open(node.host, node.port, self._expected_broker(node_id))
        except KafkaError as error:
            self._connect_failures[node_id] = failures + 1
            await self._rebootstrap_if_required(error)
            raise
        self._connect_failures.pop(node_id, None)
        return connection

    def _expected_broker(self, node_id: int) -> ExpectedBroker | None:
        cluster_id = self.metadata.cluster_id
        return ExpectedBroker(cluster_id, node_id) if cluster_id is not None else None

    async def _rebootstrap_if_required(self, error: KafkaError) -> None:
        """On REBOOTSTRAP_REQUIRED forgets all brokers, coordinators and connections.

        The broker belongs to another cluster, or it is not the broker that the metadata names (KIP-1102, KIP-1242).
        Raises a retriable DisconnectException, because the next attempt starts at the bootstrap list.
        """
        if error.error is not Errors.REBOOTSTRAP_REQUIRED:
            return
        _log.warning("the cluster has changed; the client bootstraps again: %s", error)
        self._coordinators.clear()
        self._connect_failures.clear()
        self.metadata.forget_cluster()
        await self._close_connections()
        raise DisconnectException(f"the client has to bootstrap again: {error}") from error

    async def _close_connections(self) -> None:
        """Closes all connections. They stay in the table, where a closed connection counts as none."""
        connections = [connection for connection in (*self._connections.values(), self._bootstrap) if connection]
        await asyncio.gather(*(connection.close() for connection in connections))

    async def _open(self, host: str, port: int, expected: ExpectedBroker | None = None) -> Connection:
        config = self.config
        self._check_open()
        connection = await open_connection(
            host,
            port,
            client_id=config.client_id,
            request_timeout_ms=config.request_timeout_ms,
            connect_timeout_ms=config.socket_connection_setup_timeout_ms,
            max_frame_bytes=config.receive_message_max_bytes,
            security=config.security,
            software_name=config.client_software_name,
            revision=config.kip_1327_revision,
            expected=expected,
        )
        if self._is_closed:
            await connection.close()
            self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise IllegalStateException("the client is closed")

    async def any_connection(self) -> Connection:
        """Returns a connection to some broker.

        Prefers the connection with the fewest requests in flight, then any broker of the metadata that can be reached,
        then the bootstrap list. The order of brokers and addresses is random, so that clients spread over the brokers.
        """
        connected = [
            connection
            for (_, purpose), connection in self._connections.items()
            if purpose is Purpose.REQUESTS and not connection.is_closed
        ]
        if connected:
            return min(connected, key=lambda connection: connection.in_flight)
        if self._bootstrap is not None and not self._bootstrap.is_closed:
            return self._bootstrap
        nodes = list(self.metadata.brokers)
        self._random.shuffle(nodes)
        for node_id in nodes:
            try:
                return await self.connection(node_id)
            except KafkaError as error:
                if not error.error.retriable:
                    raise
        return await self._connect_bootstrap()

    async def _connect_bootstrap(self) -> Connection:
        async with self._bootstrap_lock:
            if self._bootstrap is not None and not self._bootstrap.is_closed:
                return self._bootstrap
            addresses = list(self.config.bootstrap_addresses)
            self._random.shuffle(addresses)
            failure: KafkaError | None = None
            for host, port in addresses:
                try:
                    self._bootstrap = await self._open(host, port)
                    return self._bootstrap
                except KafkaError as error:
                    failure = error
            assert failure is not None
            raise failure

    def offers(self, api_key: int) -> bool:
        """Whether a broker has the API, as far as the client has connected to brokers."""
        connections = (connection for connection in (*self._connections.values(), self._bootstrap) if connection)
        return any(connection.versions.offers(api_key) for connection in connections)

    async def call_any(
        self, request: Message, response: type[Response], *, lowest: int = 0, highest: int | None = None
    ) -> Response:
        """Sends a request that every broker can handle to any broker."""
        return await (await self.any_connection()).call(request, response, lowest=lowest, highest=highest)

    async def call_controller(self, request: Message, response: type[Response], *, lowest: int = 0) -> Response:
        """Sends a request to the controller, which changes topics, configs and features.

        After an error the next call looks the controller up again.
        """
        if self.metadata.controller_id not in self.metadata.brokers:
            await self.refresh_metadata(())
        if self.metadata.controller_id not in self.metadata.brokers:
            raise KafkaError(Errors.NOT_CONTROLLER, "the metadata names no controller")
        try:
            connection = await self.connection(self.metadata.controller_id)
            return await connection.call(request, response, lowest=lowest)
        except KafkaError:
            self.forget_controller()
            raise

    def forget_controller(self) -> None:
        """Makes the next call of the controller look it up first."""
        self.metadata.controller_id = NO_NODE

    # Metadata.

    async def start(self, deadline: Deadline) -> None:
        """Fetches the first metadata. Retries until the deadline if no broker can be reached."""
        servers = self.config.bootstrap_servers
        text = servers if isinstance(servers, str) else ",".join(servers)
        await self.retry(f"find the cluster at {text}", deadline, lambda: self.refresh_metadata(()))

    def keep_metadata_fresh(self) -> None:
        """Starts a task that refreshes the metadata of the topics in use every `metadata_max_age_ms`.

        Without it the client would not see partitions that are added to a topic.
        """
        self._refresher = spawn(self._refresh_periodically(), "kcoord metadata")

    async def _refresh_periodically(self) -> None:
        while True:
            await asyncio.sleep(max(self.config.metadata_max_age_ms, 1) / 1000)
            try:
                await self.refresh_metadata(self.metadata.topics.keys())
            except KafkaError as error:
                _log.warning("the periodic metadata refresh failed: %s", error)

    async def refresh_metadata(
        self, topics: Collection[str] | None, *, allow_auto_topic_creation: bool = False
    ) -> MetadataResponse:
        """Fetches the metadata of some topics by name, of all topics (None), or of the brokers alone (no names)."""
        request = MetadataRequest(
            topics=None
            if topics is None
            else [MetadataRequest.MetadataRequestTopic(name=name) for name in sorted(set(topics))],
            allow_auto_topic_creation=allow_auto_topic_creation,
        )
        return await self._ask_metadata(request, all_topics=topics is None)

    async def refresh_topic_ids(self, topic_ids: Iterable[bytes]) -> MetadataResponse:
        """Fetches the metadata of topics by id, because assignments contain topic ids."""
        topics = [
            MetadataRequest.MetadataRequestTopic(name=None, topic_id=topic_id) for topic_id in sorted(set(topic_ids))
        ]
        request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        return await self._ask_metadata(request, lowest=_FIRST_VERSION_WITH_TOPIC_IDS)

    async def _ask_metadata(
        self, request: MetadataRequest, *, lowest: int = 0, all_topics: bool = False
    ) -> MetadataResponse:
        response = await self.call_any(request, MetadataResponse, lowest=lowest)
        if response.error_code:
            error = KafkaError(error_of(response.error_code))
            await self._rebootstrap_if_required(error)
            raise error
        self.metadata.merge(response, all_topics=all_topics)
        return response

    # Coordinators.

    async def find_coordinators(self, kind: CoordinatorType, keys: Collection[str]) -> dict[str, Node | KafkaError]:
        """Returns the coordinator of each key, or the error of the lookup. Uses the cache first."""
        missing = [key for key in keys if (kind, key) not in self._coordinators]
        failed: dict[str, Node | KafkaError] = {}
        if missing:
            connection = await self.any_connection()
            answers = await self._ask_coordinators(connection, kind, missing)
            for answer in answers:
                if answer.error_code:
                    failed[answer.key] = KafkaError(error_of(answer.error_code), answer.error_message)
                else:
                    self._coordinators[kind, answer.key] = self.metadata.move_broker(
                        answer.node_id, answer.host, answer.port
                    )
        absent = KafkaError(Errors.COORDINATOR_NOT_AVAILABLE)
        coordinators = {key: self._coordinators.get((kind, key)) or failed.get(key, absent) for key in keys}
        while len(self._coordinators) > MOST_COORDINATORS:
            del self._coordinators[next(iter(self._coordinators))]
        return coordinators

    async def _ask_coordinators(
        self, connection: Connection, kind: CoordinatorType, keys: list[str]
    ) -> list[FindCoordinatorResponse.Coordinator]:
        version = connection.versions.choose(FindCoordinatorRequest)
        if version >= _FIRST_VERSION_WITH_KEYS:
            request = FindCoordinatorRequest(key_type=kind, coordinator_keys=keys)
            return (await connection.call_version(request, FindCoordinatorResponse, version)).coordinators
        answers = []
        for key in keys:
            single = FindCoordinatorRequest(key_type=kind, key=key)
            answer = await connection.call_version(single, FindCoordinatorResponse, version)
            answers.append(
                FindCoordinatorResponse.Coordinator(
                    key=key,
                    node_id=answer.node_id,
                    host=answer.host,
                    port=answer.port,
                    error_code=answer.error_code,
                    error_message=answer.error_message,
                )
            )
        return answers

    async def coordinator(self, kind: CoordinatorType, key: str) -> Connection:
        """Returns the connection to the coordinator of a group or a transactional id."""
        node = (await self.find_coordinators(kind, [key]))[key]
        if isinstance(node, KafkaError):
            raise node
        try:
            return await self.connection(node.node_id, Purpose.COORDINATOR)
        except KafkaError:
            self.forget_coordinator(kind, key)
            raise

    def forget_coordinator(self, kind: CoordinatorType, key: str) -> None:
        """Makes the next call for this group or transactional id look its coordinator up first."""
        self._coordinators.pop((kind, key), None)

    async def call_coordinator(
        self,
        kind: CoordinatorType,
        key: str,
        request: Message,
        response: type[Response],
        error_codes: Callable[[Response], Iterable[int]],
        *,
        lowest: int = 0,
        highest: int | None = None,
    ) -> Response:
        """Sends a request to the coordinator once.

        `error_codes` returns the error codes of a response. If one of them means that the coordinator moved or still
        loads, raises that error, so that `retry` looks the coordinator up again or waits.
        """
        connection = await self.coordinator(kind, key)
        try:
            answer = await connection.call(request, response, lowest=lowest, highest=highest)
        except KafkaError as error:
            if error.error.retriable:
                self.forget_coordinator(kind, key)
            raise
        for code in error_codes(answer):
            if code in COORDINATOR_MOVED:
                self.forget_coordinator(kind, key)
            if code in COORDINATOR_MOVED or code == Errors.COORDINATOR_LOAD_IN_PROGRESS:
                raise KafkaError(error_of(code))
        return answer
