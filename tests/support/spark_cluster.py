# SPDX-License-Identifier: Apache-2.0
"""A standalone Spark cluster from pyspark's own jars, and the commands that pyspark installs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.support.client_races import note_retry
from tests.support.java import SHORT_LIVED
from tests.support.shared import ROOT
from tests.support.spark import JAVA_OPTIONS, TOO_BUSY, TOO_BUSY_RACE, small_settings
from tests.support.waiting import wait_until

START_SECONDS = 180.0
RUN_SECONDS = 580


def spark_environment() -> dict[str, str]:
    """Returns the environment in which Spark's commands find each other and this Python."""
    binaries = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "512m",
        # With the archive of the driver's classes a master and a worker start in 3.0 s of CPU time, without in 3.9 s.
        "SPARK_DAEMON_JAVA_OPTS": small_settings()[JAVA_OPTIONS],
        "SPARK_LAUNCHER_OPTS": SHORT_LIVED,
    }


def run_spark(folder: Path, *command: str, java_options: str = SHORT_LIVED) -> None:
    """Runs a Spark command in the folder and waits for its end. Retries once if the machine was too busy."""
    environment = {**spark_environment(), "SPARK_SUBMIT_OPTS": java_options}
    for is_retry in (False, True):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS)
        if done.returncode == 0:
            return
        output = f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        assert TOO_BUSY in done.stderr and not is_retry, f"{command}: {done.returncode}\n{output}"
        note_retry(TOO_BUSY_RACE)


class SparkCluster:
    """A master and workers with one core each, on free ports of the loopback."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self._folder = folder
        self._count = workers
        self._master: subprocess.Popen[bytes] | None = None
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self.master = ""

    def __enter__(self) -> SparkCluster:
        try:
            self._master, self.master = self._start("master.Master", r"Starting Spark master at (spark://\S+)")
            for number in range(self._count):
                self.start_worker(number)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def start_worker(self, number: int) -> None:
        """Starts a worker, also after it was killed."""
        work = str(self._folder / f"work-{number}")
        options = ("--cores", "1", "--memory", "1g", "--work-dir", work, self.master)
        self._workers[number], _ = self._start("worker.Worker", r"Successfully registered with master (\S+)", *options)

    def kill_worker(self, number: int) -> None:
        """Kills a worker and its executors with SIGKILL."""
        process = self._workers.pop(number)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, ready: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
        log = self._folder / f"{name}.log"
        command = ["spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        command += ["--port", "0", "--webui-port", "0", *arguments]
        with log.open("ab") as out:
            begin = out.tell()
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=spark_environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        matches: list[str] = []

        def is_ready() -> bool:
            text = log.read_bytes()[begin:].decode(errors="replace")
            assert process.poll() is None, text
            matches.extend(re.findall(ready, text))
            return bool(matches)

        try:
            wait_until(is_ready, f"Spark's {name} is ready", START_SECONDS)
        except BaseException:
            process.kill()
            raise
        return process, matches[0]

    def _stop(self) -> None:
        for process in [*self._workers.values(), *([self._master] if self._master is not None else [])]:
            process.terminate()
            process.wait(60)
