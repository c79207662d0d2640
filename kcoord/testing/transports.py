# SPDX-License-Identifier: Apache-2.0
"""The two ways to a broker's control: a thread of this process, or HTTP to another one. Both block their caller."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from http.client import HTTPConnection
from typing import IO, Final, Protocol, TypeVar
from urllib.parse import urlencode

from kcoord.testing.controller import BrokerController
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.host import BrokerHost

T = TypeVar("T")

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
CALL_SECONDS: Final = 600.0
"""Longer than anything takes that the control does by itself; waits have timeouts of their own."""

_READY = re.compile(r"^kcoord is ready: .*control (http://([^\s:]+):(\d+))", re.MULTILINE)


class Transport(Protocol):
    """Carries requests to a broker's control."""

    @property
    def control_url(self) -> str | None: ...

    def call(self, method: str, path: str, query: Mapping[str, str], body: object) -> object:
        """The answer; ControlError says what was wrong."""

    def close(self) -> None: ...


class LoopThread:
    """An event loop in a thread of its own, in which any number of brokers live."""

    def __init__(self) -> None:
        import uvloop

        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kcoord-brokers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[object, object, T], seconds: float = CALL_SECONDS) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class ThreadTransport:
    """A broker in this process."""

    control_url = None

    def __init__(self, thread: LoopThread, settings: Mapping[str, str]) -> None:
        self._thread = thread
        self._host = BrokerHost(settings)
        thread.run(self._host.start())
        self._controller = BrokerController(self._host)

    def call(self, method: str, path: str, query: Mapping[str, str], body: object) -> object:
        return self._thread.run(self._controller.handle(method, path, query, body))

    def close(self) -> None:
        self._thread.run(self._close())

    async def _close(self) -> None:
        await self._controller.close()
        await self._host.stop()


class ProcessTransport:
    """A broker in a process that this one starts: `kcoord serve --test-mode`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "kcoord", "serve", "--test-mode"]
        # Checked here: the process would only warn of keys that no broker knows.
        BrokerHost(settings)
        for key, value in settings.items():
            command += ["--override", f"{key}={value}"]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        self.control_url: str | None = None
        self._host, self._port = self._wait_until_ready()

    def _wait_until_ready(self) -> tuple[str, int]:
        """Reads the ready line. A process that says nothing for too long is ended, which ends the reading, too."""
        watch = threading.Timer(START_SECONDS, self._process.kill)
        watch.start()
        try:
            assert self._process.stdout is not None
            said = self._process.stdout.readline()
        finally:
            watch.cancel()
        found = _READY.search(said)
        if found is None:
            text = f"kcoord did not start: {said}{self._said_at_last()}"
            self.close()
            raise ControlError(text, 503)
        self.control_url = found[1]
        return found[2], int(found[3])

    def _said_at_last(self) -> str:
        self._process.kill()
        self._process.wait()
        return self._said()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def call(self, method: str, path: str, query: Mapping[str, str], body: object) -> object:
        connection = HTTPConnection(self._host, self._port, timeout=CALL_SECONDS)
        try:
            target = path + (f"?{urlencode(query)}" if query else "")
            connection.request(method, target, None if body is None else json.dumps(body))
            response = connection.getresponse()
            answer = json.loads(response.read())
        except OSError as error:
            raise ControlError(
                f"the broker's control does not answer: {error}; its log:\n{self._said()}", 503
            ) from None
        finally:
            connection.close()
        if response.status == 408:
            raise WaitTimeout(answer["error"])
        if response.status >= 400:
            raise ControlError(answer["error"], response.status)
        return answer

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
