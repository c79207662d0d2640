# SPDX-License-Identifier: Apache-2.0
"""Sends the metrics that clients push to an OpenTelemetry collector, over OTLP/HTTP."""

from __future__ import annotations

import logging
import queue
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Final

WAITING_PUSHES: Final = 1_000
SEND_SECONDS: Final = 5.0
REPORT_SECONDS: Final = 60.0
"""The shortest time between two log lines about failures."""

_logger = logging.getLogger(__name__)


class TelemetryExporter:
    """A bounded queue of pushes, and a thread that sends them to `endpoint`. The thread starts with the first push.

    The bytes are sent as they are: clients push MetricsData, a collector receives ExportMetricsServiceRequest, and both
    have the same encoding. A collector that is down or slow blocks nothing. Pushes that do not fit into the queue, or
    that the collector does not accept, are lost, and the log says so.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._waiting: queue.Queue[bytes | None] = queue.Queue(WAITING_PUSHES)
        self._thread: threading.Thread | None = None
        self._reported = -REPORT_SECONDS

    def export(self, metrics: bytes) -> None:
        """Queues one push. Never blocks."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(metrics)
        except queue.Full:
            self._report("more metrics wait than can be sent")

    def close(self) -> None:
        """Ends the thread after the pushes that are queued. Does not wait for it, since it may be sending."""
        while self._thread is not None:
            try:
                self._waiting.put_nowait(None)
                return
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._waiting.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        while (metrics := self._waiting.get()) is not None:
            try:
                self._send(metrics)
            except (OSError, HTTPException, urllib.error.URLError) as error:
                self._report(str(error))

    def _send(self, metrics: bytes) -> None:
        headers = {"Content-Type": "application/x-protobuf"}
        request = urllib.request.Request(self._endpoint, metrics, headers, method="POST")
        with urllib.request.urlopen(request, timeout=SEND_SECONDS) as answer:
            answer.read()

    def _report(self, reason: str) -> None:
        if time.monotonic() - self._reported >= REPORT_SECONDS:
            self._reported = time.monotonic()
            _logger.warning("Metrics of clients are lost, they cannot be sent to %s: %s", self._endpoint, reason)
