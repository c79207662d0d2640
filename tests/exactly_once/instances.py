# SPDX-License-Identifier: Apache-2.0
"""Instances of kcoord in front of an upstream."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.ports import free_ports

SESSION_MS = 2_000
QUICK: Mapping[str, str] = {
    **FAST,
    "kcoord.upstream.session.timeout.ms": str(SESSION_MS),
    "kcoord.upstream.heartbeat.interval.ms": "200",
}
"""Settings of an instance that is replaced soon."""


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


@contextmanager
def running_instances(
    folder: Path, address: str, broker_ids: Sequence[int], settings: Mapping[str, str] = QUICK, count: int = 2
) -> Iterator[list[KcoordProcess]]:
    """Starts instances in front of the upstream at `address`. Each of its brokers keeps the ports that it gets."""
    instances: list[KcoordProcess] = []
    for number in range(count):
        own = folder / f"instance{number}"
        own.mkdir()
        overrides = {
            **settings,
            "node.id": str(1_000_000 + number),
            "kcoord.upstream.bootstrap.servers": address,
            "kcoord.upstream.ports": ",".join(f"{broker_id}:{free_ports(2)}" for broker_id in broker_ids),
        }
        instances.append(KcoordProcess(own, overrides))
    with ExitStack() as stack:
        for instance in instances:
            stack.callback(_stop, instance)
        with ThreadPoolExecutor() as threads:
            list(threads.map(KcoordProcess.start, instances))
        yield instances


def address_of(instances: Sequence[KcoordProcess]) -> str:
    return ",".join(instance.address for instance in instances)


def _stop(instance: KcoordProcess) -> None:
    if instance.is_running:
        os.kill(instance.pid, signal.SIGCONT)
    instance.kill()
