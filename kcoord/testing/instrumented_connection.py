# SPDX-License-Identifier: Apache-2.0
"""The connections of a test broker, which observe every request and apply faults to it.

Each connection has its own table of APIs (`InstrumentedApis`), which wraps the broker's table. Only test brokers have
it, so other brokers pay nothing. The steps of a request:

1. The monitor records the request and returns the fault that applies, if any. Requests of the control skip this step.
2. Without a fault, the broker handles the request as usual.
3. With `after_handling`, the broker handles the request before the fault. So its effects stay even if the client gets
   an error or no response.
4. The delay of the fault elapses.
5. The outcome follows: the normal response (the broker handles the request now if it has not yet), an error response,
   a closed connection, or a hanging connection. A hanging connection waits for its end: the client closes it, or the
   fault is removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

from kcoord.server.api.api_table import ApiTable, BoundApi
from kcoord.server.broker import Broker
from kcoord.server.net.connection import Connections, KafkaConnection
from kcoord.server.net.listener import SocketListener
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord.testing.faults import FaultOutcome, RequestFault
from kcoord.testing.monitor import CONTROL_CLIENT_ID, Monitor
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ProduceRequest

if TYPE_CHECKING:
    from kcoord.config import Listener
    from kcoord.server.api.api_table import Api, RequestContext
    from kcoord.server.net.connection_limits import ConnectionLimits
    from kcoord_protocol.messages import Message


class InstrumentedPath(RequestPath):
    """A request path whose requests are observed.

    `abort` closes the connection. `gone` is set when the connection is closed, and ends the wait of dropped requests.
    """

    def __init__(self, settings: PathSettings, monitor: Monitor, on_response: Callable[[], None]) -> None:
        self.monitor = monitor
        self.gone = asyncio.Event()
        self.abort: Callable[[], None] = self.gone.set
        super().__init__(settings, on_response)

    def _serve(self, apis: ApiTable) -> None:
        super()._serve(InstrumentedApis(apis, self))

    def close(self) -> None:
        super().close()
        self.abort = self.gone.set
        self.gone.set()


class InstrumentedConnection(KafkaConnection):
    """A connection that faults can close."""

    def __init__(self, owner: Connections) -> None:
        super().__init__(owner)
        assert isinstance(self.path, InstrumentedPath)
        self.path.abort = self.abort


class InstrumentedConnections(Connections):
    """Connections that faults can close."""

    def open(self) -> InstrumentedConnection:
        return InstrumentedConnection(self)


class InstrumentedListener(SocketListener):
    """A listener of instrumented connections. Fast paths bypass the API table, so they are disabled."""

    def __init__(self, address: Listener, broker: Broker, limits: ConnectionLimits, monitor: Monitor) -> None:
        super().__init__(address, broker, limits)
        settings = replace(self.path_settings, has_fast_paths=False, metadata_responses=None)
        self.connections = InstrumentedConnections(
            limits,
            partial(InstrumentedPath, settings, monitor),
            self.connections.max_unread_bytes,
            self.connections.login_timeout_seconds,
        )


class InstrumentedApis(ApiTable):
    """The APIs of a broker, wrapped for one connection."""

    __slots__ = ("_path",)

    def __init__(self, apis: ApiTable, path: InstrumentedPath) -> None:
        super().__init__(apis.apis.values(), apis.form, apis.siblings)
        self._path = path

    def new_bound(self, api: Api, version: int) -> BoundApi:
        return InstrumentedApi(api, version, self._path)


class InstrumentedApi(BoundApi):
    """An API in one version, on one connection."""

    __slots__ = ("_path",)

    def __init__(self, api: Api, version: int, path: InstrumentedPath) -> None:
        super().__init__(api, version)
        self._path = path

    def respond(self, broker: object, context: RequestContext, request: Message) -> object:
        assert isinstance(broker, Broker)
        if context.client_id == CONTROL_CLIENT_ID:
            return super().respond(broker, context, request)
        fault = self._path.monitor.observe(context, request)
        if fault is None:
            return super().respond(broker, context, request)
        return broker.spawn(self._meet(fault, broker, context, request))

    async def _meet(self, fault: RequestFault, broker: Broker, context: RequestContext, request: Message) -> object:
        response = await self._handled(broker, context, request) if fault.after_handling else None
        if fault.delay_ms:
            await asyncio.sleep(fault.delay_ms / 1000)
        match fault.outcome:
            case FaultOutcome.CLOSE:
                self._path.abort()
                return None
            case FaultOutcome.DROP:
                self._path.monitor.hang(fault, self._path.abort)
                await self._path.gone.wait()
                return None
            case FaultOutcome.ERROR:
                return self._error(fault, request)
        return response if fault.after_handling else await self._handled(broker, context, request)

    async def _handled(self, broker: Broker, context: RequestContext, request: Message) -> object:
        response = super().respond(broker, context, request)
        if not asyncio.isfuture(response):
            return response
        future = cast("asyncio.Future[object]", response)
        await asyncio.wait([future])
        return self.response_of(future, request)

    def _error(self, fault: RequestFault, request: Message) -> object:
        """Returns the error in the layout of the API. With acks=0 a producer's connection is closed instead."""
        if self.key is ApiKey.PRODUCE and isinstance(request, ProduceRequest) and request.acks == 0:
            self._path.abort()
            return None
        return self._error_response(request, KafkaError(fault.error, fault.message), self.version)
