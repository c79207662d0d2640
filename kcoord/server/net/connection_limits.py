# SPDX-License-Identifier: Apache-2.0
"""How many connections a process takes, from whom, and how fast.

`max.connections` and `max.connections.per.ip` refuse; `max.connection.creation.rate` makes a connection wait for its
turn, as in Kafka. All are counted over every listener of the process, and read anew for each connection, so that a
dynamic broker config takes effect at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kcoord.config.checks import parse_ip_overrides

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig


class ConnectionLimits:
    """See the module's text."""

    __slots__ = ("_config", "_per_ip", "_total", "_turn_seconds")

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._per_ip: Counter[str] = Counter()
        self._total = 0
        self._turn_seconds = float("-inf")

    def refusal(self, host: str) -> str | None:
        """Why one more connection from `host` is too many, or None after counting it."""
        config = self._config
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

    def wait_seconds(self, now_seconds: float) -> float:
        """How long a new connection has to wait for its turn, 0.0 as long as the rate is kept.

        The rate holds over the quota windows (`quota.window.num` of `quota.window.size.seconds`), so what was not used
        in the last of them may come at once.
        """
        config = self._config
        window_seconds = config.quota_window_num * config.quota_window_size_seconds
        self._turn_seconds = max(self._turn_seconds, now_seconds - window_seconds)
        self._turn_seconds += 1 / max(config.max_connection_creation_rate, 1)
        return max(self._turn_seconds - now_seconds, 0.0)
