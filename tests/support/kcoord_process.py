# SPDX-License-Identifier: Apache-2.0
"""A kcoord broker in its own process, on free ports that stay the same after restarts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from tests.support.waiting import wait_until

START_SECONDS = 30.0
STOP_SECONDS = 10.0
_READY = re.compile(r"^kcoord is ready: (.*?), nodes? ", re.MULTILINE)
_PORT = re.compile(r"127\.0\.0\.1:(\d+)")

FAST: Mapping[str, str] = {
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "3000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "offsets.topic.num.partitions": "8",
}
"""Short timeouts, so that tests wait less."""


class KcoordProcess:
    """`kcoord serve` on 127.0.0.1 with its data and its log under `folder`."""

    def __init__(self, folder: Path, overrides: Mapping[str, str] = FAST) -> None:
        self.data = folder / "data"
        self.log_file = folder / "kcoord.log"
        self.overrides = dict(overrides)
        self.environment: dict[str, str] = {}
        """Variables that are added to the environment of this process."""
        self.module = "kcoord"
        """The module that is the command `kcoord`."""
        self.group: int | None = None
        """The group id of the process, by which rules of a firewall find it."""
        self.ports: list[int] = []
        """The port of each worker."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self.ports[0] if self.ports else 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> Self:
        """Starts the process and waits until it is ready."""
        begin = self.spawn()
        process = self._process
        assert process is not None

        def is_ready() -> bool:
            assert process.poll() is None, f"kcoord ended with {process.returncode}:\n{self.log}"
            ready = _READY.search(self.log_file.read_bytes()[begin:].decode(errors="replace"))
            if ready:
                self.ports = [int(port) for port in _PORT.findall(ready[1])]
            return ready is not None

        wait_until(is_ready, f"kcoord is ready; its log: {self.log_file}", START_SECONDS)
        return self

    def spawn(self) -> int:
        """Starts the process without waiting. Returns the position in the log file at which its output begins."""
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "log.dirs": str(self.data),
            **({"kcoord.worker.ports": ",".join(map(str, self.ports))} if len(self.ports) > 1 else {}),
            **self.overrides,
        }
        command = [sys.executable, "-m", self.module, "serve"]
        for key, value in settings.items():
            command += ["--override", f"{key}={value}"]
        with self.log_file.open("ab") as log:
            begin = log.tell()
            environment = {**os.environ, **self.environment}
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, group=self.group
            )
        return begin

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit code. Does nothing if the process does not run."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(how)
        try:
            return process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        code = self.stop(how)
        assert how != signal.SIGTERM or code == 0, f"exit code {code}:\n{self.log}"
        self.start()
