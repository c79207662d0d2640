# SPDX-License-Identifier: Apache-2.0
"""The Unix sockets by which the processes of one cluster reach each other: bytes take their time, stay in order, and
are never lost. A connection ends with the process at either end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kcoord.simulation.clock import VirtualClock

if TYPE_CHECKING:
    from kcoord.simulation.loop import SimulatedLoop

NewProtocol = Callable[[], asyncio.Protocol]


class End(asyncio.Transport):
    """One end of a connection. `peer` and `protocol` are set when it is made."""

    peer: End
    protocol: asyncio.Protocol

    def __init__(self, sockets: UnixSockets, loop: SimulatedLoop) -> None:
        super().__init__()
        self.loop = loop
        self._sockets = sockets
        self._is_closing = False
        self._arrival_ms = 0
        """Of what the other end has sent last."""

    def open(self, new_protocol: NewProtocol) -> None:
        self.protocol = new_protocol()
        self.protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self.peer.arrive(self.peer._receive, bytes(data))

    def arrive(self, action: Callable[..., object], *args: object) -> None:
        """Something comes from the other end, behind what came before."""
        clock = self._sockets.clock
        self._arrival_ms = max(self._arrival_ms, clock.now_ms + self._sockets.way_ms())
        clock.at(self._arrival_ms, lambda: self.loop.enter(action, *args))

    def _receive(self, data: bytes) -> None:
        if not self._is_closing:
            self.protocol.data_received(data)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self.peer.arrive(self.peer.end)
            self.loop.call_soon(self.end)
            self._is_closing = True

    def end(self) -> None:
        """The connection is over, whoever ended it."""
        self._is_closing = True
        if self in self._sockets.ends:
            self._sockets.ends.remove(self)
            self.protocol.connection_lost(None)


class _Server:
    def __init__(self, sockets: UnixSockets, path: str) -> None:
        self._sockets = sockets
        self._path = path

    def close(self) -> None:
        self._sockets.servers.pop(self._path, None)


class UnixSockets:
    """All sockets of a run. `way_ms` draws how long bytes are on their way."""

    def __init__(self, clock: VirtualClock, way_ms: Callable[[], int]) -> None:
        self.clock = clock
        self.way_ms = way_ms
        self.servers: dict[str, tuple[SimulatedLoop, NewProtocol]] = {}
        self.ends: list[End] = []

    def listen(self, loop: SimulatedLoop, new_protocol: NewProtocol, path: str) -> Any:
        self.servers[path] = loop, new_protocol
        return _Server(self, path)

    async def connect(
        self, loop: SimulatedLoop, new_protocol: NewProtocol, path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        await asyncio.sleep(self.way_ms() / 1000)
        server = self.servers.get(path)
        if server is None:
            raise ConnectionRefusedError(f"nobody listens at {path}")
        near, far = End(self, loop), End(self, server[0])
        near.peer, far.peer = far, near
        self.ends += near, far
        far.arrive(far.open, server[1])
        near.open(new_protocol)
        return near, near.protocol

    def process_ended(self, loop: SimulatedLoop) -> None:
        for end in [end for end in self.ends if end.loop is loop]:
            self.ends.remove(end)
            end.peer.arrive(end.peer.end)
        for path in [path for path, (owner, _) in self.servers.items() if owner is loop]:
            del self.servers[path]
