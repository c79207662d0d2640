# SPDX-License-Identifier: Apache-2.0
"""Tests that do not stop the broker share one broker of each kind. Each test has its own names of topics and groups."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from kcoord.client import AdminClient
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess

StartBroker = Callable[..., KcoordProcess]


@dataclass
class Target:
    """A broker under test."""

    kind: str
    address: str

    @property
    def has_kip_1327(self) -> bool:
        return self.kind == "kcoord"


def _start(kind: str, folder: Path, stack: ExitStack) -> Target:
    if kind == "kcoord":
        process = KcoordProcess(folder).start()
        stack.callback(process.stop)
        return Target(kind, process.address)
    broker = KafkaBroker(KafkaJars(), folder, **{key.replace(".", "_"): value for key, value in FAST.items()})
    stack.callback(broker.stop)
    return Target(kind, broker.address)


@pytest.fixture(scope="session", params=["kcoord", pytest.param("kafka", marks=pytest.mark.java)])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """A kcoord broker, or Apache Kafka."""
    with ExitStack() as stack:
        yield _start(request.param, tmp_path_factory.mktemp(request.param), stack)


@pytest.fixture(scope="session")
def kcoord(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a kcoord broker, for features that only kcoord has."""
    with ExitStack() as stack:
        yield _start("kcoord", tmp_path_factory.mktemp("kcoord"), stack).address


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """A function that starts a kcoord broker for one test. Keyword arguments are settings with underscores for dots."""
    started: list[KcoordProcess] = []

    def start(**settings: str) -> KcoordProcess:
        folder = tmp_path / f"broker{len(started)}"
        folder.mkdir()
        overrides = {key.replace("_", "."): value for key, value in settings.items()}
        started.append(KcoordProcess(folder, {**FAST, **overrides}))
        return started[-1].start()

    yield start
    for process in started:
        process.stop()


@pytest.fixture
async def admin(target: Target) -> AsyncIterator[AdminClient]:
    async with AdminClient(bootstrap_servers=target.address) as client:
        yield client


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name for the topics and groups of one test."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
