# SPDX-License-Identifier: Apache-2.0
"""librdkafka clients that produce, consume in a group, and run transactions while the broker is killed and started."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from tests.soak.worker import Worker
from tests.support.confluent import consumer_config

QUICK: dict[str, str | int | bool] = {
    "log_level": 2,
    # With recovery, librdkafka 2.16 hangs if all brokers are down for a moment (librdkafka issue 5511).
    "metadata.recovery.strategy": "none",
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 100,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 100,
}
PRODUCE_PAUSE_SECONDS = 0.005
MOST_BEHIND = 2000
CALL_SECONDS = 5.0
READ_SECONDS = 60.0
COMMIT_EVERY = 4
Place = tuple[int, int]
"""(partition, offset)."""


class Records(Worker):
    """An idempotent producer of consecutive numbers. `acknowledged` has the place of each acknowledged number.

    `behind` returns the lag of the consumers in records. If they lag far behind, the producer waits, so that they can
    finish in time.
    """

    def __init__(
        self, address: str, topic: str, partitions: int, seed: int, pause_seconds: float = PRODUCE_PAUSE_SECONDS
    ) -> None:
        super().__init__()
        self.acknowledged: dict[int, Place] = {}
        self.refused: list[str] = []
        self.behind: Callable[[], int] = lambda: 0
        self._topic = topic
        self._partitions = partitions
        self._pause_seconds = pause_seconds
        self._random = random.Random(seed)
        self._producer = Producer(
            {"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 2, **QUICK},
        )

    def _run(self) -> None:
        number = 0
        while not self._ending.wait(self._pause_seconds):
            self._producer.poll(0)
            if self.behind() > MOST_BEHIND:
                continue
            for _ in range(self._random.randint(1, 5)):
                partition = self._random.randrange(self._partitions)
                self._producer.produce(
                    self._topic, str(number).encode(), partition=partition, on_delivery=self._delivered(number)
                )
                number += 1
        assert self._producer.flush(60) == 0

    def _delivered(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        def note(error: KafkaError | None, message: Message) -> None:
            partition, offset = message.partition(), message.offset()
            if error is not None:
                self.refused.append(f"{number}: {error}")
            elif partition is not None and offset is not None:
                self.acknowledged[number] = partition, offset

        return note


class GroupMember(Worker):
    """Consumes in a KIP-848 group and commits some messages. `committed` has the highest acknowledged commits."""

    def __init__(self, address: str, group_id: str, topic: str) -> None:
        super().__init__()
        self.delivered: set[Place] = set()
        self.committed: dict[int, int] = {}
        self._consumer = Consumer(consumer_config(address, group_id) | QUICK)
        self._consumer.subscribe([topic])

    def _run(self) -> None:
        while not self._ending.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error():
                continue
            partition, offset = message.partition(), message.offset()
            assert partition is not None and offset is not None
            self.delivered.add((partition, offset))
            if offset % COMMIT_EVERY:
                continue
            try:
                self._consumer.commit(message=message, asynchronous=False)
            except KafkaException:
                continue
            self.committed[partition] = max(self.committed.get(partition, 0), offset + 1)
        self._consumer.close()


class Transactions(Worker):
    """Transaction n writes n to every partition and commits n as the offset of a group. Its outcome may stay unknown.

    A transaction counts as committed only if the broker has acknowledged each of its records too. `places` has where.
    After an aborted transaction librdkafka 2.16 sometimes ends the next one without sending all of its records, or it
    sends them with the sequence numbers of aborted records: `unsent` returns these transactions.
    """

    def __init__(self, address: str, topic: str, partitions: int, group_id: str, seed: int) -> None:
        super().__init__()
        self.committed: set[int] = set()
        self.aborted: set[int] = set()
        self.unknown: set[int] = set()
        self.places: defaultdict[int, list[Place]] = defaultdict(list)
        self._unacknowledged: set[int] = set()
        self._address = address
        self._topic = topic
        self._partitions = partitions
        self._random = random.Random(seed)
        self._group = Consumer({"bootstrap.servers": address, "group.id": group_id, **QUICK}).consumer_group_metadata()

    def unsent(self, written: Mapping[Place, int]) -> set[int]:
        """Returns the transactions of which librdkafka did not send all records. `written` has aborted records, too.

        A broker takes a record for a duplicate if an earlier one had its sequence number, and names the place of that.
        """
        unsent = set(self._unacknowledged)
        for number, places in self.places.items():
            if any(written.get(place, number) < number for place in places):
                unsent.add(number)
        return unsent - self.aborted

    def _run(self) -> None:
        number = 0
        while not self._ending.is_set():
            producer = Producer({"bootstrap.servers": self._address, "transactional.id": "soak", **QUICK})
            if not self._repeat(lambda producer=producer: producer.init_transactions(CALL_SECONDS)):  # type: ignore[misc]
                continue
            while not self._ending.is_set():
                number += 1
                if not self._one(producer, number):
                    break

    def _one(self, producer: Producer, number: int) -> bool:
        """Runs one transaction. Returns False if the producer cannot continue."""
        producer.begin_transaction()
        for partition in range(self._partitions):
            producer.produce(
                self._topic, str(number).encode(), partition=partition, on_delivery=self._note_delivery(number)
            )
        offsets = [TopicPartition(self._topic, partition, number) for partition in range(self._partitions)]
        sent = self._repeat(lambda: producer.send_offsets_to_transaction(offsets, self._group, CALL_SECONDS))
        if sent and self._random.random() < 0.8:
            self.unknown.add(number)
            if self._repeat(lambda: producer.commit_transaction(CALL_SECONDS)):
                self.unknown.discard(number)
                producer.flush(CALL_SECONDS)
                is_acknowledged = len(self.places[number]) == self._partitions
                (self.committed if is_acknowledged else self._unacknowledged).add(number)
                return True
            # The commit failed permanently. The abort shows whether the transaction is still open.
        if not self._repeat(lambda: producer.abort_transaction(CALL_SECONDS)):
            self.unknown.add(number)
            return False
        self.unknown.discard(number)
        self.aborted.add(number)
        return True

    def _note_delivery(self, number: int) -> Callable[[KafkaError | None, Message], None]:
        def note(error: KafkaError | None, message: Message) -> None:
            partition, offset = message.partition(), message.offset()
            if error is None and partition is not None and offset is not None:
                self.places[number].append((partition, offset))

        return note

    def _repeat(self, call: Callable[[], object]) -> bool:
        """Retries `call` until it succeeds. Returns False if the transaction must be aborted or the producer failed."""
        while True:
            try:
                call()
            except KafkaException as failure:
                error = failure.args[0]
                if error.retriable() and not error.fatal() and not error.txn_requires_abort():
                    continue
                return False
            return True


def read_all(address: str, topic: str, partitions: int, isolation_level: str = "read_committed") -> dict[Place, int]:
    """Returns place -> number of every record that a consumer with this isolation level gets, in order."""
    consumer = Consumer(
        {"bootstrap.servers": address, "group.id": "reader", "isolation.level": isolation_level, **QUICK}
        | {"enable.partition.eof": True, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    numbers: dict[Place, int] = {}
    ended: set[int] = set()

    deadline = time.monotonic() + READ_SECONDS
    try:
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"{topic} has no end within {READ_SECONDS:g} s"
            message = consumer.poll(1.0)
            if message is None:
                continue
            error, partition, offset, value = message.error(), message.partition(), message.offset(), message.value()
            if error is not None and error.code() == KafkaError._PARTITION_EOF:
                assert partition is not None
                ended.add(partition)
            elif error is None and partition is not None and offset is not None and isinstance(value, bytes):
                numbers[partition, offset] = int(value)
    finally:
        consumer.close()
    return numbers
