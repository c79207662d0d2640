# SPDX-License-Identifier: Apache-2.0
"""A listener: binding its address, accepting connections, and suspending both.

Its life: `bind` takes the address, so a port that is in use fails the start early. `start_accepting` follows once the
broker can answer. `stop_accepting` closes the sockets and connections finish their requests in flight.
`suspend` and `resume` take a broker out of service and back without giving up the address.
Everything runs in the event loop.

uvloop accepts one connection in each turn of the event loop. A turn may take milliseconds, for example if members join
a large group, and many clients that connect at once would wait for as many turns. So each time that the server of
uvloop has accepted a connection, the listener accepts those that wait behind it (`_accept_waiting`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from kcoord.config.key import ConfigError
from kcoord.server.errors import StartError
from kcoord.server.net.connection import Connections
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath

if TYPE_CHECKING:
    from kcoord.config import Listener
    from kcoord.metadata.image import ScramCredential
    from kcoord.security.login_states import LoginStates
    from kcoord.security.scram import TokenLogin
    from kcoord.server.broker import Broker
    from kcoord.server.certificates import ListenerCertificates
    from kcoord.server.logins import ListenerLogins
    from kcoord.server.net.connection_limits import ConnectionLimits

_logger = logging.getLogger(__name__)

SYSTEM_BUFFER = -1
"""A buffer size that leaves the choice to the operating system, which adapts it to each connection."""

MOST_WAITING_ACCEPTS: Final = 64
"""The number of further connections that the listener accepts in one turn, which takes about 3 ms."""


class SocketListener:
    """One bound address with its connections. `inherited`: sockets that a supervisor has already bound to it."""

    def __init__(
        self, address: Listener, broker: Broker, limits: ConnectionLimits, inherited: Sequence[socket.socket] = ()
    ) -> None:
        self.address = address
        self.broker = broker
        self._logins = self._own_logins()
        new_login: Callable[[], LoginStates] | None = None
        if self._logins is not None:
            # Most brokers have no listener with SASL, and do not load what it needs.
            from kcoord.security.sasl import SaslAuthenticator

            new_login = partial(SaslAuthenticator, self._logins.settings)
        self.path_settings = PathSettings.of(broker, address.name, new_login)
        self._limits = limits
        self.connections = Connections(
            limits,
            partial(RequestPath, self.path_settings),
            broker.config.kcoord_response_buffer_max_bytes,
            broker.config.kcoord_sasl_login_timeout_ms / 1000,
        )
        self._inherited = inherited
        self._certificates = _certificates_of(address, broker)
        self._servers: list[asyncio.Server] = []
        self._listening: list[socket.socket] = []
        """Duplicates of the servers' listening sockets; uvloop does not accept through its own objects."""
        self._openings: set[asyncio.Task[None]] = set()
        """Keeps the tasks alive that open accepted connections; each of them ends in its next turn."""

    def _own_logins(self) -> ListenerLogins | None:
        """Returns the logins that this broker decides, None if there are none.

        Raises StartError if clients could not log in.
        """
        return _logins_of(self.address, self.broker)

    async def bind(self) -> int:
        """Binds the address and returns its port, which differs from the configured port if that is 0.

        Raises OSError if the address is not available.
        """
        loop = asyncio.get_running_loop()
        backlog = max(self.broker.config.socket_listen_backlog_size, 1)
        for bound in self._inherited:
            # A server closes its socket when it ends. It gets a duplicate, so the listener keeps the address.
            self._servers.append(
                await loop.create_server(self._accept_waiting, sock=bound.dup(), backlog=backlog, start_serving=False)
            )
        if not self._servers:
            host = self.address.host or None
            self._servers.append(
                await loop.create_server(
                    self._accept_waiting, host, self.address.port, backlog=backlog, start_serving=False
                )
            )
        for server in self._servers:
            self._size_buffers(server)
            self._listening += [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
        for listening in self._listening:
            listening.setblocking(False)
        return int(self._servers[0].sockets[0].getsockname()[1])

    def _accept_waiting(self) -> asyncio.Protocol:
        """Returns the protocol of a socket that a server has accepted, and accepts connections that wait."""
        for listening in self._listening:
            for _ in range(MOST_WAITING_ACCEPTS):
                try:
                    accepted, address = listening.accept()
                except OSError:
                    # Mostly no connection waits. If the process has no free file descriptor, the server handles that.
                    break
                refusal = self._limits.files_refusal(accepted.fileno())
                if refusal is not None:
                    # A transport would keep the descriptor for some turns, in which more connections are accepted.
                    accepted.close()
                    self.connections.report(f"{address[0]}:{address[1]}: connection refused, {refusal}")
                    continue
                opening = asyncio.get_running_loop().create_task(self._open(accepted))
                self._openings.add(opening)
                opening.add_done_callback(self._openings.discard)
        return self._new_protocol()

    async def _open(self, accepted: socket.socket) -> None:
        if self._listening:
            await asyncio.get_running_loop().connect_accepted_socket(self._new_protocol, accepted)
        else:
            accepted.close()

    def _new_protocol(self) -> asyncio.Protocol:
        """Returns the protocol of a newly accepted socket."""
        connection = self.connections.open()
        if self._certificates is None:
            return connection
        from kcoord.server.net.tls_transport import TlsTransport

        return TlsTransport(connection, self._certificates, self.connections.report)

    def _size_buffers(self, server: asyncio.Server) -> None:
        """Sets the buffer sizes of the listening sockets, which accepted connections inherit.

        The operating system may round and limit them.
        """
        config = self.broker.config
        for option, size_bytes in (
            (socket.SO_SNDBUF, config.socket_send_buffer_bytes),
            (socket.SO_RCVBUF, config.socket_receive_buffer_bytes),
        ):
            if size_bytes != SYSTEM_BUFFER:
                for bound in server.sockets:
                    bound.setsockopt(socket.SOL_SOCKET, option, size_bytes)

    async def start_accepting(self) -> None:
        """Accepts connections from now on. Raises StartError if a dynamic config of its security cannot be used."""
        try:
            if self._certificates is not None:
                self._certificates.begin(asyncio.get_running_loop().time())
            if self._logins is not None:
                self._logins.begin()
        except ValueError as error:
            raise StartError(str(error)) from None
        for server in self._servers:
            await server.start_serving()
        self.connections.close_idle_after(self.broker.config.connections_max_idle_ms / 1000)

    # --- shutdown -----------------------------------------------------------------------------------------------------

    def stop_accepting(self) -> None:
        for server in self._servers:
            server.close()
        for listening in self._listening:
            listening.close()
        self._listening.clear()
        self.connections.stop_reading()
        if self._logins is not None:
            self._logins.stop()

    def suspend(self) -> None:
        """Closes all connections and refuses new ones, but keeps the address. For inherited sockets only."""
        self.stop_accepting()
        self._servers.clear()
        for bound in self._inherited:
            # shutdown() stops listening in every process that shares the socket. A socket that does not listen would
            # stay marked as shut down, and so would the connections that it accepts after `resume`.
            if bound.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                bound.shutdown(socket.SHUT_RDWR)
        self.connections.close()

    async def resume(self) -> None:
        """Accepts connections again after `suspend`."""
        await self.bind()
        await self.start_accepting()


def _certificates_of(address: Listener, broker: Broker) -> ListenerCertificates | None:
    """Returns the certificates of a listener with SSL, None for another one.

    Raises StartError if there is no usable certificate.
    """
    if not address.security_protocol.has_tls:
        return None
    # Most brokers have no listener with SSL, and do not load what certificates need.
    from kcoord.security.tls import TlsConfigError
    from kcoord.server.certificates import ListenerCertificates

    try:
        certificates = ListenerCertificates(broker.config, address)
    except TlsConfigError as error:
        raise StartError(str(error)) from None
    broker.config.further_checks.append(certificates.check)
    return certificates


def _logins_of(address: Listener, broker: Broker) -> ListenerLogins | None:
    """Returns the logins of a listener with SASL, None for another one.

    Raises StartError if clients could not log in.
    """
    if not address.security_protocol.has_sasl:
        return None
    from kcoord.security.scram import Decoys
    from kcoord.server.logins import ListenerLogins

    def credential(mechanism: str, user: str) -> ScramCredential | None:
        return broker.image.scram_credentials.get((mechanism, user))

    def token(mechanism: str, token_id: str, now_ms: int) -> TokenLogin | None:
        from kcoord.security.token_login import token_login

        return token_login(broker.image, broker.config, mechanism, token_id, now_ms)

    counted: Mapping[tuple[str, str], ScramCredential] | None = None
    decoys = Decoys(b"", {})

    def current_decoys() -> Decoys:
        nonlocal counted, decoys
        credentials = broker.image.scram_credentials
        if credentials is not counted:
            # All workers share the folder and its random id, which clients without any permission never see.
            own = broker.image.brokers.get(broker.node_id)
            key = b"".join([broker.cluster_id.encode(), *(own.log_dirs if own is not None else ())])
            counted, decoys = credentials, Decoys.of(key, credentials)
        return decoys

    tokens = token if broker.config.delegation_token_secret_key else None
    try:
        logins = ListenerLogins(broker.config, address, credential, current_decoys, tokens)
    except ConfigError as error:
        raise StartError(str(error)) from None
    broker.config.further_checks.append(logins.check)
    return logins
