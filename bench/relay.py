# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.relay PORT`: passes bytes to a port on 127.0.0.1 and back. It shows the cost of a bare uvloop relay.

Each side reads only while the other one takes bytes, as in any relay that bounds its memory.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Side(asyncio.Protocol):
    """One side of a relayed connection. What it reads goes to `other`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.other: Side | None = None
        self._waiting: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def join(self, other: Side) -> None:
        self.other = other
        for data in self._waiting:
            self.data_received(data)
        self._waiting.clear()

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._waiting.append(data)
        elif self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


async def _serve(port: int) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def connect(client: Side) -> None:
        _, upstream = await loop.create_connection(Side, "127.0.0.1", port)
        upstream.join(client)
        client.join(upstream)

    def accept() -> Side:
        client = Side()
        task = loop.create_task(connect(client))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return client

    server = await loop.create_server(accept, "127.0.0.1", 0)
    print(f"relay is ready: 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
