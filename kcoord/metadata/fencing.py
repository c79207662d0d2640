# SPDX-License-Identifier: Apache-2.0
"""Brokers that are fenced, which means out of service for a while (KIP-631). Other replicas lead their partitions.

All brokers share one disk, so every replica has all records:

* Any replica in service may lead. The in-sync replicas are the replicas whose brokers are in service.
* A broker that is unfenced is in sync at once. It leads again only partitions that have no leader.
* A partition whose replicas are all fenced has no leader, and keeps its in-sync replicas.

An operation changes the broker and all of its partitions in one batch of records, so no image has one without the
other.
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
    """Fences or unfences a broker. The response says whether it is fenced afterwards."""
    broker = _registered(image, broker_id)
    result = CoordinatorResult(fenced)
    if broker.fenced != fenced:
        result.records += _settled_after(image, new_fence_record(broker_id, broker.broker_epoch, fenced=fenced))
    return result


def unregister_broker(image: MetadataImage, broker_id: int) -> CoordinatorResult[None]:
    """Removes a broker until its next start.

    As in Kafka 4.3.1, the broker may be in service. The last broker in service is rejected, since no partition would
    have a leader until a restart.
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
    """Yields the changes after which leaders and in-sync replicas agree with the brokers in service."""
    alive = image.alive_brokers()
    for topic in image.topics.values():
        for partition in topic.partitions:
            isr, leader = settled(partition, partition.replicas, alive)
            if isr != partition.isr or leader != partition.leader:
                new_leader = leader if leader != partition.leader else None
                yield new_leader_record(topic.id, partition.partition_id, isr, new_leader)


def settled(partition: PartitionImage, replicas: list[int], alive: Collection[int]) -> tuple[list[int], int]:
    """Returns the in-sync subset of `replicas` and the leader. Keeps the current leader if it is still in sync.

    If no replica is in service, there is no leader. The result then has the current in-sync replicas that are among
    `replicas`, or the first of `replicas`.
    """
    isr = [broker_id for broker_id in replicas if broker_id in alive]
    if partition.leader in isr:
        return isr, partition.leader
    return (
        (isr, isr[0])
        if isr
        else ([broker_id for broker_id in partition.isr if broker_id in replicas] or replicas[:1], NO_LEADER)
    )
