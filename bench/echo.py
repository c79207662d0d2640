# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.echo`: sends every frame back. It shows the cost of a Python server on uvloop without any work.

The path of a file with key and certificate, as an argument, makes it a server with TLS.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import cast

import uvloop


class Echo(asyncio.Protocol):
    """Cuts the input into frames, and writes the responses of one read at once, as a broker must."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        start, size, frames = 0, len(data), []
        while size - start >= 4:
            end = start + 4 + int.from_bytes(data[start : start + 4], "big")
            if end > size:
                break
            frames.append(data[start:end])
            start = end
        self._rest = data[start:]
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))


async def _serve(certificate: str | None) -> None:
    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0, ssl=context)
    print(f"echo is ready: 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1] if len(sys.argv) > 1 else None))
