# SPDX-License-Identifier: Apache-2.0
"""The server stages: a broker process without sockets, with files in memory and a clock that only `sleep` moves.

One stage has the fast paths enabled, the other disabled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kcoord.config import Listener, SecurityProtocol
from kcoord.server.composition import compose
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.environment import Environment
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.process import BrokerProcess
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord_protocol.messages import Message
from tests.transcripts.frame_stage import FrameStage
from tests.transcripts.path_client import PathClient
from tests.transcripts.stage import TOPIC_MS, Sent, config_of

START_MS = 1_700_000_000_000
_DAY_MS = 86_400_000
_QUIET_TURNS = 10
"""After this many turns of the event loop without work, the broker counts as quiet."""
_TURN_SECONDS = 0.0005
_MOST_TURNS = 20_000


class StageProcess(BrokerProcess):
    """A broker process without listeners. Clients make request paths on its broker."""

    answer_seconds = 0.0

    async def start(self) -> None:
        self.listeners.clear()
        self.broker.endpoints["PLAINTEXT"] = Listener("PLAINTEXT", "broker", 9092, SecurityProtocol.PLAINTEXT)
        await super().start()

    @property
    def is_quiet(self) -> bool:
        return self.broker.pump.is_quiet and not self.broker.groups.shards.queue_size(self.broker.now_ms())

    def fire_due(self) -> None:
        """Fires the timers that are due by the broker's clock, without waiting for the event loop's clock."""
        self.broker.pump.on_clock_moved()
        self.broker.fetches.on_clock_moved()

    def next_deadline_ms(self) -> int | None:
        return self.broker.pump.next_deadline_ms()


class ServerStage(FrameStage):
    """A broker process without fast paths."""

    name = "server"
    start_ms = START_MS
    has_fast_paths = False

    async def open(self, settings: dict[str, str]) -> None:
        own = {
            "log.dirs": "/data",
            "kcoord.log.flush.policy": "os",
            "log.cleaner.enable": "false",
            "kcoord.fast.paths.enable": str(self.has_fast_paths).lower(),
        }
        self._config = config_of(settings | own)
        self._files = MemoryFileSystem()
        # The broker's own topics are a day older than the groups of the transcript.
        self._now_ms = START_MS - _DAY_MS
        self._clients: dict[str, PathClient] = {}
        await self._start()
        await self._open_logs()
        self._now_ms = START_MS
        await self.settle()

    async def _start(self) -> None:
        environment = Environment(asyncio.get_running_loop(), lambda: self._now_ms)
        folder = DataFolder(self._config, self._now_ms, self._files)
        self._process = StageProcess(compose(self._config, environment, folder), environment, folder)
        await self._process.start()
        self._settings = PathSettings.of(self._process.broker, "PLAINTEXT")
        await self.settle()

    async def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        await self._process.stop()

    async def restart(self) -> None:
        await self.close()
        await self._start()

    async def send(self, sent: Sent) -> None:
        name = sent.request.client
        if name not in self._clients:
            self._clients[name] = PathClient(self._settings, name)
        self._clients[name].send(sent)

    async def request(self, message: Message, version: int) -> Any:
        return await self._exchange(message, version)

    async def set_topic(self, name: str, partitions: int) -> bytes:
        topic_id = await super().set_topic(name, partitions)
        await self.sleep(TOPIC_MS)
        return topic_id

    async def settle(self) -> None:
        quiet = 0
        for _ in range(_MOST_TURNS):
            deadline_ms = self._process.next_deadline_ms()
            if deadline_ms is not None and deadline_ms <= self._now_ms:
                self._process.fire_due()
            # While a thread works on a background task, the event loop leaves the CPU to it.
            await asyncio.sleep(0 if self._process.is_quiet else _TURN_SECONDS)
            for client in self._clients.values():
                client.read()
            quiet = quiet + 1 if self._process.is_quiet else 0
            if quiet == _QUIET_TURNS:
                return
        raise AssertionError(f"the broker is not quiet after {_MOST_TURNS} turns of the event loop")

    async def sleep(self, milliseconds: int) -> list[str]:
        """Moves the clock from deadline to deadline, so each timer fires in order and at its time."""
        end_ms = self._now_ms + milliseconds
        while (deadline_ms := self._process.next_deadline_ms()) is not None and deadline_ms <= end_ms:
            self._now_ms = max(self._now_ms, deadline_ms)
            self._process.fire_due()
            await self.settle()
        self._now_ms = end_ms
        self._process.fire_due()
        return []

    def mask(self, lines: list[str]) -> list[str]:
        """Removes the timers, which only the core stage shows."""
        return [line for line in lines if not line.startswith("timer ")] or ["ok"]


class FastServerStage(ServerStage):
    """A broker process with fast paths."""

    name = "server-fast"
    has_fast_paths = True
