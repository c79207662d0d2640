# SPDX-License-Identifier: Apache-2.0
"""A listener whose connections pass requests on to the upstream. Its security is that of every listener of kcoord."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from kcoord.config import Listener
from kcoord.server.broker import Broker
from kcoord.server.net.connection import Connections, KafkaConnection
from kcoord.server.net.connection_limits import ConnectionLimits
from kcoord.server.net.listener import SocketListener
from kcoord.upstream.gateway import Gateway
from kcoord.upstream.splice import SplicedPath


class UpstreamConnection(KafkaConnection):
    """A client connection whose path also writes to the transport itself."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(self.path, SplicedPath)
        self.path.attach(cast("asyncio.Transport", transport))
        super().connection_made(transport)


class UpstreamConnections(Connections):
    """The connections of an UpstreamListener."""

    def open(self) -> KafkaConnection:
        return UpstreamConnection(self)


class UpstreamListener(SocketListener):
    """The port of a broker of the upstream, or kcoord's own port if `node_id` is None."""

    def __init__(
        self, address: Listener, broker: Broker, limits: ConnectionLimits, gateway: Gateway, node_id: int | None = None
    ) -> None:
        super().__init__(address, broker, limits)
        # The upstream's responses about topics are passed on, and only kcoord's own port answers groups.
        self.path_settings.metadata_answers = None
        self.path_settings.has_fast_paths &= node_id is None
        self.connections = UpstreamConnections(
            limits,
            partial(SplicedPath, self.path_settings, gateway, node_id),
            self.connections.max_unread_bytes,
            self.connections.login_timeout_seconds,
        )
