# SPDX-License-Identifier: Apache-2.0
"""Produce and Fetch beside Apache Kafka and kfake, with Kafka's own perf tools as clients.

Each round makes a topic with 6 partitions on every server in turn, produces to it with acks=all (`producer-perf`),
consumes it (`consumer-perf`), and deletes it. Another server begins each round. Nothing is synced, so the data is in
the page cache (kfake: in its own memory). The first round warms up and does not count; a cell is the median of the
others. CPU is the time of the server
process, per record. If this checkout is compiled, kcoord takes part in both forms.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.report import Cell, Report
from bench.wire import Broker, Connection
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.compiled import IS_COMPILED
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)

SCENARIOS: Final = ("produce", "consume")
RECORDS: Final = {100: 2_000_000, 1_000: 500_000}
"""Number of records of a round by their size in bytes."""
PARTITIONS: Final = 6
ROUNDS: Final = 5
_START_SECONDS: Final = 60
_TOOL_SECONDS: Final = 300
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PRODUCED: Final = re.compile(r"([\d.]+) records/sec .* (\d+) ms 50th, .* (\d+) ms 99th")


@dataclass(slots=True)
class Target:
    """A running server. `measured` has a tuple of values for each round, by (scenario, record size)."""

    name: str
    port: int
    pid: int
    measured: dict[tuple[str, int], list[tuple[float, ...]]] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        """Returns the CPU time of the process, with its ended threads, in steps of 10 ms."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND

    def median(self, scenario: str, size: int, position: int) -> float:
        return statistics.median(values[position] for values in self.measured[scenario, size])


def main(shared: Path, work: Path, peers: Sequence[str], scenarios: Sequence[str], report: Report) -> None:
    """Measures kcoord and the peers ("kafka", "kfake") in rounds that alternate."""
    tool = shared / "anchors" / "kafka" / "tool.sh"
    with ExitStack() as stack:
        targets = []
        forms = (
            {"kcoord, compiled": "kcoord", "kcoord, pure": "bench.pure"} if IS_COMPILED else {"kcoord, pure": "kcoord"}
        )
        for name, module in forms.items():
            broker = stack.enter_context(Broker(work / module, "kcoord.log.flush.policy=os", module=module))
            targets.append(Target(name, broker.port, broker.pid))
        if "kafka" in peers:
            script = [str(shared / "anchors" / "kafka" / "run.sh"), "PORT", str(work / "data-plane-kafka")]
            targets.append(stack.enter_context(_peer("Kafka 4.3.1", script, work)))
        if "kfake" in peers:
            program = work / "bin" / "kfake"
            subprocess.run(["go", "build", "-o", program, "."], cwd=shared / "bench" / "kfake", check=True)
            targets.append(stack.enter_context(_peer("kfake", [str(program), "--port", "PORT"], work)))
        for number in range(ROUNDS + 1):
            first = number % len(targets)  # a server's place in a round changes its latency
            for size in RECORDS:
                for target in (*targets[first:], *targets[:first]):
                    _measure(tool, target, size, number)
    if "produce" in scenarios:
        columns = ("records per s", "p50 ms", "p99 ms")
        _report("produce", columns, targets, report)
    if "consume" in scenarios:
        _report("consume", ("records per s",), targets, report)


@contextmanager
def _peer(name: str, command: Sequence[str], work: Path) -> Iterator[Target]:
    """Starts a server on a free port and waits until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = [str(port) if part == "PORT" else part for part in command]
    with (work / f"{arguments[0].rpartition('/')[2]}.log").open("w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=log, start_new_session=True)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                try:
                    Connection(port).close()
                    break
                except ConnectionError:
                    assert time.monotonic() < deadline and process.poll() is None, f"{name} did not start"
                    time.sleep(0.1)
            yield Target(name, port, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(_START_SECONDS)


def _measure(tool: Path, target: Target, size: int, number: int) -> None:
    """Produces and consumes the records of one round. Round 0 warms up."""
    topic, records = f"perf-{size}-{number}", RECORDS[size]
    _create(target.port, topic)
    for scenario, run in (("produce", _produce), ("consume", _consume)):
        before = target.cpu_seconds()
        values = run(tool, target.port, topic, size)
        if number:
            cpu_us = (target.cpu_seconds() - before) * 1e6 / records
            target.measured.setdefault((scenario, size), []).append((cpu_us, *values))
    _delete(target.port, topic)


def _produce(tool: Path, port: int, topic: str, size: int) -> tuple[float, ...]:
    """Returns records per s, and the percentiles of the latency in ms."""
    options = ("--num-records", RECORDS[size], "--record-size", size, "--throughput", -1)
    server = ("--bootstrap-server", f"127.0.0.1:{port}", "--command-property", "acks=all")
    output = _run(tool, "producer-perf", "--topic", topic, *options, *server)
    match = _PRODUCED.search(output.splitlines()[-1])
    assert match is not None, output
    return float(match[1]), float(match[2]), float(match[3])


def _consume(tool: Path, port: int, topic: str, size: int) -> tuple[float, ...]:
    """Returns records per s, without the time in which the consumer joins its group."""
    options = ("--num-records", RECORDS[size], "--bootstrap-server", f"127.0.0.1:{port}", "--topic", topic)
    output = _run(tool, "consumer-perf", *options)
    columns = [column.strip() for column in output.splitlines()[0].split(",")]
    values = [value.strip() for value in output.splitlines()[-1].split(",")]
    assert len(values) == len(columns) and int(values[columns.index("data.consumed.in.nMsg")]) >= RECORDS[size], output
    return (float(values[columns.index("fetch.nMsg.sec")]),)


def _run(tool: Path, name: str, *arguments: object) -> str:
    command = [str(tool), name, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TOOL_SECONDS).stdout


def _create(port: int, topic: str) -> None:
    creatable = CreateTopicsRequest.CreatableTopic(name=topic, num_partitions=PARTITIONS, replication_factor=1)
    request = CreateTopicsRequest(topics=[creatable], timeout_ms=10_000)
    connection = Connection(port)
    response = connection.call(ApiKey.CREATE_TOPICS, 5, request, CreateTopicsResponse)
    connection.close()
    assert response.topics[0].error_code == Errors.NONE, response


def _delete(port: int, topic: str) -> None:
    request = DeleteTopicsRequest(topic_names=[topic], timeout_ms=10_000)
    connection = Connection(port)
    response = connection.call(ApiKey.DELETE_TOPICS, 4, request, DeleteTopicsResponse)
    connection.close()
    assert response.responses[0].error_code == Errors.NONE, response


def _report(scenario: str, columns: Sequence[str], targets: Sequence[Target], report: Report) -> None:
    """Prints a row for each size and server. Its ratios are to the first row of the size."""
    head = ("record size", "server", "CPU us per record", *columns, "CPU, ratio", "records per s, ratio")
    table = report.table(f"{scenario}, medians of {ROUNDS} rounds", *head)
    for size in RECORDS:
        for target in targets:
            cells: list[Cell] = [target.median(scenario, size, position) for position in range(len(columns) + 1)]
            ratios = [target.median(scenario, size, at) / targets[0].median(scenario, size, at) for at in (0, 1)]
            table.row(f"{size:,} B", target.name, *cells, *ratios)
