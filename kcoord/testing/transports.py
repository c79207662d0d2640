# SPDX-License-Identifier: Apache-2.0
"""The two transports to a broker's control: a thread of this process, or HTTP to another process.

Both block the calling thread until the response is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping
from http.client import HTTPConnection
from typing import IO, Final, Protocol, TypeVar
from urllib.parse import urlencode

from kcoord.config.properties import ENVIRONMENT_PREFIX
from kcoord.testing.controller import BrokerController
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.host import BrokerHost

T = TypeVar("T")

START_SECONDS: Final = 30.0
STOP_SECONDS: Final = 10.0
CALL_SECONDS: Final = 600.0
"""An upper bound for every call, so that a hung broker cannot block forever. Waits have shorter timeouts."""

_READY = re.compile(r"^kcoord is ready: .*control (http://([^\s:]+):(\d+))", re.MULTILINE)


class Transport(Protocol):
    """Carries requests to a broker's control."""

    @property
    def control_url(self) -> str | None: ...

    def call(self, method: str, path: str, query: Mapping[str, str], body: object) -> object:
        """Sends a request and returns the decoded response. Raises ControlError if it fails."""

    def close(self) -> None: ...


class LoopThread:
    """An event loop in its own thread, which runs any number of brokers."""

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
    """A broker in a child process: `kcoord serve --test-mode`."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "kcoord", "serve", "--test-mode", "--end-with-stdin"]
        # Checks the settings here, since the process would only warn about unknown keys.
        BrokerHost(settings)
        for key, value in settings.items():
            command += ["--override", f"{key}={value}"]
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        # As for a broker in this process, settings in the environment have no effect.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        # An assignor of the test's own may be in a folder that only this process has in its path.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, text=True
        )
        self.control_url: str | None = None
        self._host, self._port = self._wait_until_ready()

    def _wait_until_ready(self) -> tuple[str, int]:
        """Reads the ready line. A process that is not ready in time is killed, which also ends the read."""
        watch = threading.Timer(START_SECONDS, self._process.kill)
        watch.start()
        try:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        ready = _READY.search(line)
        if ready is None:
            text = f"kcoord did not start: {line}{self._final_log()}"
            self.close()
            raise ControlError(text, 503)
        self.control_url = ready[1]
        return ready[2], int(ready[3])

    def _final_log(self) -> str:
        self._process.kill()
        self._process.wait()
        return self._read_log()

    def _read_log(self) -> str:
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
                f"the broker's control does not respond: {error}; its log:\n{self._read_log()}", 503
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
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()
