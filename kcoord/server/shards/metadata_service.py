# SPDX-License-Identifier: Apache-2.0
"""The metadata of a process, and the service that owns the metadata log.

Theory of operation
-------------------
`MetadataService` is the metadata as the other parts of a broker see it: an image, its publishers, and operations. The
process of the controller has the log itself (`LocalMetadataService`); other workers follow it
(`kcoord.server.workers.metadata_follower`).

* The log is replayed before anything else starts. A broker that cannot read it does not start.
* Operations run one at a time, in the order of their calls. Each sees the state that the earlier operations left.
* An image is published when the batch that made it is durable, and before the responses that waited for that batch
  leave. So a client that got a response finds the new topic everywhere.
* The creation of topics and partitions also waits, up to ORDER_SECONDS: until the groups of this process are loaded,
  and the creation times of the groups of all workers are known (`kcoord.metadata.creation_order`). After a start, this
  includes workers that have not connected yet. Such operations may overtake each other while they wait.
* A thread makes the result of an operation on thousands of partitions, on the image that the operation found. So later
  operations may overtake it.
* If an append fails, the log is closed and read again after RELOAD_MS. Operations fail with NOT_CONTROLLER until then,
  which clients retry. Everything that needs only the published image continues.
* If the disk was full, later operations that write are refused for a while, so that the log does not fail again.
* A crash loses no acknowledged change. An operation without a response may be in the log or not.

Everything else runs in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeAlias, TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.metadata.creation_order import CreationOrder
from kcoord.metadata.image import ImageBuilder, MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import MAX_GROUP_BYTES, CoordinatorResult, EncodedRecords, OperationContext
from kcoord.runtime.serde import MetadataSerde
from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply
from kcoord.server.disk.shard_logs import LocalShardLog
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.shard_service import ShardDriver
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterPartitionReassignmentsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    ElectLeadersRequest,
    Message,
    UpdateFeaturesRequest,
)
from kcoord_protocol.record_batch import encode_records

_logger = logging.getLogger(__name__)

R = TypeVar("R")
RequestMessage = TypeVar("RequestMessage", bound=Message)
T = TypeVar("T")

MetadataOperation: TypeAlias = Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]]
"""An operation of the metadata machine on a request of type R, with a response of type T."""

METADATA_SHARD = 0
"""There is one metadata log, partition 0 of `__cluster_metadata`."""


RELOAD_MS: Final = 5_000

ORDER_SECONDS: Final = 5.0
"""Upper bound of the time that new partitions wait for the creation times of groups."""


LARGE_RECORDS: Final = 1_000


def is_large(request: object) -> bool:
    """Returns whether a request may create more than LARGE_RECORDS records, or names as many things."""
    match request:
        case CreatePartitionsRequest():
            size = sum(topic.count for topic in request.topics)
        case CreateTopicsRequest():
            size = sum(1 + max(topic.num_partitions, len(topic.assignments)) for topic in request.topics)
        case ElectLeadersRequest(topic_partitions=None):
            return True
        case ElectLeadersRequest(topic_partitions=list(topics)) | AlterPartitionReassignmentsRequest(topics=topics):
            size = len(topics) + sum(len(topic.partitions) for topic in topics)
        case UpdateFeaturesRequest():
            size = len(request.feature_updates)
        case _:
            return False
    return size > LARGE_RECORDS


def monotonic_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


class MetadataService(Protocol):
    """The metadata of a process, from its own log or from the worker that has the log."""

    publishers: list[Callable[[MetadataImage], None]]
    """Called with each new image when its records are durable, as Kafka's MetadataPublisher. One is the broker's."""

    def call(
        self, operation: MetadataOperation[RequestMessage, T], request: RequestMessage, context: OperationContext
    ) -> asyncio.Future[T]:
        """Runs an operation on the controller.

        The future ends when the change is durable and every worker has published it.

        If the controller is another worker, it gets `request` in the version of the context. So the operation must
        return the response of that request.
        """

    @property
    def end_offset(self) -> int:
        """The offset up to which this process has read the metadata log."""

    @property
    def image(self) -> MetadataImage:
        """The newest image of this process."""

    def close(self) -> None:
        """Ends the service at shutdown."""


def new_metadata_shards(config: BrokerConfig) -> ShardSet[MetadataMachine]:
    """Returns a shard set for the only shard of the metadata log, which is not loaded yet."""
    return ShardSet(
        lambda _: MetadataMachine(config),
        MetadataSerde(),
        name="metadata",
        # A change of the brokers changes all partitions in one batch.
        max_batch_bytes=MAX_GROUP_BYTES,
        first_reload_ms=RELOAD_MS,
        longest_reload_ms=RELOAD_MS,
    )


@dataclass(slots=True, eq=False)
class Follower:
    """Another worker, with the offsets up to which it was sent the log and up to which it has applied it."""

    broker_id: int
    process_id: int
    write: Callable[[bytes], None]
    sent_offset: int
    applied_offset: int


class LocalMetadataService(ShardDriver[MetadataMachine]):
    """Serves `Broker.metadata` from the metadata log. The only shard of `shards` is already loaded.

    `latest_group_ms` returns the latest creation time of the groups that this process coordinates, -1 without groups.
    `worker_ids` are the broker ids of the other workers that may have groups: after a start, the first partitions wait
    for the creation times of their groups.
    """

    def __init__(
        self,
        shards: ShardSet[MetadataMachine],
        log: LocalShardLog,
        wake: Callable[[], None],
        now_ms: Callable[[], int],
        latest_group_ms: Callable[[], int],
        group_times: GroupTimes,
        *,
        worker_ids: Iterable[int] = (),
    ) -> None:
        super().__init__(shards, log, wake)
        self.publishers: list[Callable[[MetadataImage], None]] = []
        self._now_ms = now_ms
        self._latest_group_ms = latest_group_ms
        self._logs = log.logs
        self._group_times = group_times
        self._order: CreationOrder[Follower] = CreationOrder(worker_ids)
        self._serde = MetadataSerde()
        self._image_under_way = self.image
        shards.append_observers.append(self.on_append_durable)

    @property
    def image(self) -> MetadataImage:
        """The image of all replayed records, including those that are not durable yet."""
        machine = self.shards.machine(METADATA_SHARD)
        if machine is None:
            raise KafkaError(Errors.NOT_CONTROLLER, "The metadata log has failed.")
        return machine.image

    @property
    def end_offset(self) -> int:
        log = self._logs.opened(METADATA_SHARD)
        if log is None:
            raise KafkaError(Errors.NOT_CONTROLLER, "The metadata log has failed.")
        return log.end_offset

    def call(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> asyncio.Future[T]:
        """Returns the future of the response, which ends when the change is durable.

        Raises KafkaError if the operation fails at once.
        """
        if isinstance(request, CreateTopicsRequest | CreatePartitionsRequest):
            return asyncio.ensure_future(self._run_in_order(operation, request, context))
        context.now_ms = self._least_creation_time_ms(context.now_ms)
        if is_large(request):
            return asyncio.ensure_future(self._run_prepared(operation, request, context))
        return self._run(operation, request, context)

    def _least_creation_time_ms(self, now_ms: int) -> int:
        """Returns the time for a new partition: later than the creation time of every group of this process.

        KIP-1327 recognizes new partitions by that. It holds also if the clock was set back, or if a group and the
        partition are created in the same millisecond.
        """
        return max(now_ms, self._latest_group_ms() + 1)

    async def _run_in_order(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> T:
        """Creates partitions that are newer than the groups of all workers (`metadata.creation_order`)."""
        ticket = self._order.begin()
        try:
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    await self._await_group_times(ticket)
            except TimeoutError:
                _logger.warning("The creation times of all groups were not known within %.0f s", ORDER_SECONDS)
            context.now_ms = self._order.stamp(
                ticket,
                self._least_creation_time_ms(context.now_ms),
                self.image.last_creation_time_ms,
                monotonic_ms(),
            )
            self._group_times.limits.hold(ticket, context.now_ms - 1)
            return await self._run_prepared(operation, request, context)
        finally:
            self._group_times.limits.release(ticket)
            self._order.end(ticket)
            self._release(ticket)

    async def _run_prepared(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> T:
        """Runs an operation. If the request is large, a thread makes its result.

        The result holds as long as no other operation changes the image meanwhile. Otherwise the operation runs again.
        """
        machine = self.shards.machine(METADATA_SHARD)
        if machine is None or not is_large(request):
            return await self._run(operation, request, context)
        image, former = machine.image, machine.copy()
        # The quota on partitions belongs to the event loop.
        decided = operation(former, context, request) if context.count_partitions is not None else None

        def prepare() -> CoordinatorResult[T]:
            result = decided or operation(former, context, request)
            return _with_encoded_records(result, machine, ImageBuilder(image), self._serde)

        result = await asyncio.get_running_loop().run_in_executor(None, prepare)

        def use(machine: MetadataMachine, context: OperationContext, request: R) -> CoordinatorResult[T]:
            return result if machine.image is image else operation(machine, context, request)

        return await self._run(use, request, context)

    async def _await_group_times(self, ticket: int) -> None:
        """Waits until the creation times of all groups are known. Here there are no other workers."""
        await self._group_times.loaded()

    def _release(self, ticket: int) -> None:
        """Informs the other workers that the operation is over. Here there are none."""

    def _run(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> asyncio.Future[T]:
        def refusable(machine: MetadataMachine, context: OperationContext, request: R) -> CoordinatorResult[T]:
            # Only replay changes this machine, so its result can be dropped if the disk is full.
            result = operation(machine, context, request)
            result.is_refusable = True
            return result

        self._wake()
        try:
            outcome = self.shards.run(METADATA_SHARD, refusable, request, context)
        except KafkaError as error:
            raise _as_controller_error(error) from None
        if type(outcome) is DeferredReply:
            return self.future_of(outcome)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.set_result(cast("T", outcome))
        return future

    def _resolve(self, future: asyncio.Future[T], value: object) -> None:
        super()._resolve(future, _as_controller_error(value) if isinstance(value, KafkaError) else value)

    def on_append_started(self, append: Append) -> None:
        self._image_under_way = self.image

    def on_append_durable(self, append: Append) -> None:
        """Publishes the image that the batch made, before the responses that wait for the batch leave."""
        self._publish(self._image_under_way)

    def _publish(self, image: MetadataImage) -> None:
        for publish in self.publishers:
            publish(image)

    def on_failed(self, shard_id: int) -> None:
        """Logs the failure. Topics and configs cannot be changed until the log is read again."""
        _logger.error("The metadata log has failed: topics and configs cannot be changed until it is read again")

    def on_active(self, load: Load) -> None:
        """Publishes the image that was read again. It may contain the changes of an append with an unknown outcome."""
        _logger.info("The metadata log was read again")
        self._publish(self.image)

    def close(self) -> None:
        self.shards.close()
        self.log.stop()


def _with_encoded_records(
    result: CoordinatorResult[T], machine: MetadataMachine, builder: ImageBuilder, serde: MetadataSerde
) -> CoordinatorResult[T]:
    """Encodes the records of a result but the last, and replays them in the builder of the next image."""
    if result.records:
        *first, last = result.records
        for record in first:
            builder.replay(record)
        body = encode_records([serde.serialize(record) for record in first])
        result.records = [last]
        result.encoded = EncodedRecords(len(first), body, partial(machine.adopt, builder))
    return result


def _as_controller_error(error: KafkaError) -> KafkaError:
    """Replaces coordinator errors by NOT_CONTROLLER, which clients that change metadata retry."""
    if error.error in (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS):
        return KafkaError(Errors.NOT_CONTROLLER, "The metadata log has failed and will be read again soon.")
    return error
