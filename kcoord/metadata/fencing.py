# SPDX-License-Identifier: Apache-2.0
"""Brokers that are out of service for a while (KIP-631): other replicas lead their partitions, until they come back.

All brokers share one disk, so no replica misses anything: whichever is there may lead, and one that comes back is in
sync at once. A partition whose replicas are all away has no leader.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from kcoord.metadata.image import BrokerImage, ImageBuilder, MetadataImage, PartitionImage
from kcoord.metadata.records import (
    NO_LEADER,
    new_fence_record,
    new_leader_record,
    new_unregister_broker_record,
)
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.errors import Errors, KafkaError


def fence_broker(image: MetadataImage, broker_id: int, *, fenced: bool) -> CoordinatorResult[bool]:
    """Takes a broker out of service, or back; the response is whether it is fenced then."""
    broker = _registered(image, broker_id)
    result = CoordinatorResult(fenced)
    if broker.fenced != fenced:
        result.records += _settled_after(image, new_fence_record(broker_id, broker.broker_epoch, fenced=fenced))
    return result


def unregister_broker(image: MetadataImage, broker_id: int) -> CoordinatorResult[None]:
    """Removes a broker until it is started again.

    As in Kafka 4.3.1, the broker may be in service. But the last one in service is refused: nobody could serve anything
    until a restart.
    """
    broker = _registered(image, broker_id)
    if image.alive_brokers() == {broker_id}:
        raise KafkaError(Errors.INVALID_REQUEST, f"Broker ID {broker_id} is the only broker in service")
    return CoordinatorResult(None, _settled_after(image, new_unregister_broker_record(broker_id, broker.broker_epoch)))


def _registered(image: MetadataImage, broker_id: int) -> BrokerImage:
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise KafkaError(Errors.BROKER_ID_NOT_REGISTERED, f"Broker ID {broker_id} is not currently registered")
    return broker


def _settled_after(image: MetadataImage, record: CoordinatorRecord) -> list[CoordinatorRecord]:
    """Returns the record and the changes of leaders and in-sync replicas that follow from it."""
    builder = ImageBuilder(image)
    builder.replay(record)
    return [record, *settle_records(builder.build())]


def settle_records(image: MetadataImage) -> Iterator[CoordinatorRecord]:
    """What makes leaders and in-sync replicas those that the brokers in service can be."""
    alive = image.alive_brokers()
    for topic in image.topics.values():
        for partition in topic.partitions:
            isr, leader = settled(partition, partition.replicas, alive)
            if isr != partition.isr or leader != partition.leader:
                new_leader = leader if leader != partition.leader else None
                yield new_leader_record(topic.id, partition.partition_id, isr, new_leader)


def settled(partition: PartitionImage, replicas: list[int], alive: Collection[int]) -> tuple[list[int], int]:
    """The in-sync ones of a partition's (new) replicas, and its leader: the one of now as long as that can be."""
    isr = [broker_id for broker_id in replicas if broker_id in alive]
    if partition.leader in isr:
        return isr, partition.leader
    return (isr, isr[0]) if isr else ([one for one in partition.isr if one in replicas] or replicas[:1], NO_LEADER)
