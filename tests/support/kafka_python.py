# SPDX-License-Identifier: Apache-2.0
"""Helpers for kafka-python: a member of a classic group that is polled in a thread and commits the polled records.

`python -m tests.support.kafka_python ADDRESS GROUP TOPIC` runs such a member until it is killed. It prints `ready` when
it owns partitions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol

from kafka import ConsumerRebalanceListener, KafkaConsumer
from kafka.errors import CommitFailedError, RebalanceInProgressError

from tests.support.ownership import Ownership, Partition

SESSION_MS = 3000
HEARTBEAT_MS = 300
POLL_MS = 500
"""The timeout of `poll`. It is long because kafka-python 3.0.12 forgets a rebalance in one case: a change of the topics
caused it, not the broker, and the response arrives between two calls of `poll`.
"""


class _TopicPartition(Protocol):
    topic: str
    partition: int


class KafkaPythonMember:
    """A member that subscribes to `topics` or a `pattern`.

    `strategies` are kafka-python's assignor classes; None means its defaults.
    """

    def __init__(
        self,
        address: str,
        group_id: str,
        topics: Sequence[str] = (),
        *,
        pattern: str | None = None,
        instance_id: str | None = None,
        strategies: Sequence[type] | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        self.assigned: set[Partition] = set()
        self.revoked: list[set[Partition]] = []
        self.seen: list[tuple[str, int, int]] = []
        self.ownership = ownership if ownership is not None else Ownership()
        self._ending = threading.Event()
        options = {} if strategies is None else {"partition_assignment_strategy": list(strategies)}
        self._consumer = KafkaConsumer(
            bootstrap_servers=address,
            group_id=group_id,
            group_instance_id=instance_id,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            metadata_max_age_ms=300_000 if pattern is None else 1000,
            **options,
        )
        for topic in topics:
            self._consumer.partitions_for_topic(topic)  # loads the metadata before the join, see POLL_MS
        self._consumer.subscribe(topics=list(topics) or None, pattern=pattern, listener=_Listener(self))
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def __enter__(self) -> KafkaPythonMember:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the consumer. A dynamic member leaves the group. Further calls do nothing."""
        self._ending.set()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the consumer hangs in poll or close"

    def _poll(self) -> None:
        while not self._ending.is_set():
            records = self._consumer.poll(timeout_ms=POLL_MS)
            if records:
                try:
                    self._consumer.commit()
                except (CommitFailedError, RebalanceInProgressError):
                    continue
                for record in (record for batch in records.values() for record in batch):
                    self.seen.append((record.topic, record.partition, record.offset))
        self._consumer.close()


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, member: KafkaPythonMember) -> None:
        self._member = member

    def on_partitions_revoked(self, revoked: Iterable[_TopicPartition]) -> None:
        partitions = {(partition.topic, partition.partition) for partition in revoked}
        self._member.assigned -= partitions
        self._member.revoked.append(partitions)
        self._member.ownership.gave(self._member, partitions)

    def on_partitions_assigned(self, assigned: Iterable[_TopicPartition]) -> None:
        partitions = {(partition.topic, partition.partition) for partition in assigned}
        self._member.ownership.took(self._member, partitions)
        self._member.assigned |= partitions


def main() -> None:
    address, group_id, topic = sys.argv[1:]
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=address,
        group_id=group_id,
        enable_auto_commit=False,
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
    )
    is_ready = False
    while True:
        consumer.poll(timeout_ms=POLL_MS)
        if not is_ready and consumer.assignment():
            is_ready = True
            print("ready", flush=True)


if __name__ == "__main__":
    main()
