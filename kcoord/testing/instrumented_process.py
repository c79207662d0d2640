# SPDX-License-Identifier: Apache-2.0
"""A broker that lives in somebody else's process: watched connections, a clock that can be moved, quick to stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from kcoord.server.process import BrokerProcess
from kcoord.testing.instrumented_connection import InstrumentedListener
from kcoord.testing.operations import ControllableShard

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig, Listener
    from kcoord.metadata.machine import MetadataMachine
    from kcoord.runtime.coordinator_runtime import CoordinatorRuntime
    from kcoord.server.broker import Broker
    from kcoord.server.disk.data_folder import Storage
    from kcoord.server.net.connection_limits import ConnectionLimits
    from kcoord.server.net.listener import SocketListener
    from kcoord.testing.clock import MovableClock
    from kcoord.testing.monitor import Monitor

MOST_STEPS: Final = 100
_QUIET_SECONDS: Final = 10.0


class InstrumentedProcess(BrokerProcess):
    """See the module's text."""

    owns_heap = False
    # A test that is over waits for nobody.
    answer_seconds = 0.0

    def __init__(
        self,
        config: BrokerConfig,
        clock: MovableClock,
        storage: Storage,
        metadata: CoordinatorRuntime[MetadataMachine],
        monitor: Monitor,
    ) -> None:
        self.clock = clock
        self.monitor = monitor
        self._watched: list[InstrumentedListener] = []
        super().__init__(config, clock, storage, metadata)

    @property
    def broker(self) -> Broker:
        return self._broker

    def _new_listener(self, address: Listener, limits: ConnectionLimits) -> SocketListener:
        listener = InstrumentedListener(address, self._broker, limits, self.monitor)
        self._watched.append(listener)
        return listener

    def _new_group_shard(self, shard_id: int) -> ControllableShard:
        return ControllableShard(self._config, self._broker.image)

    async def advance_clock(self, milliseconds: int) -> None:
        """Moves the clock from deadline to deadline, so that what is due comes in order and at its time: a session that
        ends makes a group empty, and its offsets expire later. At most MOST_STEPS steps; the last one is at the end.
        """
        end_ms = self.now_ms() + milliseconds
        least_ms = max(milliseconds // MOST_STEPS, 1)
        while (now_ms := self.now_ms()) < end_ms:
            deadline_ms = self._worker.next_deadline_ms()
            wanted_ms = max(now_ms + least_ms, end_ms if deadline_ms is None else deadline_ms)
            self.clock.advance(min(wanted_ms, end_ms) - now_ms)
            self._worker.on_clock_moved()
            self._broker.fetches.on_clock_moved()
            self._work_on_topics()
            await self._until_quiet()

    async def _until_quiet(self) -> None:
        async with asyncio.timeout(_QUIET_SECONDS):
            while not self._worker.is_quiet:
                await asyncio.sleep(0)

    async def stop(self) -> None:
        for listener in self._watched:
            listener.abort_connections()
        await super().stop()
