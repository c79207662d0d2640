# SPDX-License-Identifier: Apache-2.0
"""Client quotas: what clients may use per second (KIP-13, KIP-55, KIP-219, KIP-599).

Theory of operation. The broker measures the rate of a client over the last `quota.window.num` windows of
`quota.window.size.seconds`. If a request raises the rate above the quota, its response leaves at once. It has a
throttle_time_ms, after which the rate is back at the quota. The broker reads no further request of the connection
during that time (`RequestPath`). A response to Fetch is then empty, and does not count.

The CPU time of requests counts in the same way (`kcoord.server.request_quota`). Partitions that clients create and
delete use tokens of a bucket instead (`kcoord.server.mutation_quota`). A connection above the rate of its ip address is
closed later (`ConnectionQuota`).

The most specific quota counts, in Kafka's order (`QuotaLimits.of`). It decides which clients share a rate: all
connections with the same user and client id, all clients of a user, or all users of a client id.

Rates are kept for each process. They begin at zero after a start, and when the first quota is set. A broker without
quotas has no `ClientQuotas`. Nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeAlias, TypeVar

from kcoord.metadata.client_quotas import (
    CLIENT_ID,
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    USER,
    address_of,
)
from kcoord.metadata.image import QuotaEntity, quota_entity

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig

Sharers: TypeAlias = tuple[str | None, str | None]
"""The user and the client id that share a rate; None if a rate counts all of them."""

_LONGEST_MS: Final = 2**31 - 1
_FIRST_SWEEP: Final = 1000
"""The number of rates at which those of idle clients are dropped for the first time."""


class Throttled(Protocol):
    """A response that tells the client for how long it is throttled."""

    throttle_time_ms: int


@dataclass(slots=True)
class _Window:
    started_ms: int
    last_ms: int
    amount: float


def whole_ms(time_ms: float) -> int:
    """Returns a throttle time as a response has it: an int32, also if the quota is tiny."""
    return int(min(time_ms, _LONGEST_MS) + 0.5)


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
        return whole_ms((per_second - limit) / limit * elapsed_ms)


class TokenBucket:
    """Tokens that come back at a rate per second, as Kafka's TokenBucket counts them (KIP-599).

    A new bucket is full: it has the tokens of `burst_seconds`. Below zero, the client owes tokens.
    """

    __slots__ = ("_burst_seconds", "_counted_ms", "_rate", "_tokens")

    def __init__(self, burst_seconds: float) -> None:
        self._burst_seconds = burst_seconds
        self._tokens = inf
        self._rate = 0.0
        self._counted_ms = 0

    def tokens(self, rate: float, now_ms: int) -> float:
        """Returns the tokens that are left. Those of the time since the last call came back at `rate`."""
        returned = rate * (now_ms - self._counted_ms) / 1000
        self._tokens = min(rate * self._burst_seconds, self._tokens + returned)
        self._rate, self._counted_ms = rate, now_ms
        return self._tokens

    def spend(self, count: int, rate: float, now_ms: int) -> float:
        """Takes tokens out, also more than there are. Returns the tokens that are left."""
        self._tokens = self.tokens(rate, now_ms) - count
        return self._tokens

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether the bucket is full, as a new one."""
        return self.tokens(self._rate, now_ms) >= self._rate * self._burst_seconds


class QuotaLimits:
    """The quotas of one key, by entity."""

    __slots__ = ("_limits",)

    def __init__(self, quotas: Mapping[QuotaEntity, Mapping[str, float]], key: str) -> None:
        self._limits = {entity: values[key] for entity, values in quotas.items() if key in values}

    def of_ip(self, address: str) -> float | None:
        """Returns the quota of an ip address, None if it has none."""
        limit = self._limits.get(((IP, address),))
        return limit if limit is not None else self._limits.get(((IP, None),))

    def __len__(self) -> int:
        return len(self._limits)

    def of(self, user: str, client_id: str) -> tuple[float, Sharers] | None:
        """Returns the quota of a client and who shares its rate, None if the client has no quota."""
        if not self._limits:
            return None
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


class Meter(Protocol):
    """What measures the use of clients that share a quota."""

    def is_idle(self, now_ms: int) -> bool:
        """Returns whether a new meter would measure the same."""


M = TypeVar("M", bound=Meter)


