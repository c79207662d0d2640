# SPDX-License-Identifier: Apache-2.0
"""Real clients against a broker process. A module shares one broker. Names of topics and groups are unique per test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.kcoord_process import FAST, KcoordProcess

StartBroker = Callable[..., KcoordProcess]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    """A broker for all tests of a module that do not stop it."""
    process = KcoordProcess(tmp_path_factory.mktemp("kcoord")).start()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[StartBroker]:
    """Starts a broker for this test alone. Keyword arguments are configs, with underscores for dots."""
    started: list[KcoordProcess] = []

    def start(**overrides: str) -> KcoordProcess:
        folder = tmp_path / f"broker{len(started)}"
        folder.mkdir()
        configs = {**FAST, **{key.replace("_", "."): value for key, value in overrides.items()}}
        started.append(KcoordProcess(folder, configs))
        return started[-1].start()

    yield start
    for process in started:
        process.stop()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A name for the topics and groups of the test."""
    return re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
