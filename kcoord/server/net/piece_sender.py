# SPDX-License-Identifier: Apache-2.0
"""Sends responses of which parts are in files, without reading the files if the kernel can send them.

Theory of operation. A connection has a PieceSender while it has pieces that are not sent yet. Everything here runs in
the event loop. A sender has one of two ways:

* *By the kernel*, on a connection without TLS: `os.sendfile` passes bytes from the page cache to the socket. The
  transport of the event loop has no such call that would not wait. So the sender uses the socket itself, by a duplicate
  of its descriptor, and only while nothing is in the buffer of the transport. If the socket takes no more bytes, the
  event loop calls the sender when it does (`add_writer` of the duplicate; the original belongs to the transport).
* *By the transport*, with TLS, or if there is no socket or no descriptor for it: parts of READ_BYTES are read and
  written. If the transport calls `pause_writing`, the connection calls `pause`, and later `resume`.

The states: *sending*, until the socket is full or TURN_BYTES are sent, so that other connections get their turn;
*waiting* for the socket, for the transport or for the next turn; *done*, when `on_done` is called. `close` ends it in
any state. After `on_done` or `close` a sender is not used again.

A part of a file may be sent long after it was found, if a client reads slowly. The open file keeps its bytes, also if
its log deletes or replaces it meanwhile. Memory is needed only for the bytes between the parts of files
(`memory_bytes`), however many clients read slowly.

A file that cannot be read, or that another program has truncated, ends the connection: a part of the response has
already left.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

from kcoord.server.api.pieces import Pieces
from kcoord.storage.file_system import FileSlice

READ_BYTES: Final = 64 << 10
TURN_BYTES: Final = 128 << 10
"""More would make a Fetch a tenth cheaper, and the heartbeats of other connections wait longer."""
_MORE_FOLLOWS: Final = getattr(socket, "MSG_MORE", 0)
"""Tells the kernel, if that is Linux, not to make a packet of the bytes yet."""
_NOT_BY_KERNEL: Final = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of `sendfile` if the file system of the log does not support it."""


