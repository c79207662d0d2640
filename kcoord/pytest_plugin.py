# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: the fixtures `kcoord_broker` and `kcoord_broker_factory`, and the marker `kcoord`.

pytest loads it in every project that has kcoord installed, so it imports nothing else before a test wants a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import pytest

if TYPE_CHECKING:
    from kcoord.testing import KcoordBroker, Mode
    from kcoord.testing.pool import BrokerPool

MODES = ("in-process", "process")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kcoord")
    group.addoption(
        "--kcoord-broker",
        choices=MODES,
        help="where the brokers of the fixture kcoord_broker run (default: ini option kcoord_broker, or in-process)",
    )
    parser.addini("kcoord_broker", "where the brokers of kcoord_broker run: in-process or process", default=MODES[0])
    parser.addini("kcoord_config", "settings of all brokers of kcoord_broker, KEY=VALUE a line", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "kcoord(config=None, mode=None): settings of the kcoord_broker of this test, and where it runs",
    )


@pytest.fixture(scope="session")
def _kcoord_pool() -> Iterator[BrokerPool]:
    from kcoord.testing.pool import BrokerPool

    pool = BrokerPool()
    yield pool
    pool.close()


@pytest.fixture
def kcoord_broker_config() -> Mapping[str, str]:
    """Broker settings for the tests of a module or folder: redefine it there."""
    return {}


@pytest.fixture
def kcoord_broker(
    request: pytest.FixtureRequest, _kcoord_pool: BrokerPool, kcoord_broker_config: Mapping[str, str]
) -> Iterator[KcoordBroker]:
    """A broker of this test's own: nothing of any other test is in it, and its port is a new one."""
    mode, config = _wanted(request, kcoord_broker_config)
    broker = _kcoord_pool.take(mode, config)
    yield broker
    _kcoord_pool.give_back(broker)


@pytest.fixture
def kcoord_broker_factory(
    request: pytest.FixtureRequest, _kcoord_pool: BrokerPool, kcoord_broker_config: Mapping[str, str]
) -> Iterator[Callable[..., KcoordBroker]]:
    """Makes as many brokers as a test wants: `kcoord_broker_factory(config)`."""
    mode, common = _wanted(request, kcoord_broker_config)
    made: list[KcoordBroker] = []

    def make(config: Mapping[str, str] | None = None) -> KcoordBroker:
        made.append(_kcoord_pool.take(mode, {**common, **(config or {})}))
        return made[-1]

    yield make
    for broker in made:
        _kcoord_pool.give_back(broker)


def _wanted(request: pytest.FixtureRequest, fixture_config: Mapping[str, str]) -> tuple[Mode, dict[str, str]]:
    """The marker wins over the fixture, and that over the ini file; the command line decides where the broker runs,
    unless a marker does.
    """
    config: dict[str, str] = {}
    for line in request.config.getini("kcoord_config"):
        key, equals, value = line.partition("=")
        if not equals:
            raise pytest.UsageError(f"kcoord_config: {line!r} is not KEY=VALUE")
        config[key.strip()] = value.strip()
    config.update(fixture_config)
    mode = request.config.getoption("--kcoord-broker") or request.config.getini("kcoord_broker")
    marker = request.node.get_closest_marker("kcoord")
    if marker is not None:
        config.update(marker.kwargs.get("config") or {})
        mode = marker.kwargs.get("mode") or mode
    if mode not in MODES:
        raise pytest.UsageError(f"kcoord_broker is {mode!r}; it can be {' or '.join(MODES)}")
    return cast("Mode", mode), config
