# SPDX-License-Identifier: Apache-2.0
"""The control over HTTP, for programs in any language: a JSON request, a JSON response.

The server is Python's `ThreadingHTTPServer`, with a thread per connection. Each request runs in the broker's event
loop, and its thread waits for the response. Only test mode opens it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, urlsplit

from kcoord.testing.errors import ControlError

if TYPE_CHECKING:
    from kcoord.testing.controller import BrokerController

MOST_BODY_BYTES: Final = 64 * 1024 * 1024


class HttpControl:
    """Serves from its construction until `close`. Raises OSError if the address cannot be bound."""

    def __init__(self, host: str, port: int, controller: BrokerController, loop: asyncio.AbstractEventLoop) -> None:
        class Handler(_Handler):
            pass

        Handler.controller, Handler.loop = controller, loop
        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="kcoord-control", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """One connection. The base class calls the `do_` methods by their names."""

    controller: BrokerController
    loop: asyncio.AbstractEventLoop
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def log_message(self, format: str, *arguments: object) -> None:
        """Logs nothing, since the broker's history has more details."""

    def _serve(self) -> None:
        try:
            status, answer = 200, self._answer()
        except ControlError as error:
            status, answer = error.status, {"error": error.text}
        data = json.dumps(answer, indent=2, ensure_ascii=False).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _answer(self) -> object:
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query, keep_blank_values=True))
        body = self._body()
        work = self.controller.handle(self.command, address.path, query, body)
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _body(self) -> object:
        if "Transfer-Encoding" in self.headers:
            self.close_connection = True
            raise ControlError("a body needs a Content-Length", 411)
        length = self.headers.get("Content-Length", "0")
        if not length.isdigit() or int(length) > MOST_BODY_BYTES:
            self.close_connection = True
            raise ControlError(f"Content-Length must be 0 to {MOST_BODY_BYTES}, not {length}", 413)
        data = self.rfile.read(int(length))
        if not data.strip():
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ControlError(f"the body is not valid JSON: {error}") from None
