# SPDX-License-Identifier: Apache-2.0
"""The broker process of a test broker."""

from __future__ import annotations

import asyncio
from typing import Final

from kcoord.config import BrokerConfig, Listener
from kcoord.server.broker import Broker
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.process import BrokerProcess
from kcoord.testing.clock import MovableClock
from kcoord.testing.instrumented_connection import InstrumentedListener
from kcoord.testing.monitor import Monitor
from kcoord.testing.operations import ControllableShard

MOST_STEPS: Final = 100
_QUIET_SECONDS: Final = 10.0


class InstrumentedProcess(BrokerProcess):
    """A broker with observed connections, a movable clock, and a fast stop. It runs inside any process."""

    # A stop does not wait for pending responses, since the test is over.
    answer_seconds = 0.0

    def __init__(self, config: BrokerConfig, clock: MovableClock, folder: DataFolder, monitor: Monitor) -> None:
        self.clock = clock
        self.monitor = monitor
        self._watched: list[InstrumentedListener] = []
        environment = Environment(asyncio.get_running_loop(), clock.now_ms, clock_gain_ms=clock.gain_ms)
        broker = compose(config, environment, folder, new_group_shard=_new_group_shard)
        super().__init__(broker, environment, folder, self._new_listener)

    def _new_listener(self, address: Listener, broker: Broker, limits: ConnectionLimits) -> InstrumentedListener:
        listener = InstrumentedListener(address, broker, limits, self.monitor)
        self._watched.append(listener)
        return listener

    async def advance_clock(self, milliseconds: int) -> None:
        """Advances the clock in steps from deadline to deadline.

        So timers fire in order and at their own time: a session expires, its group becomes empty, and the group's
        offsets expire later. There are about MOST_STEPS steps at most. After every step the broker finishes all work
        that became due.
        """
        end_ms = self.clock.now_ms() + milliseconds
        least_ms = max(milliseconds // MOST_STEPS, 1)
        while (now_ms := self.clock.now_ms()) < end_ms:
            deadline_ms = self.broker.pump.next_deadline_ms()
            target_ms = max(now_ms + least_ms, end_ms if deadline_ms is None else deadline_ms)
            self.clock.advance(min(target_ms, end_ms) - now_ms)
            self.broker.pump.on_clock_moved()
            self.broker.fetches.on_clock_moved()
            self.broker.tick()
            await self._until_quiet()

    async def _until_quiet(self) -> None:
        async with asyncio.timeout(_QUIET_SECONDS):
            while not self.broker.pump.is_quiet:
                await asyncio.sleep(0)

    async def stop(self) -> None:
        for listener in self._watched:
            listener.connections.abort()
        await super().stop()


def _new_group_shard(broker: Broker, shard_id: int) -> ControllableShard:
    return ControllableShard(broker.config, broker.image, broker.groups.counters)
