# SPDX-License-Identifier: Apache-2.0
"""The event loop of one simulated process: an asyncio loop on virtual time, and the sockets between processes.

Theory of operation
-------------------
Order. Callbacks run in the order in which they were scheduled, one turn of the loop after the other. A turn runs the
callbacks that were ready when it began.

Events from outside. Arrivals, completed disk operations and timers call `enter`. Three cases:

* The process has ended: `enter` does nothing, so nothing happens in a process after its end.
* The process stands still (`paused_until_ms`), is inside a turn, or batches arrivals (`turn_ms` above 0): the event
  waits in the queue of ready callbacks, behind earlier events.
* Otherwise the event runs at once, with all callbacks that follow from it, in the same step of the simulation.

Time. `elapsed_ms` and `time` are the clock of the process, which runs at `clock_rate`. Delays given to `after`,
`call_later` and `call_at` are by that clock; the virtual clock of the run orders the events.

Threads. There are none. `run_in_executor` runs the function in the loop after a drawn time, or fails with a drawn
error.

asyncio's running loop is set only while a turn runs, so `asyncio.get_running_loop` fails elsewhere. A callback can make
another loop run a turn, for example if it starts a process.

Callbacks share one context (contextvars): no code that runs here uses them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from inspect import CORO_CREATED, getcoroutinestate
from math import ceil
from types import CoroutineType
from typing import Any, TypeAlias, TypeVar

from kcoord.simulation.clock import VirtualClock

T = TypeVar("T")
NewProtocol: TypeAlias = Callable[[], asyncio.Protocol]


@contextmanager
def running(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Makes `loop` asyncio's running loop. A callback or task of another loop that does so waits meanwhile."""
    outer = asyncio._get_running_loop()
    task = None if outer is None else asyncio.current_task(outer)
    if outer is not None and task is not None:
        # Since Python 3.14 a thread has one current task, not one for each loop.
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None and task is not None:
            asyncio.tasks._enter_task(outer, task)


class Handle(asyncio.TimerHandle):
    """A callback that can be cancelled. `when` matters only to timers."""

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
    """The event loop of one process.

    `turn_ms` is the time between an arrival and the turn that handles it, together with all arrivals meanwhile; with 0
    an arrival is handled in its own step. `begin_work` draws the duration of work for an executor, and its error if it
    is to fail. `on_error` receives errors that asyncio would log: exceptions that no code has retrieved.
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
        """The sockets to other processes of the cluster; set before the process begins."""
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
        """Number of events from outside that were handled."""

    # Time.

    def elapsed_ms(self) -> int:
        """Milliseconds since the loop began, by the clock of the process, which may be slow."""
        return int((self._clock.now_ms - self._started_ms) * self.clock_rate)

    def time(self) -> float:
        return self.elapsed_ms() / 1000

    def after(self, delay_ms: int, action: Callable[..., object], *args: object) -> None:
        """Runs `action` after a delay by the clock of the process."""
        self._clock.after(ceil(delay_ms / self.clock_rate), lambda: self.enter(action, *args))

    def end(self) -> None:
        """Ends the process: nothing runs in this loop any more.

        Closes coroutines that never started, because Python warns about them.
        """
        self.has_ended = True
        if self.sockets is not None:
            self.sockets.process_ended(self)
        for task in asyncio.all_tasks(self):
            coroutine = task.get_coro()
            if isinstance(coroutine, CoroutineType) and getcoroutinestate(coroutine) == CORO_CREATED:
                coroutine.close()

    # Events from outside.

    def enter(self, action: Callable[..., object], *args: object) -> None:
        """Runs `action`, and the callbacks that follow from it, as soon as the process can."""
        if self.has_ended:
            return
        if self._is_running or self._turn_ms or self._ready or self._clock.now_ms < self.paused_until_ms:
            self.call_soon(self._act, action, *args)
            return
        self._is_running = True
        try:
            with running(self):
                self._act(action, *args)
                while self._ready and not self.has_ended:
                    self._turn()
        finally:
            self._is_running = False

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
        self._is_running = True
        try:
            with running(self):
                self._turn()
                while self._ready and not self._turn_ms and not self.has_ended:
                    self._turn()
        finally:
            self._is_running = False
        if self._ready and not self._is_turn_due:
            self._schedule_turn()

    def _turn(self) -> None:
        self.turns += 1
        ready = self._ready
        for _ in range(len(ready)):
            ready.popleft().run()
            if self.has_ended:
                return

    # The interface of an asyncio loop.

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
    """One end of a connection between two processes. `peer` and `protocol` are set when it is opened."""

    peer: SocketEnd
    protocol: asyncio.Protocol

    def __init__(self, sockets: UnixSockets, loop: SimulatedLoop) -> None:
        super().__init__()
        self.loop = loop
        self._sockets = sockets
        self._is_closing = False
        self._arrival_ms = 0
        """Arrival time of the latest bytes from the other end."""

    def open(self, new_protocol: NewProtocol) -> None:
        self.protocol = new_protocol()
        self.protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self.peer.arrive(self.peer._receive, bytes(data))

    def arrive(self, action: Callable[..., object], *args: object) -> None:
        """Schedules an event from the other end, after all earlier ones."""
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
        """Ends the connection at this end; calls `connection_lost` once."""
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
    """The sockets between processes of one cluster.

    Bytes are delayed, stay in order and are never lost. A connection ends with the process at either end. `way_ms`
    draws the delay.
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
            raise ConnectionRefusedError(f"no process listens at {path}")
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
