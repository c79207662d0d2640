# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a broker: metrics for Prometheus at `/metrics`, and its state for load balancers and supervisors.

* `/ready`: whether clients should be sent here. It fails while the broker cannot serve groups.
* `/health`: whether the process works. It fails only if a restart may help, so not while an upstream is away.

The server has its own threads, one for each connection. They ask the event loop, and wait for its answer. So both pages
fail if the event loop hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import TimeoutError as ScrapeTimeout
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Final, TypeAlias
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kcoord.metrics.exposition import MetricsSnapshot, families

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

SCRAPE_SECONDS: Final = 10.0
READY_SECONDS: Final = 1.0

TakeSnapshot: TypeAlias = Callable[[], Coroutine[object, object, MetricsSnapshot]]


class BrokerCollector(Collector):
    """Collects the metrics of a scrape, in a thread of the HTTP server."""

    def __init__(
        self, take: Callable[[], Coroutine[object, object, MetricsSnapshot]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._take = take
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Returns nothing.

        Without this method the registry would collect when the collector is registered, in the thread of the event
        loop, and would wait there for the event loop itself.
        """
        return []

    def collect(self) -> Iterable[Metric]:
        """Returns the metric families. Runs in the thread of the metrics server."""
        coroutine = self._take()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: the broker stops
            coroutine.close()
            return []
        try:
            return families(future.result(SCRAPE_SECONDS))
        except ScrapeTimeout:
            future.cancel()
            raise


class PageHandler(WSGIRequestHandler):
    """Answers one request. Closes a connection whose client sends none in time."""

    timeout = SCRAPE_SECONDS

    def handle(self) -> None:
        """Ignores the failure of a connection, for which the server would print a traceback."""
        with suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Logs no requests."""


class MetricsServer:
    """Serves all pages. Raises OSError if host and port cannot be bound.

    `why_not_ready` is called in the event loop, and returns None if the broker is ready.
    """

    def __init__(
        self,
        host: str,
        port: int,
        take: TakeSnapshot,
        why_not_ready: Callable[[], str | None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(BrokerCollector(take, loop))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._why_not_ready = why_not_ready
        self._loop = loop
        self._server, self._thread = start_http_server(port, host, registry)
        self._server.RequestHandlerClass = PageHandler
        metrics = self._server.get_app()
        assert metrics is not None
        self._metrics = metrics
        self._server.set_app(self._serve)
        self.port = int(self._server.server_port)

    def _serve(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/ready":
                reason = self._ask(self._why_not_ready)
                text = "ready"
            case "/health":
                reason = self._ask(lambda: None)
                text = "healthy"
            case _:
                return self._metrics(environ, start_response)
        start_response("200 OK" if reason is None else "503 Service Unavailable", [("Content-Type", "text/plain")])
        return [f"{reason or text}\n".encode()]

    def _ask(self, question: Callable[[], str | None]) -> str | None:
        """Returns the answer of the event loop to a question, or why it does not answer. Runs in a server thread."""

        async def ask() -> str | None:
            return question()

        coroutine = ask()
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(READY_SECONDS)
        except RuntimeError:
            coroutine.close()
            return "the broker stops"
        except ScrapeTimeout:
            return f"the event loop does not answer within {READY_SECONDS:g} s"

    def close(self) -> None:
        """Stops accepting scrapes. Does not wait for a running scrape, since it may wait for the calling event loop."""
        Thread(target=self._end, name="kcoord-metrics-end", daemon=True).start()

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
