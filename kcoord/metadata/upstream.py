# SPDX-License-Identifier: Apache-2.0
"""The topics and brokers of an existing cluster, the upstream, in the metadata log. Pure.

If kcoord coordinates the groups of an upstream, the image has that cluster's topics and brokers, because the group
coordinator needs their ids, partitions and racks. `follow` returns the records that make an image agree with what the
upstream said. Its rules:

* The creation time of a partition is the time at which an instance first saw it (KIP-1327). All instances share these
  times (`kcoord.metadata.shared`). A partition without one is left out.
* A topic is removed, or replaced by a topic of the same name with another id, only if it is among the `gone` topics of
  the snapshot. The removal of a topic deletes its committed offsets, so one response without it proves nothing.
* A topic never loses partitions. A broker of the upstream with older metadata may show fewer.
* Brokers of the upstream are fenced in the image, so no partition of kcoord's own topics is placed on them. They stay
  in the image while they are out of service, because a partition keeps its racks then.
* Internal topics of the upstream are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kcoord.config import BrokerConfig
from kcoord.metadata.bootstrap import feature_records
from kcoord.metadata.image import BrokerImage, MetadataImage, PartitionImage, TopicImage
from kcoord.metadata.records import (
    PARTITION_RECORD_VERSION,
    BrokerRegistration,
    new_register_broker_record,
    new_remove_topic_record,
    new_topic_record,
)
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, INTERNAL_TOPICS
from kcoord_protocol.messages import PartitionRecord, RegisterBrokerRecord
from kcoord_protocol.uuid import ZERO_UUID

UPSTREAM_LISTENER: Final = "UPSTREAM"
"""The listener name of the upstream's brokers. It tells them from kcoord's own broker."""
CreationTimes: TypeAlias = Mapping[bytes, Sequence[int]]
"""The creation times of partitions, by topic id."""
MOST_RECORDS: Final = 10_000
"""Number of records after which one operation ends; the caller then runs another one."""


@dataclass(slots=True, frozen=True)
class UpstreamBroker:
    """A broker of the upstream."""

    broker_id: int
    host: str
    port: int
    rack: str | None


@dataclass(slots=True, frozen=True)
class UpstreamPartition:
    """A partition as a broker of the upstream described it."""

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class UpstreamTopic:
    """A topic of the upstream; `partitions[i]` is partition i."""

    name: str
    id: bytes
    partitions: Sequence[UpstreamPartition]


@dataclass(slots=True, frozen=True)
class UpstreamSnapshot:
    """The state of the upstream. `gone`: topics of the image whose id certainly exists no more."""

    brokers: Sequence[UpstreamBroker]
    topics: Sequence[UpstreamTopic]
    gone: Collection[str] = ()


def has_upstream(image: MetadataImage) -> bool:
    """Returns whether the image has brokers of an upstream."""
    return any(_is_upstream(broker) for broker in image.brokers.values())


def _is_upstream(broker: BrokerImage) -> bool:
    return any(name == UPSTREAM_LISTENER for name, *_ in broker.endpoints)


def join(
    image: MetadataImage,
    config: BrokerConfig,
    registration: BrokerRegistration,
    credentials: Sequence[CoordinatorRecord],
) -> CoordinatorResult[None]:
    """Registers kcoord's broker at its start. A new cluster gets its feature levels and `credentials`.

    Folders of earlier releases have `__consumer_offsets`, whose leaders would decide who owns the groups.
    """
    records = [] if image.features else [*feature_records(config), *credentials]
    offsets_topic = image.topics.get(GROUP_METADATA_TOPIC)
    if offsets_topic is not None:
        records.append(new_remove_topic_record(offsets_topic.id))
    registered = image.brokers.get(registration.broker_id)
    epoch = 0 if registered is None else registered.broker_epoch + 1
    return CoordinatorResult(None, [*records, new_register_broker_record(registration, epoch)])


def follow(image: MetadataImage, snapshot: UpstreamSnapshot, creation_times: CreationTimes) -> CoordinatorResult[bool]:
    """Makes the image agree with the upstream. The response is False if another call has to do the rest."""
    records: list[CoordinatorRecord] = []
    for record in _records(image, snapshot, creation_times):
        # A topic may be cut: the next call adds its other partitions.
        if len(records) == MOST_RECORDS:
            return CoordinatorResult(False, records)
        records.append(record)
    return CoordinatorResult(True, records)


def _records(
    image: MetadataImage, snapshot: UpstreamSnapshot, creation_times: CreationTimes
) -> Iterator[CoordinatorRecord]:
    for broker in snapshot.brokers:
        registered = image.brokers.get(broker.broker_id)
        if registered is None or _has_changed(registered, broker):
            yield _broker_record(broker, 0 if registered is None else registered.broker_epoch + 1)
    present = {topic.name for topic in snapshot.topics}
    for name in sorted(snapshot.gone):
        topic = image.topics.get(name)
        if topic is not None and name not in INTERNAL_TOPICS and name not in present:
            yield new_remove_topic_record(topic.id)
    for upstream in snapshot.topics:
        if upstream.name not in INTERNAL_TOPICS:
            yield from _topic_records(image, upstream, snapshot.gone, creation_times.get(upstream.id, ()))


def _topic_records(
    image: MetadataImage, upstream: UpstreamTopic, gone: Collection[str], times_ms: Sequence[int]
) -> Iterator[CoordinatorRecord]:
    topic = image.topics.get(upstream.name)
    if topic is not None and topic.id != upstream.id:
        if upstream.name not in gone:
            return
        yield new_remove_topic_record(topic.id)
        topic = None
    if topic is None:
        yield new_topic_record(upstream.name, upstream.id)
        topic = TopicImage(upstream.name, upstream.id, [])
    for partition_id, (partition, time_ms) in enumerate(zip(upstream.partitions, times_ms, strict=False)):
        if partition_id >= len(topic.partitions):
            yield _partition_record(upstream.id, partition_id, partition, 0, time_ms)
            continue
        present = topic.partitions[partition_id]
        if _has_moved(present, partition) or present.creation_time_ms != time_ms:
            yield _partition_record(upstream.id, partition_id, partition, present.partition_epoch + 1, time_ms)


def _has_changed(registered: BrokerImage, broker: UpstreamBroker) -> bool:
    return registered.rack != broker.rack or registered.endpoints != [(UPSTREAM_LISTENER, broker.host, broker.port, 0)]


def _has_moved(present: PartitionImage, partition: UpstreamPartition) -> bool:
    """Returns whether leader or replicas differ. In-sync replicas change often, and groups do not depend on them.

    A broker with older metadata shows an older leader epoch.
    """
    return partition.leader_epoch >= present.leader_epoch and (
        present.leader,
        present.leader_epoch,
        present.replicas,
    ) != (
        partition.leader,
        partition.leader_epoch,
        list(partition.replicas),
    )


def _broker_record(broker: UpstreamBroker, broker_epoch: int) -> CoordinatorRecord:
    endpoints = [(UPSTREAM_LISTENER, broker.host, broker.port, 0)]
    registration = BrokerRegistration(broker.broker_id, ZERO_UUID, endpoints, broker.rack, [])
    record = new_register_broker_record(registration, broker_epoch)
    assert isinstance(record.value, RegisterBrokerRecord)
    record.value.fenced = True
    return record


def _partition_record(
    topic_id: bytes, partition_id: int, partition: UpstreamPartition, epoch: int, creation_time_ms: int
) -> CoordinatorRecord:
    value = PartitionRecord(
        partition_id=partition_id,
        topic_id=topic_id,
        replicas=list(partition.replicas),
        isr=list(partition.isr),
        leader=partition.leader,
        leader_epoch=partition.leader_epoch,
        partition_epoch=epoch,
        directories=[ZERO_UUID] * len(partition.replicas),
        creation_time_ms=creation_time_ms,
    )
    return CoordinatorRecord(None, value, PARTITION_RECORD_VERSION)
