# SPDX-License-Identifier: Apache-2.0
"""The numbers that applications process, and the topics that they write."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Self

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

PARTITIONS = 3
KEYS = 20
FLUSH_SECONDS = 60.0
CREATE_SECONDS = 30

Row = tuple[str, str]
"""A key and a value."""
Rows = Mapping[int, Sequence[Row]]
"""Records by partition."""


def create_topics(address: str, topics: Iterable[str]) -> None:
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

    def __init__(self, address: str, topics: Iterable[str]) -> None:
        self.rows: dict[str, defaultdict[int, list[Row]]] = {topic: defaultdict(list) for topic in topics}
        self._different: dict[str, set[Row]] = {topic: set() for topic in topics}
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

    def read(self, seconds: float = 0.1) -> bool:
        """Reads the next records. Returns False if there are none."""
        messages = [message for message in self._consumer.consume(10_000, seconds) if message.error() is None]
        for message in messages:
            self._take(message)
        return bool(messages)

    def counts(self) -> dict[str, int]:
        """Returns the number of different records that were read from each topic."""
        return {topic: len(rows) for topic, rows in self._different.items()}

    def _take(self, message: Message) -> None:
        topic, partition = message.topic(), message.partition()
        assert topic is not None and partition is not None
        row = ((message.key() or b"").decode(), (message.value() or b"").decode())
        self.rows[topic][partition].append(row)
        self._different[topic].add(row)
