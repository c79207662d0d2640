# SPDX-License-Identifier: Apache-2.0
"""TLS between a socket and a KafkaConnection: the handshake, then encryption and decryption.

Theory of operation. Everything here runs in the event loop. No step waits: OpenSSL works on two memory buffers, one for
bytes from the socket and one for bytes to the socket.

A listener with SSL gives each accepted socket a TlsTransport. For the event loop it is the protocol of the socket; for
the KafkaConnection it is the transport. The connection exists from the start, so that limits, idle closing and shutdown
apply to clients that never finish their handshake. A TlsTransport is in one of these states:

* *Waiting*: the connection has paused reading, because it came faster than max.connection.creation.rate. The handshake
  is the expensive part of a connection, so nothing is computed before the connection resumes reading.
* *Handshake*: bytes of the client advance the handshake, with the certificate that the listener had at its begin. The
  connection sees no bytes. After kcoord.ssl.handshake.timeout.ms the socket is closed.
* *Open*: bytes of the client are decrypted and passed to the connection; responses are encrypted and written. The
  principal of the client's certificate is known before the first request.
* *Closed*: a client that failed its handshake has got OpenSSL's alert, and the log says why it failed. A client that
  has a certificate without a principal, or an excluded cipher suite, is closed before its first request.

Python's and uvloop's own TLS transports are not used. They send no alert if a handshake fails, so clients retry what
cannot succeed. uvloop's also keeps a buffer of 256 KiB for each connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import cast

from kcoord.server.certificates import ListenerCertificates
from kcoord.server.net.connection import KafkaConnection

_READ_BYTES = 16 * 1024
"""The longest record of TLS. A read never returns more than one record, and a longer buffer only costs memory."""
_NO_TLS = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "WRONG_VERSION_NUMBER")
"""OpenSSL's reasons if the first bytes of a client are of another protocol."""


class TlsTransport(asyncio.Transport, asyncio.Protocol):
    """The protocol of a socket and the transport of its connection; the module describes its states.

    `report` logs a line that any client can cause.
    """

    def __init__(
        self, connection: KafkaConnection, certificates: ListenerCertificates, report: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._connection = connection
        self._certificates = certificates
        self._report = report
        self._is_open = False
        self._is_reading_paused = False
        self._tls: ssl.SSLObject | None = None
        """None until the handshake begins."""

    # --- called by the event loop -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._connection.connection_made(self)
        if not self._is_reading_paused and not self._socket.is_closing():
            self._begin_handshake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._tls is not None:
            self._timer.cancel()
        self._connection.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._incoming.write(data)
        if self._tls is not None and (self._is_open or self._shake_hands(self._tls)):
            self._decrypt(self._tls)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    # --- handshake and decryption -------------------------------------------------------------------------------------

    def _begin_handshake(self) -> None:
        loop = asyncio.get_running_loop()
        context = self._certificates.context(loop.time())
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        seconds = self._certificates.handshake_timeout_seconds
        self._timer = loop.call_later(seconds, self._fail, f"it is not finished after {seconds:g} s")

    def _shake_hands(self, tls: ssl.SSLObject) -> bool:
        """Continues the handshake. Returns True once the connection may read requests."""
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return False
        except ssl.SSLError as error:
            self._send()
            self._fail(_reason(error))
            return False
        self._send()
        self._timer.cancel()
        try:
            self._connection.path.client.principal = self._certificates.principal_of(tls)
        except ValueError as error:
            self._fail(str(error))
            return False
        self._is_open = True
        self._connection.path.handshake_ended(succeeded=True)
        return True

    def _fail(self, reason: str) -> None:
        if not self._socket.is_closing():
            # A certificate may have control characters in its names.
            shown = "".join([character if character.isprintable() else "?" for character in reason])
            self._report(f"{self._connection.peer}: closing, the TLS handshake failed: {shown}")
            self._connection.path.handshake_ended(succeeded=False)
            self._socket.close()

    def _decrypt(self, tls: ssl.SSLObject) -> None:
        """Passes on what can be decrypted. Closes the socket after the client's last record."""
        parts, is_over = [], False
        try:
            while part := tls.read(_READ_BYTES):
                parts.append(part)
                # Most input is a whole number of records. A read that finds nothing raises, which costs as much as the
                # decryption of a heartbeat.
                if not self._incoming.pending and not tls.pending():
                    break
            else:
                is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            is_over = True
            self._report(f"{self._connection.peer}: closing, TLS failed: {_reason(error)}")
        if parts:
            self._connection.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        self._send()
        if is_over:
            self._connection.close()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._socket.write(self._outgoing.read())

    # --- called by the connection -------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypts and sends bytes. The connection writes nothing before the handshake is over."""
        if self._tls is None or self._socket.is_closing():
            return
        try:
            self._tls.write(data)
        except ssl.SSLError:
            # After an error of the client nothing can be encrypted, and the socket is closed soon.
            return
        self._send()

    def pause_reading(self) -> None:
        self._is_reading_paused = True
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Reads again. Begins the handshake if the connection has waited for its turn."""
        self._is_reading_paused = False
        self._socket.resume_reading()
        if self._tls is None:
            self._begin_handshake()
            # The socket may have passed on bytes that it had read before the pause.
            self.data_received(b"")

    def close(self) -> None:
        """Sends what is written and the end of the TLS session, and closes the socket."""
        if self._tls is not None and self._is_open and not self._socket.is_closing():
            # The client has not ended its side. Nobody waits for that.
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._send()
        self._socket.close()

    def abort(self) -> None:
        self._socket.abort()

    def is_closing(self) -> bool:
        return self._socket.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._socket.get_write_buffer_size()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._tls if name == "ssl_object" else self._socket.get_extra_info(name, default)


def _reason(error: ssl.SSLError) -> str:
    """Returns why TLS failed, as a text for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the client is not valid: {error.verify_message}"
    reason = error.reason or str(error)
    if reason in _NO_TLS:
        return "the first bytes are not TLS: the client does not use SSL, this listener does"
    return reason.replace("_", " ").lower()
