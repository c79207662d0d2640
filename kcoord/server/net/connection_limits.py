# SPDX-License-Identifier: Apache-2.0
"""The limits on the number and the rate of a process's connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from kcoord.config.checks import parse_ip_overrides

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.server.client_quotas import ConnectionQuota


class ConnectionLimits:
    """Counts the connections of all listeners of a process.

    As in Kafka, `max.connections` and `max.connections.per.ip` refuse a connection, and `max.connection.creation.rate`
    delays it. A connection that would wait longer than the quota windows is refused: otherwise a flood, whose
    connections keep their turns when they are closed, would delay later clients without a bound. The configuration is
    read for each connection, so a dynamic broker config takes effect at once.

    `quota` returns the current quota of ip addresses, None if there is none. A connection above it is kept open, muted,
    for at most `quota.window.size.seconds`, and then closed, as in Kafka. Clients that connect again and again are
    slowed by that. It takes no turn of `max.connection.creation.rate`.
    """

    __slots__ = ("_config", "_per_ip", "_quota", "_total", "_turn_seconds")

    def __init__(self, config: BrokerConfig, quota: Callable[[], ConnectionQuota | None] = lambda: None) -> None:
        self._config = config
        self._quota = quota
        self._per_ip: Counter[str] = Counter()
        self._total = 0
        self._turn_seconds = float("-inf")

    def refusal(self, host: str, now_seconds: float) -> str | None:
        """Counts a connection from `host` and returns None, or returns why it is refused."""
        config = self._config
        if self._turn_seconds - now_seconds > self._window_seconds:
            rate = config.max_connection_creation_rate
            return f"max.connection.creation.rate={rate} is exceeded by all connections of {self._window_seconds} s"
        if self._total >= config.max_connections:
            return f"max.connections={config.max_connections} reached"
        overrides = parse_ip_overrides(config.max_connections_per_ip_overrides)
        allowed = overrides.get(host, config.max_connections_per_ip)
        if self._per_ip[host] >= allowed:
            return f"max.connections.per.ip={allowed} reached"
        self._per_ip[host] += 1
        self._total += 1
        return None

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
