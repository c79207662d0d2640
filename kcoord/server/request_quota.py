# SPDX-License-Identifier: Apache-2.0
"""The quota on the time that the requests of a client take (`request_percentage`, KIP-124).

Theory of operation. A process works on all requests in one thread, the event loop. The time of a request is the CPU
time of that thread from the frame to the encoded response; while the request waits, no time counts. 100 percent are all
the time of one thread, as in Kafka, where a broker has several threads. Work in other threads does not count.

A request path begins a `RequestUse` for each request of a client that has a quota. `throttle_ms` counts the time that
was used before the response is encoded. If the rate is above the quota, the response leaves at once with a
throttle_time_ms of at most one window (`quota.window.size.seconds`), and the connection is muted. The time of the
encoding counts, too, but throttles only the next request. Fast paths encode before they are measured, so clients with a
quota are served without them.

Requests that brokers send each other are exempt, as in Kafka: WriteTxnMarkers that the client may send, and Fetch with
a replica id. So is what comes before the end of a SASL authentication.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Final, cast

from kcoord.metadata.client_quotas import REQUEST_PERCENTAGE
from kcoord.server.client_quotas import RateQuota

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.metadata.image import QuotaEntity
    from kcoord.server.client_quotas import Throttled

_PERCENT_PER_NS: Final = 100 / 1_000_000_000
"""The unit of the rate is percent of a second, per second."""
_MOST_CLIENTS: Final = 1000
_ID_LENGTH: Final = Struct(">8xh")
"""The length of the client id in a frame, after API key, version and correlation id."""
_ID_AT: Final = _ID_LENGTH.size

Identity = tuple[str, bytes]
"""The principal and the client id, encoded."""


class RequestQuota(RateQuota):
    """The quota on time of all clients. `cpu_ns` returns the CPU time of the event loop's thread."""

    def __init__(self, config: BrokerConfig, cpu_ns: Callable[[], int]) -> None:
        windows, window_ms = config.quota_window_num, config.quota_window_size_seconds * 1000
        super().__init__(REQUEST_PERCENTAGE, windows, window_ms)
        self.cpu_ns = cpu_ns
        self._longest_ms = window_ms
        self._limited: dict[Identity, tuple[str, str] | None] = {}

    def change_limits(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        super().change_limits(quotas)
        self._limited.clear()

    def record(self, user: str, client_id: str, amount: float, now_ms: int) -> int:
        return min(super().record(user, client_id, amount, now_ms), self._longest_ms)

    def begin(self, principal: str, frame: bytes) -> RequestUse | None:
        """Begins a request. Returns None if its client has no quota."""
        if len(frame) < _ID_AT:
            return None
        (length,) = _ID_LENGTH.unpack_from(frame)
        # The length of an id that is null is negative.
        client_id = frame[_ID_AT : _ID_AT + length] if length > 0 else b""
        identity = principal, client_id
        if identity not in self._limited:
            if len(self._limited) >= _MOST_CLIENTS:
                self._limited.clear()
            client = principal.partition(":")[2], client_id.decode(errors="replace")
            self._limited[identity] = None if self.limit_of(*client) is None else client
        limited = self._limited[identity]
        return None if limited is None else RequestUse(self, *limited)


class RequestUse:
    """The time that one request uses. It is paused while the request waits."""

    __slots__ = ("_client_id", "_quota", "_since_ns", "_spent_ns", "_throttle_ms", "_user", "is_exempt")

    def __init__(self, quota: RequestQuota, user: str, client_id: str) -> None:
        self._quota = quota
        self._user = user
        self._client_id = client_id
        self._spent_ns = 0
        self._throttle_ms: int | None = None
        self.is_exempt = False
        self._since_ns: int | None = quota.cpu_ns()
        """None while the request waits. The time of the thread is that of other requests then."""

    def pause(self) -> None:
        if self._since_ns is not None:
            self._spent_ns += self._quota.cpu_ns() - self._since_ns
            self._since_ns = None

    def resume(self) -> None:
        self._since_ns = self._quota.cpu_ns()

    def throttle_ms(self, now_ms: int) -> int:
        """Counts the time so far. Returns for how many milliseconds to throttle the client, the same at each call."""
        if self._throttle_ms is None:
            self._throttle_ms = self._count(now_ms)
        return self._throttle_ms

    def throttle(self, response: object, now_ms: int, mute: Callable[[int], None]) -> None:
        """Notes the throttle time of a client that is above its quota in the response, and mutes its connection.

        The larger of several throttle times counts.
        """
        throttle_ms = self.throttle_ms(now_ms)
        if throttle_ms:
            if hasattr(response, "throttle_time_ms"):
                message = cast("Throttled", response)
                message.throttle_time_ms = max(message.throttle_time_ms, throttle_ms)
            mute(throttle_ms)

    def finish(self, now_ms: int) -> None:
        """Counts the time since `throttle_ms`. It throttles nobody."""
        if self._throttle_ms is not None:
            self._count(now_ms)

    def _count(self, now_ms: int) -> int:
        if self.is_exempt:
            return 0
        if self._since_ns is not None:
            self.pause()
            self.resume()
        spent_ns, self._spent_ns = self._spent_ns, 0
        return self._quota.record(self._user, self._client_id, spent_ns * _PERCENT_PER_NS, now_ms)
