# SPDX-License-Identifier: Apache-2.0
"""Every test runs with a broker in this process, and again with a broker in its own process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kcoord.testing import KcoordBroker, Mode
from kcoord.testing.pool import BrokerPool
from kcoord.testing.security import BrokerSecurity


@pytest.fixture(scope="session")
def pool() -> Iterator[BrokerPool]:
    made = BrokerPool()
    yield made
    made.close()


@pytest.fixture(params=["in-process", "process"])
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode


@pytest.fixture
def broker(pool: BrokerPool, mode: Mode) -> Iterator[KcoordBroker]:
    taken = pool.take(mode, {}, BrokerSecurity())
    yield taken
    pool.give_back(taken)
