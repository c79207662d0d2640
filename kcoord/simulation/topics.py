# SPDX-License-Identifier: Apache-2.0
"""The cluster's metadata as the world around the broker changes it: topics come, grow, go and come again, and groups
get configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType
from typing import Final

from kcoord.coordinator.group.offsets.expiration import GROUP_RETENTION_KEY
from kcoord.metadata.image import GROUP_RESOURCE, TOPIC_RESOURCE
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.controller import Controller
from kcoord.simulation.ledger import CACHED_TOPIC, FLUSHED_TOPIC, RECORD_PARTITIONS
from kcoord.simulation.options import Options
from kcoord_protocol.messages import ConfigRecord, Message, PartitionRecord, RemoveTopicRecord, TopicRecord

FIRST_TOPIC: Final = "topic-0"
LATER_TOPIC: Final = "topic-1"
_MOST_PARTITIONS: Final = 12


class Topics:
    """`names` are all topics that there ever were, by id."""

    def __init__(self, broker: SimulatedBroker, options: Options, controller: Controller) -> None:
        self.names: dict[bytes, str] = {}
        self._broker = broker
        self._options = options
        self._controller = controller

    def begin(self, random: Random) -> None:
        self.create(random, FIRST_TOPIC, self._options.partitions)
        if self._options.record_producers:
            self.create(random, FLUSHED_TOPIC, RECORD_PARTITIONS, {"flush.messages": "1"})
            self.create(random, CACHED_TOPIC, RECORD_PARTITIONS)

    def change(self, random: Random) -> None:
        """The first topic only grows; the later one comes, grows, goes and comes again."""
        self._controller.change(lambda: self._change(random))

    def _change(self, random: Random) -> None:
        topics = self._broker.image.topics
        if LATER_TOPIC not in topics:
            self.create(random, LATER_TOPIC, random.randint(1, 4))
            return
        if random.random() < 0.3:
            self._delete(topics[LATER_TOPIC].id)
            if random.random() < 0.5:
                self.create(random, LATER_TOPIC, random.randint(1, 4))
            return
        topic = topics[random.choice((FIRST_TOPIC, LATER_TOPIC))]
        if len(topic.partitions) < _MOST_PARTITIONS:
            first, count = len(topic.partitions), random.randint(1, 3)
            self._controller.make(
                lambda time_ms: _partitions(topic.id, first, count, time_ms), f"grow {topic.name} {first}"
            )

    def create(
        self, random: Random, name: str, partitions: int, configs: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        topic_id = random.randbytes(16)
        self.names[topic_id] = name
        records: list[Message] = [TopicRecord(name=name, topic_id=topic_id)]
        records += [
            ConfigRecord(resource_type=TOPIC_RESOURCE, resource_name=name, name=key, value=value)
            for key, value in configs.items()
        ]
        self._controller.make(
            lambda time_ms: [*records, *_partitions(topic_id, 0, partitions, time_ms)], f"create {name}"
        )

    def _delete(self, topic_id: bytes) -> None:
        self._controller.publish([RemoveTopicRecord(topic_id=topic_id)], f"delete {topic_id.hex()}")

    def configure(self, random: Random, group_ids: list[str]) -> None:
        """Sessions only get longer: clients here do not ask for them, and rely on the broker's."""
        options = self._options
        name, values = random.choice(
            (
                ("consumer.heartbeat.interval.ms", ("400", "2000", None)),
                ("consumer.session.timeout.ms", (str(options.session_timeout_ms + 5_000), None)),
                (GROUP_RETENTION_KEY, ("2", None)),
                ("consumer.assignment.interval.ms", ("0", "500", None)),
            )
        )
        group_id, value = random.choice(group_ids), random.choice(values)
        record = ConfigRecord(resource_type=GROUP_RESOURCE, resource_name=group_id, name=name, value=value)
        self._controller.publish([record], f"config {group_id} {name}={value}")


def _partitions(topic_id: bytes, first: int, count: int, creation_time_ms: int) -> list[Message]:
    return [
        PartitionRecord(
            partition_id=partition,
            topic_id=topic_id,
            replicas=[1],
            isr=[1],
            leader=1,
            creation_time_ms=creation_time_ms,
        )
        for partition in range(first, first + count)
    ]
