# SPDX-License-Identifier: Apache-2.0
"""A kcoord broker in its own process, on free ports that stay the same after restarts.

A broker is forked from a process that has imported it (the start method `forkserver` of multiprocessing), since nine
tenths of the CPU time of a start are imports and the tests start 600 brokers. The commands of the docs, of the image
and of `kcoord.testing` start brokers as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, Self

from kcoord.cli import main
from tests.support.ports import free_ports
from tests.support.private_network import enter_network, network_of_thread
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

_FORKED: Final = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    ["kcoord.cli.serve", "kcoord.server.start", "kcoord.server.disk.log_cleaner", "kcoord.upstream.process"]
)


@dataclass(frozen=True)
class _Start:
    """A broker's command, and what it inherits from the thread that starts it."""

    module: str
    arguments: Sequence[str]
    more_environment: Mapping[str, str]
    group: int | None
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    files: tuple[int, int] = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE))
    network: str = field(default_factory=network_of_thread)

    def run(self) -> None:
        """Is the process."""
        with self.log_file.open("ab") as log:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(log.fileno(), stream.fileno())
        resource.setrlimit(resource.RLIMIT_NOFILE, self.files)
        enter_network(self.network)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests run under nohup
        if self.group is not None:
            os.setgid(self.group)
        if self.module != "kcoord" or self.more_environment:
            command = [sys.executable, "-m", self.module, *self.arguments]
            os.execve(sys.executable, command, {**self.environment, **self.more_environment})
        os.environ.clear()
        os.environ.update(self.environment)
        sys.exit(main(self.arguments))


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
        self.files: tuple[int, int] | None = None
        """The soft and the hard limit on the open files of this process. By default they are those of the tests."""
        self.ports: list[int] = []
        """The port of each worker."""
        self._process: BaseProcess | None = None

    @property
    def port(self) -> int:
        return self.ports[0] if self.ports else 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None and self._process.pid is not None
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """Returns the pids of the workers in the order of their start, none if the broker is one process or has ended.

        The order is that of their numbers until a worker restarts.
        """
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return []
        return sorted(map(int, children.split()))

    def worker_pid(self, node_id: int) -> int:
        """Returns the pid of the worker that is the broker `node_id`."""
        comm = f"kcoord-{node_id}"
        return next(pid for pid in self.worker_pids() if Path(f"/proc/{pid}/comm").read_text().strip() == comm)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def exit_code(self) -> int | None:
        """The exit code if the process has ended by itself."""
        return None if self._process is None else self._process.exitcode

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> Self:
        """Starts the process and waits until it is ready."""
        begin = self.spawn()
        process = self._process
        assert process is not None

        def is_ready() -> bool:
            assert process.is_alive(), f"kcoord ended with {process.exitcode}:\n{self.log}"
            ready = _READY.search(self.log_file.read_bytes()[begin:].decode(errors="replace"))
            if ready:
                self.ports = [int(port) for port in _PORT.findall(ready[1])]
            return ready is not None

        wait_until(is_ready, f"kcoord is ready; its log: {self.log_file}", START_SECONDS)
        return self

    def spawn(self) -> int:
        """Starts the process without waiting. Returns the position in the log file at which its output begins."""
        # A port that Linux chose could be that of another test's connection when the broker restarts.
        first = self.port or free_ports(int(self.overrides.get("group.coordinator.threads", "1")))
        settings = {
            "listeners": f"PLAINTEXT://127.0.0.1:{first}",
            "log.dirs": str(self.data),
            **({"kcoord.worker.ports": ",".join(map(str, self.ports))} if len(self.ports) > 1 else {}),
            **self.overrides,
        }
        arguments = ["serve"]
        for key, value in settings.items():
            arguments += ["--override", f"{key}={value}"]
        self.log_file.touch()
        begin = self.log_file.stat().st_size
        start = _Start(self.module, arguments, self.environment, self.group, self.log_file)
        if self.files is not None:
            start = replace(start, files=self.files)
        self._process = _FORKED.Process(target=start.run, daemon=True)
        self._process.start()
        return begin

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Sends the signal, and returns the exit code when all processes have ended.

        Does nothing if the process does not run.
        """
        if self._process is None:
            return 0
        workers = self.worker_pids()
        process, self._process = self._process, None
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):  # It has just ended.
                os.kill(process.pid, how)
        process.join(STOP_SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise TimeoutError(f"kcoord has not ended {STOP_SECONDS} s after {how.name}; its log: {self.log_file}")
        # Workers end by themselves when their supervisor is gone.
        wait_until(lambda: not any(map(_is_running, workers)), f"the workers {workers} have ended")
        return process.exitcode

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def restart(self, how: signal.Signals = signal.SIGTERM) -> None:
        code = self.stop(how)
        assert how != signal.SIGTERM or code == 0, f"exit code {code}:\n{self.log}"
        self.start()


def _is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
