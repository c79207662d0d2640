# SPDX-License-Identifier: Apache-2.0
"""The metadata log of this process: replayed before anything else starts, then changed one operation at a time.

An image is published when the batch that made it is durable, and before the replies that waited for that batch leave:
whoever was told that a topic exists finds it everywhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast

from kcoord.config import BrokerConfig
from kcoord.metadata.creation_order import CreationOrder
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.runtime.serde import MetadataSerde
from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import DeferredReply
from kcoord.server.disk.shard_logs import LocalShardLog
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.shard_service import ShardDriver
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreatePartitionsRequest, CreateTopicsRequest, Message

_logger = logging.getLogger(__name__)

R = TypeVar("R")
RequestMessage = TypeVar("RequestMessage", bound=Message)
T = TypeVar("T")

METADATA_SHARD = 0
"""There is one metadata log, partition 0 of `__cluster_metadata`."""


RELOAD_MS: Final = 5_000

ORDER_SECONDS: Final = 5.0
"""How long new partitions wait for the creation times of groups that are being loaded, or that a worker has."""


def monotonic_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


class MetadataService(Protocol):
    """The metadata as a process has it: the log itself, or what the controller's worker sends of it."""

    image_observers: list[Callable[[MetadataImage], None]]
    """Called with each new image, when it is durable."""

    def call(
        self,
        operation: Callable[[MetadataMachine, OperationContext, RequestMessage], CoordinatorResult[T]],
        request: RequestMessage,
        context: OperationContext,
    ) -> asyncio.Future[T]:
        """Has the controller run an operation. The future ends when the change is durable and every worker has
        published it. Another worker's controller gets `request` in the version of the context, so what the operation
        returns has to be its response.
        """

    @property
    def end_offset(self) -> int:
        """The end of the metadata log, as far as this process has read it."""

    @property
    def image(self) -> MetadataImage: ...

    def close(self) -> None: ...


def new_metadata_shards(config: BrokerConfig) -> ShardSet[MetadataMachine]:
    """The metadata log's only shard, not loaded yet."""
    return ShardSet(
        lambda _: MetadataMachine(config),
        MetadataSerde(),
        name="metadata",
        first_reload_ms=RELOAD_MS,
        longest_reload_ms=RELOAD_MS,
    )


@dataclass(slots=True, eq=False)
class Follower:
    """Another worker: up to where the log was sent to it, and up to where it has applied it."""

    write: Callable[[bytes], None]
    sent_offset: int
    applied_offset: int


class LocalMetadataService(ShardDriver[MetadataMachine]):
    """Serves `Broker.metadata`. The set's only shard is loaded already.

    `wake` makes the pump collect what is to be written. `latest_group_ms` is the latest creation time of the groups
    that this process coordinates, -1 if there was none.
    """

    def __init__(
        self,
        shards: ShardSet[MetadataMachine],
        log: LocalShardLog,
        wake: Callable[[], None],
        now_ms: Callable[[], int],
        latest_group_ms: Callable[[], int],
        group_times: GroupTimes | None = None,
    ) -> None:
        super().__init__(shards, log, wake)
        self.image_observers: list[Callable[[MetadataImage], None]] = []
        self._now_ms = now_ms
        self._latest_group_ms = latest_group_ms
        self._logs = log.logs
        self._group_times = group_times
        self._order: CreationOrder[Follower] = CreationOrder()
        self._image_under_way = self.image
        shards.append_observers.append(self.on_append_durable)

    @property
    def image(self) -> MetadataImage:
        """The image of everything that was replayed, also of what is not durable yet."""
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

    def call(
        self,
        operation: Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> asyncio.Future[T]:
        """The response when it is durable. Raises KafkaError if the operation fails at once."""
        if self._group_times is None or not isinstance(request, CreateTopicsRequest | CreatePartitionsRequest):
            context.now_ms = self._least_creation_time_ms(context.now_ms)
            return self._run(operation, request, context)
        return asyncio.ensure_future(self._run_in_order(self._group_times, operation, request, context))

    def _least_creation_time_ms(self, now_ms: int) -> int:
        """A partition that is made now is newer than every group that is there, also if the clock was set back or both
        fall into one millisecond: KIP-1327 recognizes new partitions by that.
        """
        return max(now_ms, self._latest_group_ms() + 1)

    async def _run_in_order(
        self,
        group_times: GroupTimes,
        operation: Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> T:
        """Makes partitions that are newer than the groups of all workers (`metadata.creation_order`)."""
        ticket = self._order.begin()
        try:
            try:
                async with asyncio.timeout(ORDER_SECONDS):
                    await group_times.loaded()
                    await self._hold(ticket)
            except TimeoutError:
                _logger.warning("The creation times of all groups are not known within %.0f s", ORDER_SECONDS)
            context.now_ms = self._order.stamp(
                ticket,
                self._least_creation_time_ms(context.now_ms),
                self.image.last_creation_time_ms,
                monotonic_ms(),
            )
            group_times.limits.hold(ticket, context.now_ms - 1)
            return await self._run(operation, request, context)
        finally:
            group_times.limits.release(ticket)
            self._order.end(ticket)
            self._release(ticket)

    async def _hold(self, ticket: int) -> None:
        """Asks the other workers; there are none."""

    def _release(self, ticket: int) -> None:
        """Tells the other workers that the operation is over; there are none."""

    def _run(
        self,
        operation: Callable[[MetadataMachine, OperationContext, R], CoordinatorResult[T]],
        request: R,
        context: OperationContext,
    ) -> asyncio.Future[T]:
        def refusable(machine: MetadataMachine, context: OperationContext, request: R) -> CoordinatorResult[T]:
            # Nothing but replay changes this machine, so a result that finds no space on the disk can be dropped.
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
        """All brokers see the image that the batch made before its answers leave."""
        self._publish(self._image_under_way)

    def _publish(self, image: MetadataImage) -> None:
        for observe in self.image_observers:
            observe(image)

    def on_failed(self, shard_id: int) -> None:
        """Topics and configs cannot be changed until the log is read again; all else goes on."""
        _logger.error("The metadata log has failed: topics and configs cannot be changed for now")

    def on_active(self, load: Load) -> None:
        """The log is another object now."""
        _logger.info("The metadata log was read again")
        self._publish(self.image)

    def close(self) -> None:
        self.shards.close()
        self.log.stop()


def _as_controller_error(error: KafkaError) -> KafkaError:
    """Clients that change metadata know a controller: NOT_CONTROLLER makes them try again."""
    if error.error in (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS):
        return KafkaError(Errors.NOT_CONTROLLER, "The metadata log has failed and is read again soon.")
    return error
