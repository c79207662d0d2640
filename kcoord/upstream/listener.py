# SPDX-License-Identifier: Apache-2.0
"""A listener whose connections pass requests on to the upstream.

Its security is that of every listener of kcoord, but logins may be passed on, too.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from kcoord.config import Listener
from kcoord.security.login_states import LoginStates
from kcoord.security.relayed_login import OAUTHBEARER, RelayedLogin
from kcoord.server.broker import Broker
from kcoord.server.logins import ListenerLogins
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
        self.path_settings.metadata_responses = None
        self.path_settings.has_fast_paths &= node_id is None
        if broker.config.passes_logins:
            self.path_settings.new_login = self._new_relayed_login
        self.connections = UpstreamConnections(
            limits,
            partial(SplicedPath, self.path_settings, gateway, node_id),
            self.connections.max_unread_bytes,
            self.connections.login_timeout_seconds,
        )

    def _own_logins(self) -> ListenerLogins | None:
        return None if self.broker.config.passes_logins else super()._own_logins()

    def _new_relayed_login(self) -> LoginStates:
        config = self.broker.config
        claim = config.value_for_listener(self.address, "sasl.oauthbearer.sub.claim.name", OAUTHBEARER)
        max_bytes = config.value_for_listener(self.address, "sasl.server.max.receive.size")
        assert isinstance(claim, str)
        assert isinstance(max_bytes, int)
        return RelayedLogin(max_bytes, config.connection_failed_authentication_delay_ms, claim)
