# SPDX-License-Identifier: Apache-2.0
"""The one object that handlers see: configuration, metadata image, topic data, groups, clock and tasks of a running
process.

It holds references and answers questions; the machinery behind it lives in `worker` and `listener`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, cast, overload

from kcoord.metadata.features import GROUP_VERSION
from kcoord.server.api.request_context import random_uuid
from kcoord.server.shards.transactional_produce import TransactionalProduce
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig, Listener
    from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
    from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
    from kcoord.coordinator.group.shard import GroupCoordinatorShard
    from kcoord.coordinator.transaction.metadata import Partitions
    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
    from kcoord.metadata.image import MetadataImage
    from kcoord.runtime.coordinator_runtime import Waiter
    from kcoord.runtime.result import CoordinatorResult, OperationContext, Producer
    from kcoord.server.api.api_table import ApiTable
    from kcoord.server.observe.client_telemetry import ClientTelemetry
    from kcoord.server.observe.telemetry_exporter import TelemetryExporter
    from kcoord.server.shards.fetch_service import FetchService
    from kcoord.server.shards.metadata_operations import MetadataOperation
    from kcoord.topics.store import TopicStore

_logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

Reply: TypeAlias = "T | asyncio.Future[T]"
"""An answer, or the promise of one. Handlers return a promise only where something must be waited for."""

GroupOperation: TypeAlias = "Callable[[GroupCoordinatorShard, OperationContext], CoordinatorResult[T]]"
TransactionOperation: TypeAlias = "Callable[[TransactionCoordinatorShard, OperationContext], CoordinatorResult[T]]"


class MetadataService(Protocol):
    """Has the controller run operations on the metadata machine; the future ends when the change is durable, and
    published in every worker.
    """

    def run(self, operation: MetadataOperation[T], context: OperationContext) -> asyncio.Future[T]: ...

    @property
    def end_offset(self) -> int:
        """The end of the metadata log, as far as this process has read it."""


class RepeatableReply(Protocol):
    """The right to send an answer again without asking."""

    def repeat(self, now_ms: int) -> bool:
        """Whether the answer still holds; if so its effects (the member's session) are done again."""


class Committer(Protocol):
    """Commits offsets of one group without an operation."""

    def commit(self, plan: CommitPlan, cells: Sequence[bytes], now_ms: int, waiter: Waiter) -> bool:
        """`waiter` hears when that is durable. False where nothing happened: the request has to be run."""


class GroupService(Protocol):
    """Runs operations on the group coordinator shards."""

    @property
    def shard_ids(self) -> Collection[int]:
        """Those of this worker."""

    def shard_of(self, group_id: str) -> int: ...

    def run(self, group_id: str, operation: GroupOperation[T], context: OperationContext) -> Reply[T]: ...

    def run_on_shard(self, shard_id: int, operation: GroupOperation[T], context: OperationContext) -> Reply[T]: ...

    def steady(self, group_id: str, member_id: str) -> RepeatableReply | None: ...

    def committer(self, group_id: str) -> Committer | None: ...

    def fetch_packed(self, fetch: PackedFetch, require_stable: bool) -> tuple[bytes, bool] | None: ...

    def wait(self, group_id: str, waiter: Waiter) -> bool: ...

    def start_verification(self, shard_id: int, producer: Producer) -> int | None:
        """A ticket for a producer that the transaction coordinator has to be asked about first, None where not."""

    def finish_verification(self, shard_id: int, producer: Producer, ticket: int) -> None: ...


class TransactionService(Protocol):
    """Runs operations on the transaction coordinator shards."""

    @property
    def shard_ids(self) -> Collection[int]:
        """Those of this worker."""

    def shard_of(self, key: str) -> int: ...

    def run(self, key: str, operation: TransactionOperation[T], context: OperationContext) -> Reply[T]: ...

    def run_on_shard(
        self, shard_id: int, operation: TransactionOperation[T], context: OperationContext
    ) -> Reply[T]: ...

    def needs_producer_id(self, transactional_id: str) -> bool:
        """Whether an operation on this id may use up a fresh producer id, which the caller then has to bring."""

    def agree(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: Partitions,
        context: OperationContext,
        *,
        adds: bool,
    ) -> Reply[Mapping[tuple[str, int], Errors]]:
        """Whether the producer may write to the partitions within its transaction, which `adds` makes part of it."""


class Broker:
    """See the module's text. `image` is replaced as a whole at each committed metadata change."""

    def __init__(
        self,
        *,
        config: BrokerConfig,
        cluster_id: str,
        apis: ApiTable,
        image: MetadataImage,
        topics: TopicStore,
        fetches: FetchService,
        metadata: MetadataService,
        groups: GroupService,
        transactions: TransactionService,
        now_ms: Callable[[], int],
        controller_id: int | None = None,
    ) -> None:
        self.config = config
        self.node_id = config.node_id
        self.metadata_broker_id = config.node_id if controller_id is None else controller_id
        """The broker whose process has the metadata log, whether it is in service or not."""
        self.cluster_id = cluster_id
        self.apis = apis
        self.image = image
        self.topics = topics
        self.fetches = fetches
        self.metadata = metadata
        self.groups = groups
        self.transactions = transactions
        self.now_ms = now_ms
        self.transactional_produce = TransactionalProduce()
        self.endpoints: dict[str, Listener] = {}
        self._client_telemetry: ClientTelemetry | None = None
        self._exporter: TelemetryExporter | None = None
        self._tasks: set[asyncio.Task[object]] = set()

    @property
    def controller_id(self) -> int:
        """The broker that clients are to ask for changes; any passes them on. It is one that is in service."""
        alive = self.image.alive_brokers()
        if self.metadata_broker_id in alive:
            return self.metadata_broker_id
        return min(alive, default=self.metadata_broker_id)

    @property
    def client_telemetry(self) -> ClientTelemetry:
        """Made when the first client asks."""
        if self._client_telemetry is None:
            from kcoord.server.observe.client_telemetry import ClientTelemetry
            from kcoord.server.observe.telemetry_exporter import TelemetryExporter

            if self.config.kcoord_client_telemetry_endpoint:
                self._exporter = TelemetryExporter(self.config.kcoord_client_telemetry_endpoint)
            receive = self._exporter.export if self._exporter is not None else _drop_metrics
            self._client_telemetry = ClientTelemetry(self.config, random_uuid, receive)
        return self._client_telemetry

    def endpoint(self, listener_name: str) -> Listener:
        """The advertised address of this broker for clients of a listener."""
        return self.endpoints[listener_name]

    def check_consumer_protocol(self) -> None:
        """KIP-848 can be switched off by feature level or setting; as in Kafka the APIs stay listed and answer so,
        without a text.
        """
        enabled = "consumer" in self.config.group_coordinator_rebalance_protocols
        if not enabled or self.image.features.get(GROUP_VERSION, 0) < 1:
            raise KafkaError(Errors.UNSUPPORTED_VERSION)

    def spawn(self, coroutine: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Starts a task that is neither lost to the garbage collector nor able to fail unseen."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(cast("asyncio.Task[object]", task))
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[T]) -> None:
        self._tasks.discard(cast("asyncio.Task[object]", task))
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, KafkaError):
            _logger.error("A background task failed", exc_info=error)

    def cancel_tasks(self) -> None:
        """Ends what still runs at shutdown."""
        for task in list(self._tasks):
            task.cancel()
        if self._exporter is not None:
            self._exporter.close()