class PieceSender:
    """The pieces of one connection that are not sent yet. The module describes its states.

    `on_done` is called once everything is sent, unless `send` has returned True. `on_failure` is called with the reason
    if a part of a file cannot be sent, and with None if the client is gone.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        on_done: Callable[[], None],
        on_failure: Callable[[str | None], None],
        *,
        is_paused: bool,
    ) -> None:
        self._transport = transport
        self._on_done = on_done
        self._on_failure = on_failure
        self._is_paused = is_paused
        self._pieces: deque[bytes | FileSlice] = deque()
        self._sent_of_first = 0
        """The number of bytes of the first piece that are sent."""
        self._turn: asyncio.Handle | None = None
        self._waits_for_socket = False
        self._socket = _duplicate_socket(transport)
        self._has_sendfile = True

    @property
    def memory_bytes(self) -> int:
        """The number of bytes that are in memory and not sent yet."""
        return sum([len(piece) for piece in self._pieces if isinstance(piece, bytes)])

    @property
    def unsent_bytes(self) -> int:
        return sum(map(len, self._pieces)) - self._sent_of_first

    def send(self, data: bytes | Pieces) -> bool:
        """Sends the data after what was passed before. Returns True if all is sent; the sender is closed then."""
        if isinstance(data, bytes):
            self._pieces.append(data)
        else:
            self._pieces += data
        return not self._is_waiting and self._advance()

    def pause(self) -> None:
        """The transport takes no more bytes for now."""
        self._is_paused = True

    def resume(self) -> None:
        """The transport takes bytes again."""
        self._is_paused = False
        if not self._is_waiting:
            self._continue()

    def close(self) -> None:
        """Drops what is not sent."""
        self._pieces.clear()
        self._sent_of_first = 0
        if self._turn is not None:
            self._turn.cancel()
        if self._socket is not None:
            self._wait_for_socket(self._socket, False)
            self._socket.close()
            self._socket = None

    # --- states -------------------------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        return self._turn is not None or self._waits_for_socket or (self._is_paused and self._socket is None)

    def _continue(self) -> None:
        self._turn = None
        if self._advance():
            self._on_done()

    def _advance(self) -> bool:
        """Sends until there is a reason to wait. Returns True if all is sent."""
        try:
            if self._socket is None:
                self._send_by_transport()
            else:
                self._send_by_kernel(self._socket)
        except OSError as error:
            self.close()
            self._on_failure(None if isinstance(error, ConnectionError) else f"a part of a file was not sent: {error}")
            return False
        if self._pieces:
            return False
        self.close()
        return True

    def _send_by_transport(self) -> None:
        left = TURN_BYTES
        while self._pieces and left > 0 and not self._is_paused:
            data = self._first_bytes()
            self._skip(len(data))
            left -= len(data)
            self._transport.write(data)
        if self._pieces and not self._is_paused:
            self._turn = asyncio.get_running_loop().call_soon(self._continue)

    def _send_by_kernel(self, own: socket.socket) -> None:
        left = 0 if self._transport.get_write_buffer_size() else TURN_BYTES
        try:
            while self._pieces and left > 0:
                sent = self._send_first(own, left)
                self._skip(sent)
                left -= sent
        except BlockingIOError:
            pass
        self._wait_for_socket(own, bool(self._pieces))

    def _wait_for_socket(self, own: socket.socket, waits: bool) -> None:
        if waits and not self._waits_for_socket:
            asyncio.get_running_loop().add_writer(own.fileno(), self._continue)
        elif self._waits_for_socket and not waits:
            asyncio.get_running_loop().remove_writer(own.fileno())
        self._waits_for_socket = waits

    def _send_first(self, own: socket.socket, most_bytes: int) -> int:
        """Sends the first piece, or a part of it. Returns the number of bytes."""
        piece, sent_bytes = self._pieces[0], self._sent_of_first
        descriptor = None if isinstance(piece, bytes) else piece.file.descriptor
        if not isinstance(piece, bytes) and descriptor is not None and self._has_sendfile:
            size = min(piece.size - sent_bytes, most_bytes)
            try:
                return _not_zero(os.sendfile(own.fileno(), descriptor, piece.position + sent_bytes, size))
            except OSError as error:
                if error.errno not in _NOT_BY_KERNEL:
                    raise
                self._has_sendfile = False
        return own.send(self._first_bytes(), _MORE_FOLLOWS if len(self._pieces) > 1 else 0)

    def _first_bytes(self) -> bytes:
        """Returns the next bytes of the first piece: all of them, or READ_BYTES of a file."""
        piece, sent_bytes = self._pieces[0], self._sent_of_first
        if isinstance(piece, bytes):
            return piece[sent_bytes:] if sent_bytes else piece
        size = min(READ_BYTES, piece.size - sent_bytes)
        data = piece.file.read_at(piece.position + sent_bytes, size)
        _not_zero(len(data))
        return data

    def _skip(self, sent_bytes: int) -> None:
        self._sent_of_first += sent_bytes
        if self._sent_of_first >= len(self._pieces[0]):
            self._sent_of_first = 0
            self._pieces.popleft()


def _not_zero(size: int) -> int:
    if not size:
        raise OSError("the file ends too early")
    return size


def _duplicate_socket(transport: asyncio.Transport) -> socket.socket | None:
    """Returns a duplicate of the transport's socket. None if there is TLS, no socket, or no descriptor left."""
    original = transport.get_extra_info("socket")
    if original is None or transport.get_extra_info("ssl_object") is not None:
        return None
    try:
        duplicate = socket.socket(fileno=os.dup(original.fileno()))
    except OSError:
        return None
    duplicate.setblocking(False)
    return duplicate
