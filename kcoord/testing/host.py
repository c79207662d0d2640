# SPDX-License-Identifier: Apache-2.0
"""Starts, restarts and resets a test broker, whose files are in memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kcoord.config import BrokerConfig, ConfigError
from kcoord.config.listeners import SecurityProtocol
from kcoord.config.workers import worker_count
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.errors import StartError
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.testing.clock import MovableClock
from kcoord.testing.errors import ControlError
from kcoord.testing.instrumented_process import InstrumentedProcess
from kcoord.testing.monitor import Monitor
from kcoord.testing.security import CONTROL

_logger = logging.getLogger(__name__)

DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "listeners": "PLAINTEXT://127.0.0.1:0",
        "log.dirs": "/in-memory",
        "kcoord.log.flush.policy": "os",
        "log.cleaner.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "100",
        "group.consumer.assignment.interval.ms": "0",
        "group.consumer.heartbeat.interval.ms": "200",
        "group.consumer.min.heartbeat.interval.ms": "20",
        "group.consumer.min.session.timeout.ms": "100",
        "offsets.topic.num.partitions": "8",
    }
)
"""The settings that differ from a broker's defaults. They keep rebalances from waiting longer than necessary."""


class BrokerHost:
    """Owns a test broker, which runs in the running event loop.

    `settings` override DEFAULTS. Raises ConfigError if they cannot be used. A strict host also rejects unknown config
    keys, which are mistakes in a test. After the first start the ports stay the same, so that clients find the broker
    after a restart.
    """

    def __init__(self, settings: Mapping[str, str], *, strict: bool = True) -> None:
        self._settings = {**DEFAULTS, **settings}
        unknown = usable(self._settings).unknown
        if strict:
            refuse_unknown(settings)
        elif unknown:
            _logger.warning("Unknown configuration keys: %s", ", ".join(sorted(unknown)))
        self.monitor = Monitor()
        self._file_system = MemoryFileSystem()
        self._process: InstrumentedProcess | None = None

    @property
    def process(self) -> InstrumentedProcess:
        if self._process is None:
            raise ControlError("the broker is not running", 503)
        return self._process

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of the first listener."""
        return self.process.ready().addresses[0].partition("://")[2]

    @property
    def control_servers(self) -> str:
        """`host:port` of the listener that the control uses: CONTROL, else the first plain one, else the first."""
        endpoints = self.process.broker.endpoints
        plain = [
            endpoint for endpoint in endpoints.values() if endpoint.security_protocol is SecurityProtocol.PLAINTEXT
        ]
        own = endpoints.get(CONTROL) or next(iter(plain), None)
        return self.bootstrap_servers if own is None else str(own).partition("://")[2]

    async def start(self, *, ahead_ms: int = 0) -> None:
        config = BrokerConfig.from_properties(self._settings)
        clock = MovableClock()
        clock.advance(ahead_ms)
        folder = DataFolder(config, clock.now_ms(), self._file_system)
        self._process = InstrumentedProcess(config, clock, folder, self.monitor)
        try:
            await self._process.start()
        except BaseException:
            await self.stop()
            raise
        self._keep_ports()

    def _keep_ports(self) -> None:
        """Replaces port 0 in the settings by the port that the system has chosen."""
        bound = self.process.bound_listeners
        entries = BrokerConfig.from_properties(self._settings).open_listeners
        self._settings["listeners"] = ",".join(
            f"{str(entry).rpartition(':')[0]}:{bound[entry.name].port}" for entry in entries
        )

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def restart(self) -> None:
        """Stops the broker cleanly and starts it on the same files. The clock stays ahead as far as it was."""
        ahead_ms = self.process.clock.ahead_ms
        await self.stop()
        await self.start(ahead_ms=ahead_ms)

    async def reset(self, settings: Mapping[str, str], *, like_new: bool = False) -> None:
        """Replaces the broker by one without topics, groups, faults and history, with its clock at the time of day.

        `settings` are added to the present ones. With `like_new` they are added to DEFAULTS, and the port changes.
        Settings are checked before the broker stops.
        """
        new_settings = {**(DEFAULTS if like_new else self._settings), **settings}
        refuse_unknown(settings)
        _check_own_assignors(usable(new_settings))
        await self.stop()
        self._settings = new_settings
        self._file_system = MemoryFileSystem()
        self.monitor = Monitor()
        await self.start()


def usable(settings: Mapping[str, str]) -> BrokerConfig:
    """Returns the configuration. Raises ConfigError if a test broker cannot use it."""
    config = BrokerConfig.from_properties(settings)
    if worker_count(config) > 1:
        raise ConfigError(f"a test broker is one process, so it cannot have {worker_count(config)} workers")
    return config


def _check_own_assignors(config: BrokerConfig) -> None:
    """Raises ConfigError if an assignor of one's own cannot be loaded."""
    if not config.own_assignors:
        return
    from kcoord.server.shards.own_assignors import start_own_assignors

    try:
        for assignor in start_own_assignors(config).values():
            assignor.close()
    except StartError as error:
        raise ConfigError(str(error)) from None


def refuse_unknown(settings: Mapping[str, str]) -> None:
    """Raises ConfigError for unknown config keys."""
    unknown = BrokerConfig.from_properties(settings).unknown
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(sorted(unknown))}")