def _drop_metrics(metrics: bytes) -> None:
    """Where only a reporter is named, which cannot be loaded here."""


@overload
def map_reply(
    reply: asyncio.Future[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> asyncio.Future[U]: ...


@overload
def map_reply(
    reply: Reply[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> Reply[U]: ...


def map_reply(
    reply: Reply[T], function: Callable[[T], U], on_error: Callable[[KafkaError], U] | None = None
) -> Reply[U]:
    """Applies `function` to the answer now, or when it comes; `on_error` turns a later KafkaError into an answer."""
    if not asyncio.isfuture(reply):
        return function(reply)
    source = cast("asyncio.Future[T]", reply)
    target: asyncio.Future[U] = source.get_loop().create_future()

    def abandon(abandoned: asyncio.Future[U]) -> None:
        """Whoever waits no longer ends a long poll; work of several steps (a task) goes on."""
        if abandoned.cancelled() and not isinstance(source, asyncio.Task):
            source.cancel()

    def finish(done: asyncio.Future[T]) -> None:
        if target.done():
            if not done.cancelled():
                done.exception()  # seen: asyncio would report an error that nobody asked for
            return
        if done.cancelled():
            target.cancel()
            return
        try:
            error = done.exception()
            if error is None:
                target.set_result(function(done.result()))
            elif on_error is not None and isinstance(error, KafkaError):
                target.set_result(on_error(error))
            else:
                target.set_exception(error)
        except Exception as failure:
            target.set_exception(failure)

    source.add_done_callback(finish)
    target.add_done_callback(abandon)
    return target


def gather_replies(replies: list[Reply[T]]) -> Reply[list[T]]:
    """All answers in order, at once where none has to be waited for."""
    if not any(asyncio.isfuture(reply) for reply in replies):
        return cast("list[T]", replies)
    target: asyncio.Future[list[T]] = asyncio.get_running_loop().create_future()
    waiting = [reply for reply in replies if asyncio.isfuture(reply)]
    missing = len(waiting)

    def finish(_: asyncio.Future[T]) -> None:
        nonlocal missing
        missing -= 1
        if missing or target.done():
            return
        try:
            target.set_result([reply.result() if asyncio.isfuture(reply) else reply for reply in replies])
        except Exception as error:
            target.set_exception(error)

    for future in waiting:
        future.add_done_callback(finish)
    return target
