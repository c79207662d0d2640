# SPDX-License-Identifier: Apache-2.0
"""Clients that change committed offsets in many ways, and the ledger of what the broker acknowledged.

Each commit of a group has an offset of its own, so the ledger and the lake can be compared. Clients expect that brokers
are killed: a request that fails is not in the ledger, and may or may not be in the log.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from kcoord.client.admin.client import AdminClient
from kcoord.client.errors import ClientException
from kcoord.client.types import TopicPartition as Partition
from kcoord_protocol.errors import KafkaError
from tests.support.confluent import consumer_config

TOPIC: Final = "orders"
PARTITIONS: Final = 4
COMMITTERS: Final = 4
TRANSACTORS: Final = 2
MOVERS: Final = 2
_QUIET: Final = {
    "log_level": 0,
    "reconnect.backoff.ms": 500,
    # With recovery, librdkafka 2.16 waits for ever for a group coordinator whose connection it has given up (librdkafka
    # issue 5511): `send_offsets_to_transaction` does not return, whatever its timeout is.
    "metadata.recovery.strategy": "none",
}
_PAUSE_SECONDS: Final = 0.05
_REQUEST_MS: Final = 5000
_MEMBER_SECONDS: Final = 3.0
_STOP_SECONDS: Final = 120.0


class Commit(NamedTuple):
    """A committed offset."""

    group: str
    partition: int
    offset: int


@dataclass(slots=True)
class Ledger:
    """What the broker acknowledged. `deleted` counts the tombstones that acknowledged deletions wrote at least."""

    committed: list[Commit] = field(default_factory=list)
    aborted: list[Commit] = field(default_factory=list)
    deleted: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    joins: int = 0
    failures: int = 0
    hanging: int = 0
    """Clients that did not end."""


class Crowd:
    """The clients, each in a thread of its own, until the block ends."""

    def __init__(self, address: str, seed: int) -> None:
        self._address = address
        self._random = Random(seed)
        self._stopping = threading.Event()
        self.ledger = Ledger()

    @contextmanager
    def running(self) -> Iterator[None]:
        jobs: list[Callable[[], None]] = [
            *(self._job(self._commit, f"commit-{number}") for number in range(COMMITTERS)),
            *(self._job(self._transact, f"transact-{number}") for number in range(TRANSACTORS)),
            *(self._job(self._move, f"move-{number}") for number in range(MOVERS)),
            self._job(self._reset, "reset"),
        ]
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            end = time.monotonic() + _STOP_SECONDS
            for thread in threads:
                thread.join(max(end - time.monotonic(), 0))
            self.ledger.hanging = sum(thread.is_alive() for thread in threads)

    def _job(self, work: Callable[[str], None], group: str) -> Callable[[], None]:
        """Repeats a client until the end. A client ends at an error, and a new one takes its place."""

        def run() -> None:
            while not self._stopping.is_set():
                try:
                    work(group)
                except (KafkaException, KafkaError, ClientException):
                    self.ledger.failures += 1
                    self._stopping.wait(1)

        return run

    def _numbers(self) -> Iterator[int]:
        """Yields numbers that no other client gets, until the end."""
        while not self._stopping.wait(_PAUSE_SECONDS):
            yield next(_NUMBERS)

    def _consumer(self, group: str, classic: str | None = "range") -> Consumer:
        return Consumer({**consumer_config(self._address, group, classic=classic), **_QUIET})

    def _commit(self, group: str) -> None:
        consumer = self._consumer(group)
        try:
            for number in self._numbers():
                place = Commit(group, number % PARTITIONS, number)
                consumer.commit(offsets=[TopicPartition(TOPIC, place.partition, number)], asynchronous=False)
                self.ledger.committed.append(place)
        finally:
            consumer.close()

    def _transact(self, group: str) -> None:
        """Commits in transactions. Every third transaction is aborted."""
        consumer = self._consumer(group)
        producer = Producer({"bootstrap.servers": self._address, "transactional.id": group, **_QUIET})
        try:
            producer.init_transactions(30)
            for number in self._numbers():
                place = Commit(group, number % PARTITIONS, number)
                producer.begin_transaction()
                offsets = [TopicPartition(TOPIC, place.partition, number)]
                producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 10)
                if number % 3:
                    producer.commit_transaction(10)
                    self.ledger.committed.append(place)
                else:
                    producer.abort_transaction(10)
                    self.ledger.aborted.append(place)
        finally:
            consumer.close()

    def _move(self, group: str) -> None:
        """Members join and leave. The group moves between the classic and the consumer protocol."""
        classic = self._random.choice((None, "range"))
        members = [self._consumer(group, classic) for _ in range(2)]
        try:
            for member in members:
                member.subscribe([TOPIC])
            for _ in range(int(_MEMBER_SECONDS / 0.1)):
                for member in members:
                    member.poll(0.05)
            self.ledger.joins += len(members)
        finally:
            for member in members:
                member.close()

    def _reset(self, group: str) -> None:
        """Sets offsets, sets them back, and deletes offsets and groups."""

        async def run() -> None:
            async with AdminClient(bootstrap_servers=self._address, default_api_timeout_ms=_REQUEST_MS) as admin:
                for number in self._numbers():
                    place = Partition(TOPIC, number % PARTITIONS)
                    for offset in (number, -number % 1_000_000_000):
                        (await admin.alter_consumer_group_offsets(group, {place: offset})).all()
                        self.ledger.committed.append(Commit(group, place.partition, offset))
                    if number % 2:
                        (await admin.delete_consumer_group_offsets(group, [place])).all()
                    else:
                        (await admin.delete_consumer_groups([group])).all()
                    self.ledger.deleted[group] += 1

        asyncio.run(run())


_NUMBERS: Final = itertools.count(1)
