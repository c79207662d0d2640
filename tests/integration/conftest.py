# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests against a real `kcoord serve` process on an ephemeral port with a temporary data folder."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kcoord_process import KcoordProcess

MakeServer = Callable[..., KcoordProcess]

SERVER = {
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "offsets.topic.num.partitions": "4",
}


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[MakeServer]:
    """Makes servers that are not started yet. Keyword arguments are settings, with underscores for dots."""
    made: list[KcoordProcess] = []

    def make(**settings: str) -> KcoordProcess:
        folder = tmp_path / f"server{len(made)}"
        folder.mkdir()
        made.append(
            KcoordProcess(folder, {**SERVER, **{key.replace("_", "."): text for key, text in settings.items()}})
        )
        return made[-1]

    yield make
    for server in made:
        server.stop(signal.SIGKILL)


@pytest.fixture
def server(make_server: MakeServer) -> KcoordProcess:
    """A running broker."""
    return make_server().start()
