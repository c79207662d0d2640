# SPDX-License-Identifier: Apache-2.0
"""The placement of partitions on brokers.

Partitions go to the brokers in turn, and each topic begins with another broker. Racks alternate if possible. The
partitions of the coordinators' topics are always placed by their number, so that the coordinators are spread evenly.

Replicas beyond the first are nominal, since all brokers are processes on one machine and share one disk. They are
checked and reported as in Kafka.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kcoord.metadata import records
from kcoord.metadata.collect import duplicates
from kcoord.metadata.image import BrokerImage, MetadataImage, TopicImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig

COORDINATOR_TOPICS: Final = frozenset((GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC))


class Placement:
    """The brokers of an image, in the order in which they get partitions.

    `default_broker` is used if the image has no brokers.
    """

    def __init__(self, brokers: Mapping[int, BrokerImage], default_broker: int) -> None:
        self._racks = {broker_id: broker.rack for broker_id, broker in sorted(brokers.items())}
        self._alive = [broker_id for broker_id in self._racks if not brokers[broker_id].fenced]
        self.broker_ids: list[int] = list(self._racks) or [default_broker]

    def spread(self, topic: str, first: int, start: int, count: int, replication_factor: int) -> list[list[int]]:
        """Returns the replicas of partitions `first`, `first` + 1, ...

        `start` is the position of the broker with which a topic begins.
        """
        # Brokers that are out of service get new partitions only if too few brokers are in service.
        able = self._alive if 0 < replication_factor <= len(self._alive) else self.broker_ids
        if topic in COORDINATOR_TOPICS:
            start, ring = first, able
        else:
            ring = self._alternating(able)
        cycle = [self._replicas(ring, start + position, replication_factor) for position in range(len(ring))]
        return [cycle[position % len(cycle)] for position in range(count)]

    def _replicas(self, ring: Sequence[int], start: int, count: int) -> list[int]:
        """Returns `count` brokers. Prefers brokers whose rack has no replica of the partition yet."""
        order = [ring[(start + step) % len(ring)] for step in range(len(ring))]
        chosen = order[:1]
        while len(chosen) < count:
            used = {self._racks.get(broker_id) for broker_id in chosen}
            left = [broker_id for broker_id in order if broker_id not in chosen]
            chosen.append(next((broker_id for broker_id in left if self._racks.get(broker_id) not in used), left[0]))
        return chosen

    def _alternating(self, broker_ids: Sequence[int]) -> list[int]:
        """Returns the brokers in an order in which racks alternate: the first of each rack, the second of each, ..."""
        by_rack: dict[str | None, list[int]] = {}
        for broker_id in broker_ids:
            by_rack.setdefault(self._racks.get(broker_id), []).append(broker_id)
        longest = max(len(members) for members in by_rack.values())
        return [members[row] for row in range(longest) for members in by_rack.values() if row < len(members)]

    def check_replication_factor(self, count: int) -> None:
        """Raises INVALID_REPLICATION_FACTOR, with Kafka's text, if there are too few brokers."""
        brokers = len(self.broker_ids)
        if count > brokers:
            raise KafkaError(
                Errors.INVALID_REPLICATION_FACTOR,
                f"Unable to replicate the partition {count} time(s): The target replication factor of {count} cannot "
                f"be reached because only {brokers} broker(s) are registered or some brokers have all their log "
                "directories cordoned.",
            )

    def check_replicas(self, broker_ids: Sequence[int]) -> None:
        """Raises INVALID_REPLICA_ASSIGNMENT, with Kafka's texts, if these cannot be the replicas of a partition."""
        if not broker_ids:
            raise KafkaError(
                Errors.INVALID_REPLICA_ASSIGNMENT, "The manual partition assignment includes an empty replica list."
            )
        repeated = duplicates(broker_ids)
        if repeated:
            raise KafkaError(
                Errors.INVALID_REPLICA_ASSIGNMENT,
                f"The manual partition assignment includes the broker {min(repeated)} more than once.",
            )
        for broker_id in broker_ids:
            if broker_id not in self.broker_ids:
                raise KafkaError(
                    Errors.INVALID_REPLICA_ASSIGNMENT,
                    f"The manual partition assignment includes broker {broker_id}, but no such broker is registered.",
                )

    def default_replication_factor(self, topic: str, config: BrokerConfig) -> int:
        """Returns the configured replication factor, at most the number of brokers."""
        factor = config.default_replication_factor
        if topic == GROUP_METADATA_TOPIC:
            factor = config.offsets_topic_replication_factor
        elif topic == TRANSACTION_STATE_TOPIC:
            factor = config.transaction_state_log_replication_factor
        return max(1, min(factor, len(self.broker_ids)))


def partition_records(
    image: MetadataImage, topic_id: bytes, first: int, assignment: Sequence[list[int]], creation_time_ms: int
) -> list[CoordinatorRecord]:
    """Returns the records of new partitions with these replicas. The replicas in service are in sync."""
    alive = image.alive_brokers() if image.brokers else None
    # Many partitions have the same replicas. Their records share the lists.
    lists: dict[tuple[int, ...], tuple[list[bytes], list[int]]] = {}
    created = []
    for partition_id, replicas in enumerate(assignment, first):
        key = tuple(replicas)
        if key not in lists:
            lists[key] = directories_of(image, replicas), _able(replicas, alive)
        directories, isr = lists[key]
        created.append(
            records.new_partition_record(topic_id, partition_id, replicas, directories, creation_time_ms, isr=isr)
        )
    return created


def move_records(image: MetadataImage, default_broker: int) -> list[CoordinatorRecord]:
    """Returns the records that spread all partitions over the brokers of the image again.

    They are needed after the set of brokers has changed.
    """
    placement = Placement(image.brokers, default_broker)
    moved: list[CoordinatorRecord] = []
    for start, topic in enumerate(image.topics.values()):
        moved += _moves_of(image, placement, topic, start)
    return moved


def _moves_of(image: MetadataImage, placement: Placement, topic: TopicImage, start: int) -> list[CoordinatorRecord]:
    factor = max((len(partition.replicas) for partition in topic.partitions), default=1)
    factor = min(factor, len(placement.broker_ids))
    assignment = placement.spread(topic.name, 0, start, len(topic.partitions), factor)
    return [
        records.new_partition_change_record(
            topic.id,
            partition.partition_id,
            replicas,
            directories_of(image, replicas),
            partition.leader,
        )
        for partition, replicas in zip(topic.partitions, assignment, strict=True)
        if replicas != partition.replicas or replicas[0] != partition.leader
    ]


def _able(replicas: list[int], alive: Collection[int] | None) -> list[int]:
    return replicas if alive is None else [broker_id for broker_id in replicas if broker_id in alive]


def directories_of(image: MetadataImage, replicas: Iterable[int]) -> list[bytes]:
    """Returns the ids of the folders in which the brokers keep their replicas."""
    return [_directory_of(image, broker_id) for broker_id in replicas]


def _directory_of(image: MetadataImage, broker_id: int) -> bytes:
    broker = image.brokers.get(broker_id)
    return broker.log_dirs[0] if broker is not None and broker.log_dirs else ZERO_UUID
