# SPDX-License-Identifier: Apache-2.0
"""The event loop of one simulated process: an asyncio loop on virtual time, without threads. Its only sockets are
those between processes of one cluster.

Callbacks run in the order in which they were given, one turn of the loop after the other. What comes from outside
(arrivals, the disk, timers) enters by `enter`: where the process stands still it waits, in the order in which it came,
and where the process has ended it never happens. Work for threads is done by the loop itself, some time later. Contexts
(contextvars) are not kept apart: nothing that runs here uses them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from inspect import CORO_CREATED, getcoroutinestate
from math import ceil
from types import CoroutineType
from typing import Any, TypeAlias, TypeVar

from kcoord.simulation.clock import VirtualClock

T = TypeVar("T")
NewProtocol: TypeAlias = Callable[[], asyncio.Protocol]


class Handle(asyncio.TimerHandle):
    """A callback that can be cancelled; `when` matters to timers alone."""

    __slots__ = ()

    def __init__(self, when: float, callback: Callable[..., object], args: tuple[object, ...]) -> None:
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._when = when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = None
        self._args = ()

    def run(self) -> None:
        callback = self._callback
        if callback is not None:
            callback(*self._args)


class SimulatedLoop(asyncio.AbstractEventLoop):
    """See the module's text. `turn_ms` is how long the process is busy before it takes what came meanwhile; with 0 all
    that follows from an event happens in the same step. `begin_work` draws how long work takes that is for an
    executor, and the error that it ends with, and `on_error` is told of what nobody took care of.
    """

    def __init__(
        self,
        clock: VirtualClock,
        clock_rate: float,
        turn_ms: int,
        begin_work: Callable[[object], tuple[int, Exception | None]],
        on_error: Callable[[str, BaseException | None], None],
    ) -> None:
        self.sockets: UnixSockets | None = None
        """For processes that reach others; set before the process begins."""
        self.has_ended = False
        self.paused_until_ms = 0
        self._clock = clock
        self.clock_rate = clock_rate
        self._turn_ms = turn_ms
        self._begin_work = begin_work
        self._on_error = on_error
        self._started_ms = clock.now_ms
        self._ready: deque[Handle] = deque()
        self._is_turn_due = False
        self._is_running = False
        self.turns = 0
        self.actions = 0
        """How much has come from outside and was taken."""

    # Time.

    def elapsed_ms(self) -> int:
        """By the clock of the process, which may be a slow one."""
        return int((self._clock.now_ms - self._started_ms) * self.clock_rate)

    def time(self) -> float:
        return self.elapsed_ms() / 1000

    def after(self, delay_ms: int, action: Callable[..., object], *args: object) -> None:
        """The delay is by the clock of the process."""
        self._clock.after(ceil(delay_ms / self.clock_rate), lambda: self.enter(action, *args))

    def end(self) -> None:
        """The process is gone. Python would complain of coroutines that nobody has begun."""
        self.has_ended = True
        if self.sockets is not None:
            self.sockets.process_ended(self)
        for task in asyncio.all_tasks(self):
            coroutine = task.get_coro()
            if isinstance(coroutine, CoroutineType) and getcoroutinestate(coroutine) == CORO_CREATED:
                coroutine.close()

    # What comes from outside.

    def enter(self, action: Callable[..., object], *args: object) -> None:
        """Runs `action` as soon as the process can, and all that follows from it."""
        if self.has_ended:
            return
        if self._is_running or self._turn_ms or self._ready or self._clock.now_ms < self.paused_until_ms:
            self.call_soon(self._act, action, *args)
            return
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            self._act(action, *args)
            while self._ready and not self.has_ended:
                self._turn()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)

    def _act(self, action: Callable[..., object], *args: object) -> None:
        self.actions += 1
        action(*args)

    def _schedule_turn(self) -> None:
        self._is_turn_due = True
        self._clock.at(max(self._clock.now_ms + self._turn_ms, self.paused_until_ms), self._take_turn)

    def _take_turn(self) -> None:
        self._is_turn_due = False
        if self.has_ended or not self._ready:
            return
        if self._clock.now_ms < self.paused_until_ms:
            self._schedule_turn()
            return
        asyncio._set_running_loop(self)
        self._is_running = True
        try:
            self._turn()
            while self._ready and not self._turn_ms and not self.has_ended:
                self._turn()
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
        if self._ready and not self._is_turn_due:
            self._schedule_turn()

    def _turn(self) -> None:
        self.turns += 1
        ready = self._ready
        for _ in range(len(ready)):
            ready.popleft().run()
            if self.has_ended:
                return

    # What asyncio asks of a loop.

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(0.0, callback, args)
        self._ready.append(handle)
        if not self._is_turn_due and not self._is_running and not self.has_ended:
            self._schedule_turn()
        return handle

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        return self.call_soon(callback, *args)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        handle = Handle(self.time() + delay, callback, args)
        self.after(ceil(delay * 1000), handle.run)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: object = None
    ) -> Handle:
        return self.call_later(max(when - self.time(), 0.0), callback, *args)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: object = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(coro, loop=self)

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        work_ms, failure = self._begin_work(executor)

        def work() -> None:
            if future.cancelled():
                return
            try:
                if failure is not None:
                    raise failure
                value = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self.after(work_ms, work)
        return future

    async def create_unix_connection(  # type: ignore[override]
        self, protocol_factory: NewProtocol, path: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        assert self.sockets is not None
        return await self.sockets.connect(self, protocol_factory, path)

    async def create_unix_server(  # type: ignore[override]
        self, protocol_factory: NewProtocol, *, sock: str
    ) -> Any:
        assert self.sockets is not None
        return self.sockets.listen(self, protocol_factory, sock)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.has_ended:
            self._on_error(context["message"], context.get("exception"))

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self.has_ended


class SocketEnd(asyncio.Transport):
    """One end of a connection. `peer` and `protocol` are set when it is made."""

    peer: SocketEnd
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
    """How the processes of one cluster reach each other: bytes take their time, stay in order, and are never lost. A
    connection ends with the process at either end. `way_ms` draws how long bytes are on their way.
    """

    def __init__(self, clock: VirtualClock, way_ms: Callable[[], int]) -> None:
        self.clock = clock
        self.way_ms = way_ms
        self.servers: dict[str, tuple[SimulatedLoop, NewProtocol]] = {}
        self.ends: list[SocketEnd] = []

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
        near, far = SocketEnd(self, loop), SocketEnd(self, server[0])
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
