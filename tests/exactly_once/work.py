# SPDX-License-Identifier: Apache-2.0
"""The work of applications: a topic of numbers, and the topics that they make of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Self

from confluent_kafka import Consumer, TopicPartition

from tests.exactly_once.checks import Check
from tests.exactly_once.topics import PARTITIONS, Numbers, Reader, create_topics
from tests.support.waiting import wait_until

PROGRESS_SECONDS = 120.0
SOURCE = "numbers"


class Work:
    """Writes numbers until the end of `with`.

    `checks` are those of the topics that applications write. Such a topic has the name of the group that reads the
    numbers. `address` is that of the instances. `log` says where the logs are.
    """

    def __init__(self, address: str, upstream: str, per_second: int, checks: Mapping[str, Check], log: object) -> None:
        self._address = address
        self._upstream = upstream
        self._per_second = per_second
        self._checks = checks
        self._log = log
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        create_topics(self._address, [SOURCE, *self._checks])
        self._numbers = self._stack.enter_context(Numbers(self._address, SOURCE, self._per_second))
        self._reader = self._stack.enter_context(Reader(self._upstream, self._checks))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def until_progress(self, event: str) -> dict[str, float]:
        """Waits until every application has processed a number that is written after now.

        Returns the seconds that each of them took.
        """
        written = self._numbers.written
        begun = time.monotonic()
        seconds: dict[str, float] = {}

        def is_ahead() -> bool:
            self._reader.read()
            for topic, number in self._reader.counts().items():
                if number > written:
                    seconds.setdefault(topic, time.monotonic() - begun)
            return len(seconds) == len(self._checks)

        try:
            wait_until(is_ahead, f"progress of all applications after {event}; logs: {self._log}", PROGRESS_SECONDS)
        finally:
            print(event, *(f"{topic} goes on after {number:.1f} s" for topic, number in seconds.items()), sep=", ")
        return seconds

    def judge(self) -> None:
        """Writes no more numbers. Fails unless each one was processed, and each group has committed the end."""
        self._numbers.finish()
        written = self._numbers.written

        def is_done() -> bool:
            self._reader.read()
            return all(number >= written for number in self._reader.counts().values())

        wait_until(is_done, f"all {written} numbers are processed; logs: {self._log}", PROGRESS_SECONDS)
        with Reader(self._upstream, [SOURCE, *self._checks]) as reader:
            # Applications have nothing to write any more, so this ends.
            wait_until(lambda: not reader.read(2.0) and reader.counts()[SOURCE], "all topics are read")
            rows = reader.rows
        assert sum(map(len, rows[SOURCE].values())) == written
        for topic, check in self._checks.items():
            check(rows[SOURCE], rows[topic])
            print(f"{topic}: {written} numbers, {sum(map(len, rows[topic].values()))} records")
        ends = {partition: len(rows[SOURCE][partition]) for partition in range(PARTITIONS)}
        for group in self._checks:
            wait_until(partial(self._has_committed, group, ends), f"the offsets of {group} are {ends}")

    def _has_committed(self, group: str, offsets: Mapping[int, int]) -> bool:
        consumer = Consumer({"bootstrap.servers": self._address, "group.id": group})
        try:
            places = consumer.committed([TopicPartition(SOURCE, number) for number in offsets], timeout=10)
        finally:
            consumer.close()
        return {place.partition: place.offset for place in places} == offsets
