# SPDX-License-Identifier: Apache-2.0
"""The gain of a second worker: `python -m bench.workers KLOAD`, with the generator of the shared folder.

Two cores are not enough for two workers and a generator. So the generator has the second core. The first core runs a
broker with one worker and a broker with two workers, in turn for a few seconds each. Requests per second, and per CPU
second of all server processes, show the overhead of two workers. Two workers on a core each would give twice that rate,
less the loss from an uneven distribution of the groups, since the busier worker is saturated first.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench.report import Report
from bench.wire import READY

SERVER_CORE, GENERATOR_CORE = 0, 1
SECONDS = 2.5
WARMUP_SECONDS = 0.5
END_SECONDS = 30.0


class Rate(NamedTuple):
    """Requests per second of wall time and of CPU time, and the share of the busiest worker in the CPU time."""

    per_second: float
    per_cpu_second: float
    busiest: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workers", description=__doc__)
    parser.add_argument("kload", type=Path, help="path of the built generator")
    parser.add_argument("--scenarios", default="heartbeat commit", help="scenarios of the generator, in one argument")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per scenario")
    arguments = parser.parse_args()
    table = Report().table(
        "a broker of one worker and one of two, on one core",
        *("scenario", "one: requests/s", "two", "one: per CPU s", "two ", "busier of two"),
        *("two cores give, times one: by CPU s", "by s"),
    )
    with ExitStack() as stack:
        brokers = [stack.enter_context(_Broker(workers)) for workers in (1, 2)]
        for scenario in arguments.scenarios.split():
            by_cpu, by_wall = [], []
            for _ in range(arguments.rounds):
                single, double = (broker.measure(arguments.kload, scenario) for broker in brokers)
                by_cpu.append(double.per_cpu_second / single.per_cpu_second / double.busiest)
                by_wall.append(double.per_second / single.per_second / double.busiest)
                rates = (single.per_second, double.per_second, single.per_cpu_second, double.per_cpu_second)
                table.row(scenario, *rates, double.busiest, by_cpu[-1], by_wall[-1])
            medians = statistics.median(by_cpu), statistics.median(by_wall)
            table.row(f"{scenario}, median", "", "", "", "", "", *medians)


class _Broker:
    def __init__(self, workers: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        settings = (
            *(f"log.dirs={self._folder.name}", "listeners=PLAINTEXT://127.0.0.1:0"),
            *(f"group.coordinator.threads={workers}", "kcoord.log.flush.policy=os"),
        )
        overrides = [part for setting in settings for part in ("--override", setting)]
        self._process = subprocess.Popen(
            ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "kcoord", "serve", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        ready = READY.search(self._process.stdout.readline())
        assert ready is not None, "the broker did not start"
        self._port = int(ready[1])

    def __enter__(self) -> _Broker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(END_SECONDS)
        self._folder.cleanup()

    def measure(self, kload: Path, scenario: str) -> Rate:
        workers = self._workers()
        before = [cpu_seconds(pid) for pid in workers]
        done = subprocess.run(
            [
                *("taskset", "-c", str(GENERATOR_CORE), str(kload), "--scenario", scenario),
                *("--bootstrap", f"127.0.0.1:{self._port}", "--pid", str(self._process.pid)),
                *("--conns", "32", "--inflight", "8", "--groups", "50", "--members", "20", "--partitions", "60"),
                *("--seconds", str(SECONDS), "--warmup", str(WARMUP_SECONDS)),
            ],
            capture_output=True,
            check=True,
        )
        used = [cpu_seconds(pid) - start for pid, start in zip(workers, before, strict=True)]
        result = json.loads(done.stdout.splitlines()[-1])
        return Rate(result["req_per_s"], result["req_per_server_cpu_s"], max(used) / sum(used))

    def _workers(self) -> list[int]:
        """Returns the process ids of the workers: the children of the supervisor, or else the only process."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(child) for child in children] or [pid]


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of the current threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int(task.joinpath("schedstat").read_text().split()[0]) for task in tasks) / 1e9


if __name__ == "__main__":
    main()
