# SPDX-License-Identifier: Apache-2.0
"""Client quotas: how many bytes per second clients may produce and fetch (KIP-13, KIP-55, KIP-219).

Theory of operation. A request is never refused. The broker measures the rate of a client over the last
`quota.window.num` windows of `quota.window.size.seconds`. If a request raises the rate above the quota, its response
leaves at once and says in throttle_time_ms after which time the rate is back at the quota. The broker reads no further
request of the connection during that time (`RequestPath`). A response to Fetch is then empty, and does not count.

The most specific quota counts, in Kafka's order (`QuotaLimits.of`). Who shares a rate follows from that quota: all
connections with the same user and client id, all clients of a user, or all users of a client id.

Rates are kept for each process. They begin at zero after a start, and when the first quota is set. A broker without
quotas has no `ClientQuotas`. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from kcoord.metadata.client_quotas import CLIENT_ID, CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, USER
from kcoord.metadata.image import QuotaEntity, quota_entity

if TYPE_CHECKING:
    pass

Sharers: TypeAlias = tuple[str | None, str | None]
"""The user and the client id that share a rate; None if a rate counts all of them."""

_FIRST_SWEEP: Final = 1000
"""The number of rates at which those of idle clients are dropped for the first time."""


@dataclass(slots=True)
class _Window:
    started_ms: int
    last_ms: int
    amount: float


class Rate:
    """The rate of an amount per second over the last `windows` windows of `window_ms`, as Kafka's Rate measures it."""

    __slots__ = ("_window_ms", "_windows", "_windows_kept")

    def __init__(self, windows: int, window_ms: int) -> None:
        self._windows_kept = windows
        self._window_ms = window_ms
        self._windows: deque[_Window] = deque()

    def record(self, amount: float, now_ms: int) -> None:
        """Adds an amount to the current window; a negative amount takes back an earlier one."""
        last = self._windows[-1] if self._windows else None
        if last is None or now_ms - last.started_ms >= self._window_ms:
            self._windows.append(_Window(now_ms, now_ms, amount))
        else:
            last.amount += amount
            last.last_ms = now_ms

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether nothing was recorded within the windows, so that a new rate would measure the same."""
        windows = self._windows
        while windows and now_ms - windows[0].last_ms >= self._windows_kept * self._window_ms:
            windows.popleft()
        return not windows

    def throttle_ms(self, limit: float, now_ms: int) -> int:
        """Returns the time after which the rate is back at `limit`, 0 if it is not above.

        The time that has passed counts as at least all complete windows but one, so that a first burst is allowed.
        """
        if self.is_idle(now_ms):
            return 0
        elapsed_ms = max(now_ms - self._windows[0].started_ms, 0)
        complete = elapsed_ms // self._window_ms
        elapsed_ms += max(self._windows_kept - 1 - complete, 0) * self._window_ms
        elapsed_ms = max(elapsed_ms, 1)
        per_second = sum(window.amount for window in self._windows) / (elapsed_ms / 1000)
        if per_second <= limit:
            return 0
        return int((per_second - limit) / limit * elapsed_ms + 0.5)


class QuotaLimits:
    """The quotas of one key, by entity."""

    __slots__ = ("_limits",)

    def __init__(self, quotas: Mapping[QuotaEntity, Mapping[str, float]], key: str) -> None:
        self._limits = {entity: values[key] for entity, values in quotas.items() if key in values}

    def of(self, user: str, client_id: str) -> tuple[float, Sharers] | None:
        """Returns the quota of a client and who shares its rate, None if the client has no quota."""
        for user_name, client_name, sharers in (
            ((USER, user), (CLIENT_ID, client_id), (user, client_id)),
            ((USER, user), (CLIENT_ID, None), (user, client_id)),
            ((USER, user), None, (user, None)),
            ((USER, None), (CLIENT_ID, client_id), (user, client_id)),
            ((USER, None), (CLIENT_ID, None), (user, client_id)),
            ((USER, None), None, (user, None)),
            (None, (CLIENT_ID, client_id), (None, client_id)),
            (None, (CLIENT_ID, None), (None, client_id)),
        ):
            limit = self._limits.get(quota_entity(part for part in (user_name, client_name) if part is not None))
            if limit is not None:
                return limit, sharers
        return None


class ByteRateQuota:
    """The rates of all clients for one key, and their limits."""

    def __init__(self, key: str, windows: int, window_ms: int) -> None:
        self._key = key
        self._windows = windows
        self._window_ms = window_ms
        self._limits = QuotaLimits({}, key)
        self._rates: dict[Sharers, Rate] = {}
        self._sweep_at = _FIRST_SWEEP

    def change_limits(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Uses these quotas from now on. Rates that were measured so far are kept."""
        self._limits = QuotaLimits(quotas, self._key)

    def has_limit(self, user: str, client_id: str) -> bool:
        return self._limits.of(user, client_id) is not None

    def largest_burst(self, user: str, client_id: str) -> int | None:
        """Returns the most bytes that a client without recent requests may use at once, None if it has no quota."""
        limit = self._limits.of(user, client_id)
        return None if limit is None else int(limit[0] * (self._windows - 1) * self._window_ms / 1000)

    def record(self, user: str, client_id: str, amount: int, now_ms: int) -> int:
        """Counts an amount. Returns for how many milliseconds to throttle the client, 0 within its quota."""
        limit = self._limits.of(user, client_id)
        if limit is None:
            return 0
        rate = self._rate(limit[1], now_ms)
        rate.record(amount, now_ms)
        return rate.throttle_ms(limit[0], now_ms)

    def take_back(self, user: str, client_id: str, amount: int, now_ms: int) -> None:
        """Takes back an amount that `record` has counted at the same time."""
        limit = self._limits.of(user, client_id)
        if limit is not None:
            self._rate(limit[1], now_ms).record(-amount, now_ms)

    def _rate(self, sharers: Sharers, now_ms: int) -> Rate:
        """Returns the rate of these clients. Clients choose their ids, so the rates of idle ones are dropped."""
        rate = self._rates.get(sharers)
        if rate is None:
            if len(self._rates) >= self._sweep_at:
                self._rates = {key: kept for key, kept in self._rates.items() if not kept.is_idle(now_ms)}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._rates))
            rate = self._rates[sharers] = Rate(self._windows, self._window_ms)
        return rate


class ClientQuotas:
    """The client quotas of a broker."""

    def __init__(self, windows: int, window_ms: int) -> None:
        self.produce = ByteRateQuota(PRODUCER_BYTE_RATE, windows, window_ms)
        self.fetch = ByteRateQuota(CONSUMER_BYTE_RATE, windows, window_ms)
        self.applied: Mapping[QuotaEntity, Mapping[str, float]] = {}

    def apply(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        self.applied = quotas
        self.produce.change_limits(quotas)
        self.fetch.change_limits(quotas)
