# SPDX-License-Identifier: Apache-2.0
"""Drives the long polls of the fetch manager in the event loop.

A Fetch request that has to wait is parked as a future. An append to one of its partitions wakes the service; the fetch
manager then says which parked requests are complete. A timer completes requests at their max.wait. All appends of one
turn of the event loop cost one poll.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from functools import partial

from kcoord.server.environment import RandomUuids
from kcoord.server.replies import Reply
from kcoord.topics.fetch_manager import FetchManager, ReadableTopics, Throttle
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import FetchRequest, FetchResponse


class FetchService:
    """Serves `Broker.fetches`. If a client is gone, its future is cancelled, which ends the long poll."""

    def __init__(self, manager: FetchManager, now_ms: Callable[[], int], uuids: RandomUuids) -> None:
        self._manager = manager
        self._now_ms = now_ms
        self._uuids = uuids
        self._loop = asyncio.get_running_loop()
        self._tokens = itertools.count(1)
        self._parked: dict[Hashable, asyncio.Future[FetchResponse]] = {}
        self._poll_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline_ms = 0
        self._closing = False
        manager.wake = self.wake

    def fetch(
        self,
        request: FetchRequest,
        api_version: int,
        readable: ReadableTopics | None = None,
        throttle: Throttle | None = None,
    ) -> Reply[FetchResponse]:
        """Returns the response, or a future if the request waits for data. Nothing waits after `close`."""
        now_ms = self._now_ms()
        token = next(self._tokens)
        if self._closing:
            request.max_wait_ms = 0
        response = self._manager.fetch(
            request,
            api_version,
            now_ms,
            token=token,
            candidate_session_id=self._uuids.take_session_id(),
            readable=readable,
            throttle=throttle,
        )
        if response is not None:
            return response
        future: asyncio.Future[FetchResponse] = self._loop.create_future()
        self._parked[token] = future
        future.add_done_callback(partial(self._forget, token))
        self._arm_timer(now_ms)
        return future

    def wake(self) -> None:
        """Schedules a poll for the next turn of the event loop."""
        if not self._poll_scheduled:
            self._poll_scheduled = True
            self._loop.call_soon(self._poll)

    def on_clock_moved(self) -> None:
        """Discards the armed timer, which would be late after the clock jumped ahead, and polls."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()

    def close(self) -> None:
        """Fails every parked request with NOT_LEADER_OR_FOLLOWER, so that its client looks for another broker."""
        self._closing = True
        for future in list(self._parked.values()):
            if not future.done():
                future.set_exception(KafkaError(Errors.NOT_LEADER_OR_FOLLOWER, "The broker is shutting down."))
        if self._timer is not None:
            self._timer.cancel()

    def _forget(self, token: Hashable, future: asyncio.Future[FetchResponse]) -> None:
        if self._parked.pop(token, None) is not None:
            self._manager.cancel(token)

    def _poll(self) -> None:
        self._poll_scheduled = False
        now_ms = self._now_ms()
        for completion in self._manager.poll(now_ms):
            future = self._parked.pop(completion.token, None)
            if future is not None and not future.done():
                future.set_result(completion.response)
        self._arm_timer(now_ms)

    def _arm_timer(self, now_ms: int) -> None:
        deadline_ms = self._manager.next_deadline_ms()
        if deadline_ms is None or (self._timer is not None and self._timer_deadline_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_deadline_ms = deadline_ms
        self._timer = self._loop.call_later(max(deadline_ms - now_ms, 1) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._poll()
