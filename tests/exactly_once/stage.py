# SPDX-License-Identifier: Apache-2.0
"""Two instances in front of an upstream, with applications that process exactly once, and what happens to them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.exactly_once.applications import Application, copy_command, streams_command
from tests.exactly_once.checks import Check, check_copy, check_counts
from tests.exactly_once.instances import SESSION_MS, Upstream, address_of, running_instances
from tests.exactly_once.work import Work

STREAMS_ID = "streams"
_TRANSACTION = (
    "transaction.timeout.ms=5000",
    "request.timeout.ms=5000",
    "delivery.timeout.ms=15000",
    "max.block.ms=15000",
)
_SESSION = ("session.timeout.ms=3000", "heartbeat.interval.ms=300")
QUICK_COPY = {"classic": (*_TRANSACTION, *_SESSION), "consumer": _TRANSACTION}
QUICK_STREAMS = ("producer.transaction.timeout.ms=5000", *(f"consumer.{setting}" for setting in _SESSION))
"""Settings of applications that are replaced soon."""


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

    @contextmanager
    def running(self) -> Iterator[None]:
        """Starts instances, numbers and applications. All of them process numbers when this yields."""
        copies = {f"copy-{protocol}": protocol for protocol in self.size.protocols}
        checks: dict[str, Check] = {**dict.fromkeys(copies, check_copy), STREAMS_ID: check_counts}
        broker_ids = range(1, len(self._upstream.ports) + 1)
        with ExitStack() as stack:
            self._instances = stack.enter_context(running_instances(self._folder, self._upstream.address, broker_ids))
            address = address_of(self._instances)
            self.work = stack.enter_context(
                Work(address, self._upstream.address, self.size.per_second, checks, self._folder)
            )
            self._applications: list[Application] = []
            for number in range(self.size.copies):
                for group, protocol in copies.items():
                    name = f"{group}-{number}"
                    command = copy_command(address, group, name, protocol, QUICK_COPY[protocol])
                    self._applications.append(Application(command, self._folder / f"{name}.txt"))
                file = self._folder / f"{STREAMS_ID}-{number}"
                command = streams_command(address, STREAMS_ID, file, "exactly_once_v2", QUICK_STREAMS)
                self._applications.append(Application(command, file.with_suffix(".txt")))
            for application in self._applications:
                stack.enter_context(application)
            self.work.until_progress("start")
            yield

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
        self.work.until_progress("kill -9 of an application")

    def _lose_instance(self) -> None:
        victim = random.choice(self._instances)
        victim.kill()
        self.work.until_progress("kill -9 of an instance")
        victim.start()

    def _lose_broker(self) -> None:
        broker = random.randint(1, len(self._upstream.ports))
        self._upstream.kill(broker)
        if len(self._upstream.ports) > 1:
            self.work.until_progress("kill -9 of a broker")
        self._upstream.start(broker)
        self.work.until_progress("the start of a broker")

    def _pause_application(self) -> None:
        """The application stands still for longer than its session and its transaction."""
        self._pause(random.choice(self._applications).pid, 7.0)
        self.work.until_progress("SIGSTOP of an application")

    def _pause_instance(self) -> None:
        """Another instance takes its groups. The victim then finds requests of clients."""
        self._pause(random.choice(self._instances).pid, SESSION_MS / 1000 + 2)
        self.work.until_progress("SIGSTOP of an instance")

    @staticmethod
    def _pause(pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)
