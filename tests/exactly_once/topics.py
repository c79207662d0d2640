# SPDX-License-Identifier: Apache-2.0
"""The numbers that applications process, and what they make of them."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Self

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

PARTITIONS = 3
KEYS = 20
FLUSH_SECONDS = 60.0
CREATE_SECONDS = 30

Rows = Mapping[int, Sequence[tuple[str, str]]]
"""Keys and values by partition."""


def create_topics(address: str, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": address})
    for future in admin.create_topics([NewTopic(topic, PARTITIONS) for topic in topics]).values():
        future.result(CREATE_SECONDS)


class Numbers:
    """Writes the numbers from 0 on to a topic, until the end of `with`. Number N has the key N modulo KEYS."""

    def __init__(self, address: str, topic: str, per_second: int) -> None:
        self._producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, "linger.ms": 5})
        self._topic = topic
        self._pause_seconds = 1 / per_second
        self._errors: list[KafkaError] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self.written = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def finish(self) -> None:
        """Writes no more. Fails if a number was not written."""
        self.__exit__()
        assert self._producer.flush(FLUSH_SECONDS) == 0
        assert not self._errors, self._errors[:3]

    def _write(self) -> None:
        for number in count():
            if self._ending.wait(self._pause_seconds):
                return
            key, partition = str(number % KEYS), number % KEYS % PARTITIONS
            self._producer.produce(self._topic, str(number), key, partition, on_delivery=self._delivered)
            self._producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: Message) -> None:
        if error is None:
            self.written += 1
        else:
            self._errors.append(error)


class Reader:
    """Reads what was committed to topics, from their beginning on."""

    def __init__(self, address: str, topics: Sequence[str]) -> None:
        self.rows: dict[str, defaultdict[int, list[tuple[str, str]]]] = {topic: defaultdict(list) for topic in topics}
        self._consumer = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": "unused",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
            }
        )
        self._consumer.assign([TopicPartition(topic, number, 0) for topic in topics for number in range(PARTITIONS)])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def counts(self) -> dict[str, int]:
        """Reads the next records, if there are any, and returns the number of those read so far in each topic."""
        for message in self._consumer.consume(10_000, 0.1):
            if message.error() is None:
                self._take(message)
        return {topic: sum(map(len, partitions.values())) for topic, partitions in self.rows.items()}

    def _take(self, message: Message) -> None:
        topic, partition = message.topic(), message.partition()
        assert topic is not None and partition is not None
        key, value = message.key(), message.value()
        self.rows[topic][partition].append(((key or b"").decode(), (value or b"").decode()))


def check_copy(source: Rows, target: Rows) -> None:
    """Fails unless each record was copied exactly once, in order."""
    for partition in range(PARTITIONS):
        expected, copied = source[partition], target[partition]
        wrong = [place for place, pair in enumerate(zip(expected, copied, strict=False)) if pair[0] != pair[1]]
        assert not wrong, (
            f"partition {partition}: {copied[wrong[0] :][:3]} for {expected[wrong[0] :][:3]} at {wrong[0]}"
        )
        assert len(copied) == len(expected)


def check_counts(source: Rows, target: Rows) -> None:
    """Fails unless each record was counted exactly once."""
    numbers: defaultdict[str, int] = defaultdict(int)
    for rows in source.values():
        for key, _ in rows:
            numbers[key] += 1
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for rows in target.values():
        for key, value in rows:
            counts[key].append(int(value))
    assert counts == {key: list(range(1, number + 1)) for key, number in numbers.items()}