class Quota(Generic[M]):
    """The limits of one key, and the meters of all clients that have a limit."""

    def __init__(self, key: str, new_meter: Callable[[], M]) -> None:
        self._key = key
        self._new_meter = new_meter
        self._limits = QuotaLimits({}, key)
        self._meters: dict[Sharers, M] = {}
        self._sweep_at = _FIRST_SWEEP

    def change_limits(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Uses these quotas from now on. What was measured so far is kept."""
        self._limits = QuotaLimits(quotas, self._key)

    def limit_of(self, user: str, client_id: str) -> float | None:
        """Returns the limit of a client, None if it has none."""
        limit = self._limits.of(user, client_id)
        return None if limit is None else limit[0]

    def meter_of(self, user: str, client_id: str, now_ms: int) -> tuple[float, M] | None:
        """Returns the limit and the meter of a client, None if it has no limit."""
        limit = self._limits.of(user, client_id)
        return None if limit is None else (limit[0], self._meter(limit[1], now_ms))

    def _meter(self, sharers: Sharers, now_ms: int) -> M:
        """Returns the meter of these clients. Clients choose their ids, so the meters of idle clients are dropped."""
        meter = self._meters.get(sharers)
        if meter is None:
            if len(self._meters) >= self._sweep_at:
                self._meters = {key: kept for key, kept in self._meters.items() if not kept.is_idle(now_ms)}
                self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._meters))
            meter = self._meters[sharers] = self._new_meter()
        return meter


class RateQuota(Quota[Rate]):
    """The quota of an amount per second."""

    def __init__(self, key: str, windows: int, window_ms: int) -> None:
        super().__init__(key, lambda: Rate(windows, window_ms))
        self._burst_seconds = (windows - 1) * window_ms / 1000

    def largest_burst(self, user: str, client_id: str) -> int | None:
        """Returns the largest amount that a client without recent requests may use at once, None without a quota."""
        limit = self.limit_of(user, client_id)
        return None if limit is None else int(limit * self._burst_seconds)

    def record(self, user: str, client_id: str, amount: float, now_ms: int) -> int:
        """Counts an amount. Returns for how many milliseconds to throttle the client, 0 within its quota."""
        metered = self.meter_of(user, client_id, now_ms)
        if metered is None:
            return 0
        limit, rate = metered
        rate.record(amount, now_ms)
        return rate.throttle_ms(limit, now_ms)

    def take_back(self, user: str, client_id: str, amount: float, now_ms: int) -> None:
        """Takes back an amount that `record` has counted at the same time."""
        metered = self.meter_of(user, client_id, now_ms)
        if metered is not None:
            metered[1].record(-amount, now_ms)


class ConnectionQuota(Quota[Rate]):
    """The rates of new connections by ip address (KIP-612)."""

    def __init__(self, windows: int, window_ms: int) -> None:
        super().__init__(CONNECTION_CREATION_RATE, lambda: Rate(windows, window_ms))
        self._longest_ms = window_ms

    def change_limits(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Uses these quotas from now on. Addresses are compared in their usual form."""
        by_address: dict[QuotaEntity, Mapping[str, float]] = {}
        for entity, values in quotas.items():
            entity_type, name = entity[0]
            if entity_type == IP:
                by_address[((IP, name and (address_of(name) or name)),)] = values
        super().change_limits(by_address)

    def throttle_ms(self, host: str, now_ms: int) -> int:
        """Counts a new connection. Returns how long to keep it until it is closed; 0 if it is within the quota.

        A connection that is closed does not count.
        """
        if not self._limits:
            return 0
        address = address_of(host) or host
        limit = self._limits.of_ip(address)
        if limit is None:
            return 0
        rate = self._meter((None, address), now_ms)
        rate.record(1, now_ms)
        throttle_ms = min(rate.throttle_ms(limit, now_ms), self._longest_ms)
        if throttle_ms:
            rate.record(-1, now_ms)
        return throttle_ms


class ClientQuotas:
    """The client quotas of a broker, but for that on the time of requests."""

    def __init__(self, config: BrokerConfig) -> None:
        windows, window_ms = config.quota_window_num, config.quota_window_size_seconds * 1000
        self.produce = RateQuota(PRODUCER_BYTE_RATE, windows, window_ms)
        self.fetch = RateQuota(CONSUMER_BYTE_RATE, windows, window_ms)
        burst_seconds = config.controller_quota_window_num * config.controller_quota_window_size_seconds
        self.mutations = Quota(CONTROLLER_MUTATION_RATE, lambda: TokenBucket(burst_seconds))
        self.connections = ConnectionQuota(windows, window_ms)
        self.applied: Mapping[QuotaEntity, Mapping[str, float]] = {}

    def apply(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        self.applied = quotas
        for quota in (self.produce, self.fetch, self.mutations, self.connections):
            quota.change_limits(quotas)
