# SPDX-License-Identifier: Apache-2.0
"""Connections of a test broker: each request is shown to the monitor, and meets the fault that the monitor names.

This is a table of APIs put in front of the broker's own: a broker outside test mode has nothing of it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from kcoord.server.api.api_table import ApiTable, BoundApi
from kcoord.server.net.connection import KafkaConnection
from kcoord.server.net.listener import SocketListener
from kcoord.testing.faults import Fault, Outcome
from kcoord.testing.monitor import CONTROL_CLIENT_ID, Monitor
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ProduceRequest

if TYPE_CHECKING:
    from kcoord.config import Listener
    from kcoord.server.api.api_table import Api
    from kcoord.server.api.request_context import RequestContext
    from kcoord.server.broker import Broker
    from kcoord.server.net.connection import ConnectionOwner
    from kcoord.server.net.connection_limits import ConnectionLimits
    from kcoord_protocol.messages import Message


class InstrumentedConnection(KafkaConnection):
    """A connection whose requests are watched. `gone` ends the wait of those that are never answered."""

    def __init__(self, owner: ConnectionOwner) -> None:
        super().__init__(owner)
        assert isinstance(owner, InstrumentedListener)
        self.monitor = owner.monitor
        self.gone = asyncio.Event()
        self._use_apis(owner.broker.apis)

    def _use_apis(self, apis: ApiTable) -> None:
        super()._use_apis(InstrumentedApis(apis, self))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.gone.set()


class InstrumentedListener(SocketListener):
    """A listener of such connections. What is answered from memory would not be seen, so nothing is."""

    connection_class = InstrumentedConnection

    def __init__(self, address: Listener, broker: Broker, limits: ConnectionLimits, monitor: Monitor) -> None:
        super().__init__(address, broker, limits)
        self.monitor = monitor
        self.has_fast_paths = False
        self.metadata_answers = None

    def abort_connections(self) -> None:
        """Ends all connections at once, also those that wait for an answer that is not to come."""
        for connection in list(self._connections):
            connection.abort()


class InstrumentedApis(ApiTable):
    """The APIs of a broker, as one connection sees them."""

    __slots__ = ("_connection",)

    def __init__(self, apis: ApiTable, connection: InstrumentedConnection) -> None:
        super().__init__(apis.apis.values(), apis.form)
        self._connection = connection

    def new_bound(self, api: Api, version: int) -> BoundApi:
        return InstrumentedApi(api, version, self._connection)


class InstrumentedApi(BoundApi):
    """An API in one version, on one connection."""

    __slots__ = ("_connection",)

    def __init__(self, api: Api, version: int, connection: InstrumentedConnection) -> None:
        super().__init__(api, version)
        self._connection = connection

    def respond(self, broker: Broker, context: RequestContext, request: Message) -> object:
        if context.client_id == CONTROL_CLIENT_ID:
            return super().respond(broker, context, request)
        fault = self._connection.monitor.observe(context, request)
        if fault is None:
            return super().respond(broker, context, request)
        return broker.spawn(self._meet(fault, broker, context, request))

    async def _meet(self, fault: Fault, broker: Broker, context: RequestContext, request: Message) -> object:
        response = await self._handled(broker, context, request) if fault.after_handling else None
        if fault.delay_ms:
            await asyncio.sleep(fault.delay_ms / 1000)
        match fault.outcome:
            case Outcome.CLOSE:
                self._connection.abort()
                return None
            case Outcome.DROP:
                self._connection.monitor.hang(fault, self._connection.abort)
                await self._connection.gone.wait()
                return None
            case Outcome.ERROR:
                return self._error(fault, request)
        return response if fault.after_handling else await self._handled(broker, context, request)

    async def _handled(self, broker: Broker, context: RequestContext, request: Message) -> object:
        response = super().respond(broker, context, request)
        if not asyncio.isfuture(response):
            return response
        future = cast("asyncio.Future[object]", response)
        await asyncio.wait([future])
        return self.settle(future, request)

    def _error(self, fault: Fault, request: Message) -> object:
        """As the API tells it. A producer that wants no acknowledgement hears of an error by losing its connection."""
        if self.key is ApiKey.PRODUCE and isinstance(request, ProduceRequest) and request.acks == 0:
            self._connection.abort()
            return None
        return self._error_response(request, KafkaError(fault.error, fault.message), self.version)
