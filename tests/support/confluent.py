# SPDX-License-Identifier: Apache-2.0
"""Helpers for confluent-kafka: a consumer that is polled in a thread, and functions to create topics and messages."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Protocol

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.ownership import Ownership, Partition
from tests.support.waiting import wait_until

LOST_RACES = (
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._ASSIGNMENT_LOST,
)
"""The errors of a commit while its partition moves to another member."""


class Owner(Protocol):
    """A group member of any client library."""

    @property
    def assigned(self) -> set[Partition]: ...


def partitions_of(topic: str, count: int) -> set[Partition]:
    return {(topic, partition) for partition in range(count)}


def consumer_config(
    address: str, group_id: str, instance_id: str | None = None, classic: str | None = None
) -> dict[str, str | int | bool]:
    config: dict[str, str | int | bool] = {
        "bootstrap.servers": address,
        "group.id": group_id,
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "topic.metadata.refresh.interval.ms": 1000,
        "reconnect.backoff.max.ms": 500,
    }
    if instance_id is not None:
        config["group.instance.id"] = instance_id
    if classic is not None:
        config |= {"group.protocol": "classic", "partition.assignment.strategy": classic}
        config |= {"session.timeout.ms": 3000, "heartbeat.interval.ms": 300}
    return config


def create_topic(address: str, topic: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(20)


def produce(address: str, topic: str, partitions: int, per_partition: int) -> None:
    """Produces `per_partition` messages to each of the first `partitions` partitions. Values are `partition:number`."""
    producer = Producer({"bootstrap.servers": address, "linger.ms": 5})
    for partition in range(partitions):
        for number in range(per_partition):
            producer.produce(topic, f"{partition}:{number}".encode(), partition=partition)
    assert producer.flush(20) == 0


class PolledConsumer:
    """A group member that is polled in a thread. It uses KIP-848 unless `classic` names an assignment strategy.

    With `commit_each` a message counts as seen only after its commit. If the commit fails because the partition moves
    to another member, the message does not count as seen.
    """

    def __init__(
        self,
        address: str,
        group_id: str,
        topics: Sequence[str],
        *,
        instance_id: str | None = None,
        commit_each: bool = False,
        classic: str | None = None,
        ownership: Ownership | None = None,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.assigned: set[Partition] = set()
        self.assignments: list[tuple[str, set[Partition]]] = []
        self.seen: list[tuple[str, int, int]] = []
        self.errors: list[str] = []
        self._ownership = ownership if ownership is not None else Ownership()
        self._commit_each = commit_each
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self.consumer = Consumer({**consumer_config(address, group_id, instance_id, classic), **settings})
        self.consumer.subscribe(
            list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_revoke
        )
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def __enter__(self) -> PolledConsumer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the group. Further calls do nothing."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(20)
            assert not self._thread.is_alive(), "the consumer hangs in poll or close"

    def _on_assign(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        with self._lock:
            added = {(partition.topic, partition.partition) for partition in partitions}
            self._ownership.took(self, added)
            self.assigned |= added
            self.assignments.append(("assigned", added))

    def _on_revoke(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        with self._lock:
            removed = {(partition.topic, partition.partition) for partition in partitions}
            self._ownership.gave(self, removed)
            self.assigned -= removed
            self.assignments.append(("revoked", removed))

    def _poll(self) -> None:
        while not self._ending.is_set():
            message = self.consumer.poll(0.1)
            if message is None:
                continue
            error = message.error()
            if error:
                if error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                    self.errors.append(str(error))
                continue
            topic, partition, offset = message.topic(), message.partition(), message.offset()
            assert topic is not None and partition is not None and offset is not None
            if self._commit_each and not self._commit(message):
                continue
            self.seen.append((topic, partition, offset))
        self.consumer.close()

    def _commit(self, message: Message) -> bool:
        try:
            self.consumer.commit(message=message, asynchronous=False)
        except KafkaException as failure:
            error = failure.args[0]
            if error.code() not in LOST_RACES:
                self.errors.append(str(error))
            return False
        return True

    def wait_for(self, count: int, seconds: float = 20.0) -> None:
        wait_until(lambda: len(self.seen) >= count, f"{count} messages, there are {len(self.seen)}", seconds)


def wait_for_split(members: Sequence[Owner], partitions: set[Partition], seconds: float = 20.0) -> None:
    """Waits until the members own all `partitions` in a balanced way, each partition once."""

    def is_split() -> bool:
        owned = [set(member.assigned) for member in members]
        sizes = [len(assigned) for assigned in owned]
        return sum(sizes) == len(partitions) and set().union(*owned) == partitions and max(sizes) - min(sizes) <= 1

    wait_until(is_split, f"a balanced assignment of {len(partitions)} partitions", seconds)


def committed(address: str, group_id: str, partitions: Sequence[Partition]) -> dict[Partition, int]:
    """Returns the committed offsets, read by a consumer outside of the group."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": group_id})
    try:
        offsets = consumer.committed([TopicPartition(*partition) for partition in partitions], timeout=10)
        return {(offset.topic, offset.partition): offset.offset for offset in offsets}
    finally:
        consumer.close()
