# SPDX-License-Identifier: Apache-2.0
"""The limits on the number and the rate of a process's connections."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kcoord.config import ConfigError
from kcoord.config.checks import ip_overrides_error, parse_ip_overrides
from kcoord.server import open_files
from kcoord.server.errors import StartError

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.config.broker_settings import BrokerSettings
    from kcoord.server.client_quotas import ConnectionQuota

_logger = logging.getLogger(__name__)


def limits_by_address(text: str) -> Mapping[str, int]:
    """Returns the counts of max.connections.per.ip.overrides by ip address, in the form that connections have.

    Names are looked up. Raises ConfigError if a name is unknown.
    """
    limits: dict[str, int] = {}
    for host, count in parse_ip_overrides(text).items():
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise ip_overrides_error(text, f"the host {host} is unknown") from None
        limits.update((str(info[4][0]), count) for info in infos)
    return limits


class ConnectionLimits:
    """Counts the connections of all listeners of a process.

    As in Kafka, `max.connections` and `max.connections.per.ip` refuse a connection, and `max.connection.creation.rate`
    delays it. A connection that would wait longer than the quota windows is refused. Closed connections keep their
    turns, so a flood would otherwise delay later clients without a bound. The configuration is read for each
    connection, so a dynamic broker config takes effect at once. As in Kafka, names of hosts are looked up once: at the
    start, and when the config has changed. The constructor raises StartError if a name is unknown.

    `quota` returns the current quota of ip addresses, None if there is none. A connection above it is kept open, muted,
    for at most `quota.window.size.seconds`, and then closed, as in Kafka. Clients that connect again and again are
    slowed by that. It takes no turn of `max.connection.creation.rate`.

    A connection is refused, too, if it would leave too few descriptors for files (`kcoord.server.open_files`).
    """

    __slots__ = ("_by_address", "_config", "_most_files", "_overrides", "_per_ip", "_quota", "_total", "_turn_seconds")

    def __init__(self, config: BrokerConfig, quota: Callable[[], ConnectionQuota | None] = lambda: None) -> None:
        self._config = config
        self._quota = quota
        self._per_ip: Counter[str] = Counter()
        self._total = 0
        self._turn_seconds = float("-inf")
        self._overrides = ""
        self._by_address: Mapping[str, int] = {}
        self._most_files = open_files.soft_limit()
        try:
            _check_overrides(config)
        except ConfigError as error:
            raise StartError(str(error)) from None
        config.further_checks.append(_check_overrides)

    def refusal(self, host: str, now_seconds: float, descriptor: int = 0) -> str | None:
        """Counts a connection from `host` and returns None, or returns why it is refused."""
        config = self._config
        if (files_refusal := self.files_refusal(descriptor)) is not None:
            return files_refusal
        if self._turn_seconds - now_seconds > self._window_seconds:
            rate = config.max_connection_creation_rate
            return f"max.connection.creation.rate={rate} is exceeded by all connections of {self._window_seconds} s"
        if self._total >= config.max_connections:
            return f"max.connections={config.max_connections} reached"
        if config.max_connections_per_ip_overrides != self._overrides:
            self._follow_overrides(config.max_connections_per_ip_overrides)
        allowed = self._by_address.get(host, config.max_connections_per_ip)
        if self._per_ip[host] >= allowed:
            return f"max.connections.per.ip={allowed} reached"
        self._per_ip[host] += 1
        self._total += 1
        return None

    def files_refusal(self, descriptor: int) -> str | None:
        """Returns why no connection may have this descriptor, None if one may.

        Logs keep the descriptors of files that are not synced. A quarter of the limit is for connections even so.
        """
        if descriptor < open_files.first_reserved(self._most_files) or self._total < self._most_files // 4:
            return None
        return f"the process may have {self._most_files} open files (ulimit -n), and the last are for logs"

    def _follow_overrides(self, text: str) -> None:
        self._overrides = text
        try:
            self._by_address = limits_by_address(text)
        except ConfigError as error:
            # The name was known when the config was altered.
            _logger.error("The limits on connections stay as they were: %s", error)

    def release(self, host: str) -> None:
        self._total -= 1
        self._per_ip[host] -= 1
        if not self._per_ip[host]:
            del self._per_ip[host]

    def delay_seconds(self, host: str, now_seconds: float) -> float:
        """Returns after which time to close a new connection that is above the quota of its address, 0.0 if it is not.

        Called for each connection that `refusal` has counted.
        """
        quota = self._quota()
        return 0.0 if quota is None else quota.throttle_ms(host, int(now_seconds * 1000)) / 1000

    def wait_seconds(self, now_seconds: float) -> float:
        """Returns how long a new connection has to wait, 0.0 if it is within the rate.

        The rate is an average over the quota windows (`quota.window.num` of `quota.window.size.seconds`), so a burst
        may use what was left unused within them.
        """
        self._turn_seconds = max(self._turn_seconds, now_seconds - self._window_seconds)
        self._turn_seconds += 1 / max(self._config.max_connection_creation_rate, 1)
        return max(self._turn_seconds - now_seconds, 0.0)

    @property
    def _window_seconds(self) -> int:
        return self._config.quota_window_num * self._config.quota_window_size_seconds


def _check_overrides(changed: BrokerSettings) -> None:
    """Raises ConfigError if the settings name a host that is unknown."""
    limits_by_address(changed.max_connections_per_ip_overrides)
