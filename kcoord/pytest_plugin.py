# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin: the fixtures `kcoord_broker` and `kcoord_broker_factory`, and the marker `kcoord`.

pytest loads it in every project that has kcoord installed. So it imports nothing else before a test uses a broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from kcoord.testing import KcoordBroker, Mode
    from kcoord.testing.pool import BrokerPool

MODES = ("in-process", "process")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--kcoord-broker` and the ini options `kcoord_broker` and `kcoord_config`."""
    group = parser.getgroup("kcoord")
    group.addoption(
        "--kcoord-broker",
        choices=MODES,
        help="how the brokers of the fixture kcoord_broker run (default: ini option kcoord_broker, or in-process)",
    )
    parser.addini("kcoord_broker", "how the brokers of kcoord_broker run: in-process or process", default=MODES[0])
    parser.addini("kcoord_config", "settings of all brokers of kcoord_broker, one KEY=VALUE per line", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker `kcoord`."""
    config.addinivalue_line(
        "markers",
        "kcoord(config=None, mode=None, tls=False, users=None, acls=None): settings, mode (in-process or process), "
        'TLS (True, or "mutual" with certificates of the clients), users (name: password) and ACLs of this test\'s '
        "kcoord_broker",
    )


@pytest.fixture(scope="session")
def _kcoord_pool() -> Iterator[BrokerPool]:
    from kcoord.testing.pool import BrokerPool

    pool = BrokerPool()
    yield pool
    pool.close()


@pytest.fixture
def kcoord_broker_config() -> Mapping[str, str]:
    """The broker settings for the tests of a module or folder. Redefine this fixture there."""
    return {}


@pytest.fixture
def kcoord_broker(
    request: pytest.FixtureRequest, _kcoord_pool: BrokerPool, kcoord_broker_config: Mapping[str, str]
) -> Iterator[KcoordBroker]:
    """A broker for this test alone, without data of other tests, on a new port."""
    mode, config = _mode_and_config(request, kcoord_broker_config)
    broker = _take(_kcoord_pool, mode, config, **_security_of(request))
    yield broker
    _kcoord_pool.give_back(broker)


@pytest.fixture
def kcoord_broker_factory(
    request: pytest.FixtureRequest, _kcoord_pool: BrokerPool, kcoord_broker_config: Mapping[str, str]
) -> Iterator[Callable[..., KcoordBroker]]:
    """Starts any number of brokers for a test: `kcoord_broker_factory(config, tls=True, users={"alice": "secret"})`.

    `tls`, `users` and `acls` of the marker hold if these are not given.
    """
    mode, common = _mode_and_config(request, kcoord_broker_config)
    made: list[KcoordBroker] = []

    def make(config: Mapping[str, str] | None = None, **security: Any) -> KcoordBroker:
        made.append(_take(_kcoord_pool, mode, {**common, **(config or {})}, **(_security_of(request) | security)))
        return made[-1]

    yield make
    for broker in made:
        _kcoord_pool.give_back(broker)


def _take(pool: BrokerPool, mode: Mode, config: Mapping[str, str], **security: Any) -> KcoordBroker:
    from kcoord.testing.security import secure

    return pool.take(mode, config, secure(config, **security))


def _security_of(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Returns the arguments of `secure` that the marker has."""
    marker = request.node.get_closest_marker("kcoord")
    return {key: marker.kwargs[key] for key in ("tls", "users", "acls") if marker is not None and key in marker.kwargs}


def _mode_and_config(request: pytest.FixtureRequest, fixture_config: Mapping[str, str]) -> tuple[Mode, dict[str, str]]:
    """Returns mode and config of a test's broker.

    For the config, the marker wins over the fixture, and the fixture over the ini file. For the mode, the marker wins
    over the command line, and the command line over the ini file.
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
        raise pytest.UsageError(f"kcoord_broker must be {' or '.join(MODES)}, not {mode!r}")
    return cast("Mode", mode), config
