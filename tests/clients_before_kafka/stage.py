# SPDX-License-Identifier: Apache-2.0
"""Clients, in front of instances of which one after the other is killed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.clients_before_kafka.clients import Client
from tests.exactly_once.applications import Application
from tests.exactly_once.checks import Check
from tests.exactly_once.instances import address_of, running_instances
from tests.exactly_once.work import Work
from tests.support.kcoord_process import KcoordProcess

# Lines of the applications here, and of Kafka's console tools. Clients also log what they retry by themselves.
_REPORTED = re.compile(r"retriable |error |abort |restart |replaced |.*(ERROR|Exception)")

Administer = Callable[[str], object]
"""Uses the instances at an address as an administrator does, while one of them is missing."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a test.

    Every `pause_seconds` an instance is killed. It starts again at once or after `away_seconds`, when others serve its
    groups. With two instances it has to be back some seconds before the other one is killed: clients know the
    instances that were there when they last asked, and kafka-python and aiokafka do not go back to their bootstrap
    addresses.
    """

    instances: int
    settings: Mapping[str, str]
    kills: int
    pause_seconds: float
    away_seconds: float
    per_second: int


def run(
    folder: Path,
    upstream: str,
    broker_ids: Sequence[int],
    clients: Sequence[Client],
    size: Size,
    administer: Administer = str,
) -> None:
    """Fails unless each client has processed everything, and no error has reached it that it has to expect."""
    checks: dict[str, Check] = {}
    for client in clients:
        checks |= client.checks
    with ExitStack() as stack:
        instances = stack.enter_context(running_instances(folder, upstream, broker_ids, size.settings, size.instances))
        address = address_of(instances)
        work = stack.enter_context(Work(address, upstream, size.per_second, checks, folder))
        applications = {
            client.name: stack.enter_context(
                Application(client.command(address, folder), folder / f"{client.name}.txt")
            )
            for client in clients
        }
        work.until_progress("start")
        longest: dict[str, float] = dict.fromkeys(checks, 0.0)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        for number in range(size.kills):
            begun = time.monotonic()
            victim = instances[number % len(instances)]
            stays_away = number % 4 < 2
            victim.kill()
            returned = threads.submit(_return, victim, begun + size.away_seconds, address, administer, stays_away)
            event = f"kill -9 of an instance, which {'stays away for a while' if stays_away else 'starts at once'}"
            for target, seconds in work.until_progress(event).items():
                longest[target] = max(longest[target], seconds)
            returned.result()
            _sleep_until(begun + size.pause_seconds)
        print("longest", *(f"{target} {seconds:.1f} s" for target, seconds in longest.items()), sep=", ")
        work.judge()
        ended = [name for name, application in applications.items() if not application.is_running]
        assert not ended, f"{ended} have ended; logs: {folder}"
        _judge_errors({name: application.output for name, application in applications.items()})


def _return(victim: KcoordProcess, due: float, address: str, administer: Administer, stays_away: bool) -> None:
    """Starts an instance again, at once or when it is due."""
    if stays_away:
        _sleep_until(due)
        administer(address)
    victim.start()


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _judge_errors(outputs: Mapping[str, str]) -> None:
    """Fails if an error has reached an application that it does not have to expect."""
    errors = []
    for name, output in outputs.items():
        lines = [line for line in output.splitlines() if _REPORTED.match(line)]
        expected = [line for line in lines if line.startswith("retriable")]
        print(f"{name}: {len(lines)} errors, of these {len(expected)} to be expected", *expected[:3], sep="\n  ")
        errors += [f"{name}: {line}" for line in lines if line not in expected]
    assert not errors, f"{len(errors)} errors:\n" + "\n".join(errors[:50])
