# SPDX-License-Identifier: Apache-2.0
"""The metadata of an instance: an image of its own, which agrees with the upstream and with the other instances.

Theory of operation. The metadata log in the data folder is a copy that makes a start fast. Three things change it:

* What the upstream has (`follow_upstream`). Partitions that are new get a creation time in the log that all instances
  share, before the image has them.
* Records of that log. Configs of groups are made those of the log. A topic that another instance has seen first causes
  a look at the upstream.
* Requests of clients. Changes of group configs are checked here, go to the shared log, and come back from it. So they
  hold at every instance when the client gets its response. All others are about this broker alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kcoord.metadata.image import GROUP_RESOURCE
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.shared import follow_group_configs, shared_config_records
from kcoord.metadata.upstream import UpstreamSnapshot, follow
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.disk.shard_logs import LocalShardLog
from kcoord.server.replies import internal_operation_context
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import METADATA_SHARD, LocalMetadataService, MetadataOperation
from kcoord.upstream.shared_log import SharedLog
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AlterConfigsRequest, ConfigRecord, IncrementalAlterConfigsRequest

R = TypeVar("R")
T = TypeVar("T")


class InstanceMetadata(LocalMetadataService):
    """Serves `Broker.metadata` of an instance; the module describes it."""

    def __init__(
        self,
        shared: SharedLog,
        shards: ShardSet[MetadataMachine],
        log: LocalShardLog,
        wake: Callable[[], None],
        now_ms: Callable[[], int],
        latest_group_ms: Callable[[], int],
        group_times: GroupTimes,
    ) -> None:
        super().__init__(shards, log, wake, now_ms, latest_group_ms, group_times)
        self.shared = shared

    def call(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> asyncio.Future[T]:
        if isinstance(request, AlterConfigsRequest | IncrementalAlterConfigsRequest) and any(
            resource.resource_type == GROUP_RESOURCE for resource in request.resources
        ):
            return asyncio.ensure_future(self._share(operation, request, context))
        return super().call(operation, request, context)

    async def _share(self, operation: MetadataOperation[R, T], request: R, context: OperationContext) -> T:
        """Runs an operation that changes configs of groups: those records go to the log that all instances share."""
        machine = self.shards.machine(METADATA_SHARD)
        if machine is None:
            raise KafkaError(Errors.NOT_CONTROLLER, "The metadata log has failed.")
        # Only replay changes the machine, so this is a look at the result.
        result = operation(machine, context, request)
        of_groups = [record for record in result.records if _is_of_group(record)]
        if of_groups:
            await self.shared.append(shared_config_records(of_groups))
        own = [record for record in result.records if not _is_of_group(record)]
        await super().call(lambda machine, context, request: CoordinatorResult(None, own), None, context)
        await self.follow_shared()
        return result.response

    async def follow_shared(self) -> None:
        """Makes the group configs those that all instances share."""
        await super().call(
            lambda machine, context, request: follow_group_configs(machine.image, self.shared.state.group_configs),
            None,
            internal_operation_context(self._now_ms()),
        )

    def lacks_partitions(self) -> bool:
        """Returns whether another instance has seen partitions that are not in the image yet."""
        topics = self.image.topics_by_id
        return any(
            (topic := topics.get(topic_id)) is None or len(topic.partitions) < len(times)
            for topic_id, times in self.shared.state.creation_times.items()
        )

    async def follow_upstream(self, snapshot: UpstreamSnapshot) -> None:
        """Makes the image agree with the upstream. Raises KafkaError."""
        state, image = self.shared.state, self.image
        gone = [image.topics[name].id for name in snapshot.gone if name in image.topics]
        now_ms = max(self._least_creation_time_ms(self._now_ms()), image.last_creation_time_ms)
        proposals = state.unstamped(image, snapshot, now_ms)
        if proposals:
            await self.shared.append(proposals)
        is_complete = False
        while not is_complete:
            is_complete = await super().call(
                lambda machine, context, request: follow(machine.image, request, state.creation_times),
                snapshot,
                internal_operation_context(self._now_ms()),
            )
        obsolete = state.obsolete(gone)
        if obsolete:
            await self.shared.append(obsolete)


def _is_of_group(record: CoordinatorRecord) -> bool:
    return isinstance(record.value, ConfigRecord) and record.value.resource_type == GROUP_RESOURCE
