# SPDX-License-Identifier: Apache-2.0
"""All tests of this folder run on virtual time, with connections in memory."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest

from tests.unit.client.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    return {"virtual time": VirtualLoop}


class Middle:
    """Predictable random numbers: always 0.5, and a shuffle that reverses the order."""

    def random(self) -> float:
        return 0.5

    def shuffle(self, items: list[object]) -> None:
        items.reverse()


@pytest.fixture
def no_surprise(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Removes the jitter of backoffs, and makes `member` the member id."""
    monkeypatch.setattr("kcoord.client.cluster.random", SimpleNamespace(Random=Middle))
    monkeypatch.setattr("kcoord.client.consumer.client.uuid4", lambda: "member")
    yield
