# SPDX-License-Identifier: Apache-2.0
"""Two instances in front of an upstream, with applications that process exactly once, and what happens to them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from confluent_kafka import Consumer, TopicPartition

from tests.exactly_once.applications import COPY, STREAMS, JavaApplication
from tests.exactly_once.topics import PARTITIONS, Numbers, Reader, check_copy, check_counts, create_topics
from tests.support.kafka_broker import free_port_pair
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

INSTANCES = 2
SESSION_MS = 2_000
PROGRESS_SECONDS = 120.0
SOURCE = "numbers"
STREAMS_ID = "streams"


class Upstream(Protocol):
    """The cluster behind the instances. The brokers have the ids from 1 on."""

    ports: list[int]

    @property
    def address(self) -> str: ...
    def start(self, number: int) -> None: ...
    def kill(self, number: int) -> None: ...


class KcoordUpstream:
    """A kcoord as upstream."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        settings = {**FAST, "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"}
        self._process = KcoordProcess(folder, settings).start()
        self.ports = [self._process.port]

    @property
    def address(self) -> str:
        return self._process.address

    def start(self, _: int) -> None:
        self._process.start()

    def kill(self, _: int = 1) -> None:
        self._process.kill()


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a test. `copies`: the number of applications that copy the numbers, for each group protocol."""

    copies: int
    protocols: Sequence[str]
    per_second: int
    rounds: int
    pauses: bool


SHORT = Size(copies=1, protocols=("consumer",), per_second=200, rounds=1, pauses=False)
LONG = Size(copies=2, protocols=("classic", "consumer"), per_second=300, rounds=6, pauses=True)


def configured_size() -> Size:
    """Returns the size that this run has: `make exactly-once` sets EXACTLY_ONCE=long."""
    return LONG if os.environ.get("EXACTLY_ONCE") == "long" else SHORT


class Stage:
    """Everything that runs in a test, except for the upstream."""

    def __init__(self, folder: Path, upstream: Upstream) -> None:
        self.size = configured_size()
        self._folder = folder
        self._upstream = upstream
        self._instances = [self._instance(number) for number in range(INSTANCES)]
        self._copies = {f"copy-{protocol}": protocol for protocol in self.size.protocols}
        self._targets = [*self._copies, STREAMS_ID]

    def _instance(self, number: int) -> KcoordProcess:
        folder = self._folder / f"instance{number}"
        folder.mkdir()
        ports = (f"{broker}:{free_port_pair()}" for broker, _ in enumerate(self._upstream.ports, 1))
        return KcoordProcess(
            folder,
            {
                **FAST,
                "node.id": str(1_000_000 + number),
                "kcoord.upstream.bootstrap.servers": self._upstream.address,
                "kcoord.upstream.ports": ",".join(ports),
                "kcoord.upstream.session.timeout.ms": str(SESSION_MS),
                "kcoord.upstream.heartbeat.interval.ms": "200",
            },
        )

    @property
    def address(self) -> str:
        return ",".join(instance.address for instance in self._instances)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts instances, numbers and applications. All of them process numbers when this yields."""
        with ExitStack() as stack:
            for instance in self._instances:
                stack.callback(_stop_instance, instance)
            with ThreadPoolExecutor() as threads:
                list(threads.map(KcoordProcess.start, self._instances))
            create_topics(self.address, SOURCE, *self._targets)
            self._numbers = stack.enter_context(Numbers(self._upstream.address, SOURCE, self.size.per_second))
            self._reader = stack.enter_context(Reader(self._upstream.address, self._targets))
            self._applications = [stack.enter_context(application) for application in self._make_applications()]
            self._until_progress("start")
            yield

    def _make_applications(self) -> Iterator[JavaApplication]:
        for number in range(self.size.copies):
            for group, protocol in self._copies.items():
                name = f"{group}-{number}"
                yield JavaApplication(
                    COPY, (self.address, SOURCE, group, group, name, protocol), self._folder / f"{name}.txt"
                )
            name = f"{STREAMS_ID}-{number}"
            state = str(self._folder / name)
            yield JavaApplication(
                STREAMS, (self.address, SOURCE, STREAMS_ID, STREAMS_ID, state), self._folder / f"{name}.txt"
            )

    def _until_progress(self, event: str) -> None:
        """Waits until every application has processed a number that is written after now."""
        written = self._numbers.written
        begun = time.monotonic()
        seconds: dict[str, float] = {}

        def is_ahead() -> bool:
            for topic, number in self._reader.counts().items():
                if number > written:
                    seconds.setdefault(topic, time.monotonic() - begun)
            return len(seconds) == len(self._targets)

        wait_until(is_ahead, f"progress of all applications after {event}; logs: {self._folder}", PROGRESS_SECONDS)
        print(event, *(f"{topic} goes on after {number:.1f} s" for topic, number in seconds.items()), sep=", ")

    # What happens.

    def round(self) -> None:
        """Kills one process of each kind, one after the other, and starts it again."""
        events = [self._lose_application, self._lose_instance, self._lose_broker]
        if self.size.pauses:
            events += [self._pause_application, self._pause_instance]
        for event in random.sample(events, len(events)):
            time.sleep(random.uniform(0.2, 1.0))
            event()

    def _lose_application(self) -> None:
        for application in self._applications if self.size is SHORT else [random.choice(self._applications)]:
            application.kill()
            application.start()
        self._until_progress("kill -9 of an application")

    def _lose_instance(self) -> None:
        victim = random.choice(self._instances)
        victim.kill()
        self._until_progress("kill -9 of an instance")
        victim.start()

    def _lose_broker(self) -> None:
        broker = random.randint(1, len(self._upstream.ports))
        self._upstream.kill(broker)
        if len(self._upstream.ports) > 1:
            self._until_progress("kill -9 of a broker")
        self._upstream.start(broker)
        self._until_progress("the start of a broker")

    def _pause_application(self) -> None:
        """The application stands still for longer than its session and its transaction."""
        self._pause(random.choice(self._applications).pid, 7.0)
        self._until_progress("SIGSTOP of an application")

    def _pause_instance(self) -> None:
        """Another instance takes its groups. The victim then finds requests of clients."""
        self._pause(random.choice(self._instances).pid, SESSION_MS / 1000 + 2)
        self._until_progress("SIGSTOP of an instance")

    @staticmethod
    def _pause(pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    # The end.

    def judge(self) -> None:
        """Stops the numbers. Fails unless each one was processed exactly once."""
        self._numbers.finish()
        written = self._numbers.written
        wait_until(
            lambda: all(number >= written for number in self._reader.counts().values()),
            f"all {written} numbers are processed; logs: {self._folder}",
            PROGRESS_SECONDS,
        )
        print(f"{written} numbers are processed")
        with Reader(self._upstream.address, [SOURCE, *self._targets]) as reader:
            wait_until(lambda: all(number >= written for number in reader.counts().values()), "all topics are read")
            rows = reader.rows
        assert sum(map(len, rows[SOURCE].values())) == written
        for topic in self._copies:
            check_copy(rows[SOURCE], rows[topic])
        check_counts(rows[SOURCE], rows[STREAMS_ID])
        ends = {partition: len(rows[SOURCE][partition]) for partition in range(PARTITIONS)}
        for group in self._targets:
            wait_until(partial(self._has_committed, group, ends), f"the offsets of {group} are {ends}")

    def _has_committed(self, group: str, offsets: Mapping[int, int]) -> bool:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group})
        try:
            places = consumer.committed([TopicPartition(SOURCE, number) for number in offsets], timeout=10)
        finally:
            consumer.close()
        return {place.partition: place.offset for place in places} == offsets


def _stop_instance(instance: KcoordProcess) -> None:
    if instance.is_running:
        os.kill(instance.pid, signal.SIGCONT)
    instance.kill()
