# SPDX-License-Identifier: Apache-2.0
"""MetadataMachine: the state machine of the metadata log. Operations read the image; `replay` makes the next one.

The image runs ahead of the disk, as all hard state does; whoever publishes it waits for the append.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig
from kcoord.metadata import configs, features, fencing, reassignment, records, topics
from kcoord.metadata.image import BrokerImage, ImageBuilder, MetadataImage
from kcoord.metadata.placement import move_records
from kcoord.metadata.records import BrokerRegistration
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext, Task, TimerKey

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        AlterConfigsRequest,
        AlterConfigsResponse,
        AlterPartitionReassignmentsRequest,
        AlterPartitionReassignmentsResponse,
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DeleteTopicsRequest,
        DeleteTopicsResponse,
        ElectLeadersRequest,
        ElectLeadersResponse,
        IncrementalAlterConfigsRequest,
        IncrementalAlterConfigsResponse,
        UpdateFeaturesRequest,
        UpdateFeaturesResponse,
    )

PRODUCER_ID_BLOCK_SIZE: Final = 1000


@dataclass(slots=True)
class ProducerIdBlock:
    """Producer ids that one broker may hand out."""

    first_id: int
    size: int


class MetadataMachine:
    """See the module's text. `config` is the broker's live configuration."""

    def __init__(self, config: BrokerConfig, image: MetadataImage | None = None) -> None:
        self._config = config
        self._image = image if image is not None else MetadataImage.empty()
        self._builder: ImageBuilder | None = None

    @property
    def image(self) -> MetadataImage:
        """The image of all records replayed so far."""
        if self._builder is not None:
            self._image = self._builder.build()
            self._builder = None
        return self._image

    def replay(self, record: CoordinatorRecord) -> None:
        if self._builder is None:
            self._builder = ImageBuilder(self._image)
        self._builder.replay(record)

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        return CoordinatorResult(None)

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        raise AssertionError(f"the metadata machine sets no timers: {key}")

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        raise AssertionError(f"the metadata machine starts no tasks: {task}")

    def register_brokers(
        self, context: OperationContext, registrations: Sequence[BrokerRegistration]
    ) -> CoordinatorResult[None]:
        """Called at each start: the feature levels of a new cluster, and all of its brokers. Where these are others
        than before, the partitions are spread over them anew.
        """
        image = self.image
        new_records = self._registration_records(registrations)
        present = {registration.broker_id for registration in registrations}
        new_records += [
            records.new_unregister_broker_record(broker_id, broker.broker_epoch)
            for broker_id, broker in image.brokers.items()
            if broker_id not in present
        ]
        leaders = {partition.leader for topic in image.topics.values() for partition in topic.partitions}
        if image.brokers.keys() != present or not leaders <= present | {records.NO_LEADER}:
            new_records += move_records(self._image_with(new_records), self._config.node_id)
        else:
            new_records += fencing.settle_records(self._image_with(new_records))
        return CoordinatorResult(None, new_records)

    def _registration_records(self, registrations: Sequence[BrokerRegistration]) -> list[CoordinatorRecord]:
        image = self.image
        levels = self._bootstrap_features() if not image.features else {}
        new_records = [records.new_feature_level_record(name, level) for name, level in levels.items()]
        for registration in registrations:
            known = image.brokers.get(registration.broker_id)
            if known is None or _has_changed(known, registration):
                epoch = 0 if known is None else known.broker_epoch + 1
                new_records.append(records.new_register_broker_record(registration, epoch))
        return new_records

    def _image_with(self, new_records: Sequence[CoordinatorRecord]) -> MetadataImage:
        builder = ImageBuilder(self.image)
        for record in new_records:
            builder.replay(record)
        return builder.build()

    def _bootstrap_features(self) -> dict[str, int]:
        """As in Kafka, a feature at level 0 has no record."""
        levels = dict(records.BOOTSTRAP_FEATURES)
        for setting in self._config.kcoord_bootstrap_features:
            name, _, level = setting.partition("=")
            levels[name] = int(level)
        return {name: level for name, level in levels.items() if level > 0}

    def create_topics(
        self, context: OperationContext, request: CreateTopicsRequest, topic_ids: Sequence[bytes]
    ) -> CoordinatorResult[CreateTopicsResponse]:
        """`topic_ids` are fresh random ids, at least as many as the request has topics."""
        return topics.TopicOperations(self.image, self._config, context.now_ms).create_topics(request, topic_ids)

    def create_partitions(
        self, context: OperationContext, request: CreatePartitionsRequest
    ) -> CoordinatorResult[CreatePartitionsResponse]:
        return topics.TopicOperations(self.image, self._config, context.now_ms).create_partitions(request)

    def delete_topics(
        self, context: OperationContext, request: DeleteTopicsRequest
    ) -> CoordinatorResult[DeleteTopicsResponse]:
        return topics.delete_topics(self.image, self._config, context, request)

    def alter_partition_reassignments(
        self, context: OperationContext, request: AlterPartitionReassignmentsRequest
    ) -> CoordinatorResult[AlterPartitionReassignmentsResponse]:
        return reassignment.alter_partition_reassignments(self.image, self._config, request)

    def elect_leaders(
        self, context: OperationContext, request: ElectLeadersRequest
    ) -> CoordinatorResult[ElectLeadersResponse]:
        return reassignment.elect_leaders(self.image, context, request)

    def fence_broker(self, context: OperationContext, broker_id: int, fenced: bool) -> CoordinatorResult[bool]:
        """The response is whether the broker is fenced then."""
        return fencing.fence_broker(self.image, broker_id, fenced=fenced)

    def unregister_broker(self, context: OperationContext, broker_id: int) -> CoordinatorResult[None]:
        return fencing.unregister_broker(self.image, broker_id)

    def update_features(
        self, context: OperationContext, request: UpdateFeaturesRequest
    ) -> CoordinatorResult[UpdateFeaturesResponse]:
        return features.update_features(self.image, self._config, context, request)

    def incremental_alter_configs(
        self, context: OperationContext, request: IncrementalAlterConfigsRequest
    ) -> CoordinatorResult[IncrementalAlterConfigsResponse]:
        return configs.incremental_alter_configs(self.image, self._config, request)

    def alter_configs(
        self, context: OperationContext, request: AlterConfigsRequest
    ) -> CoordinatorResult[AlterConfigsResponse]:
        return configs.alter_configs(self.image, self._config, request)

    def allocate_producer_ids(
        self, context: OperationContext, broker_id: int, size: int = PRODUCER_ID_BLOCK_SIZE
    ) -> CoordinatorResult[ProducerIdBlock]:
        """A block of producer ids that nobody had before."""
        image = self.image
        broker = image.brokers.get(broker_id)
        epoch = -1 if broker is None else broker.broker_epoch
        first_id = image.next_producer_id
        record = records.new_producer_ids_record(broker_id, epoch, first_id + size)
        return CoordinatorResult(ProducerIdBlock(first_id, size), [record])


def _has_changed(known: BrokerImage, registration: BrokerRegistration) -> bool:
    return (
        known.endpoints != registration.endpoints
        or known.rack != registration.rack
        or known.log_dirs != registration.log_dirs
        or known.fenced
    )
