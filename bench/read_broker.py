# SPDX-License-Identifier: Apache-2.0
"""Latency of heartbeats while the wire source reads a topic of the same broker, and while it does not, in turns.

Further rounds give the source a quota, the protection that Kafka has for a broker. A client that was idle may first
use ten seconds' worth of bytes at once. A round with a quota begins after that.

The broker runs alone on the first core. The load and the reader share the second one. All have real-time priority if
this process may give it, and the reader has the lowest. The reader is one worker of Spark without Spark: it fetches,
decodes and drops the rows.

The reader delays the load even so: the kernel copies a received piece without a pause. A control shows that: the
reader reads another broker, which runs on the second core, too, and the measured broker has no part in it. If that
raises p99, p99 beside the reader says little about the measured broker. Its CPU time does.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from contextlib import ExitStack, closing, suppress
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final, NamedTuple

from bench.heart import Beats, Heart
from bench.lake import LOG_PARTITIONS, write_log
from bench.report import Report
from bench.wire_source import broker_cpu_seconds
from kcoord.pipeline.log_stream import LogStream
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.reading import Ranges, read_ranges
from kcoord.pipeline.schemas import RECORDS
from kcoord.pipeline.wire.client import CLIENT_ID
from tests.support.kcoord_process import KcoordProcess
from tests.support.quotas import alter_quota
from tests.support.served_logs import TOPIC, serve_by_kcoord

RECORDS_IN_LOG: Final = 1_000_000
ROUNDS: Final = 6
SECONDS: Final = 10.0
QUOTAS: Final = (50, 20, 10)
"""In MB per second."""
_BURST_SECONDS: Final = 4.0
"""The source uses up the burst of the largest quota in this time."""
_REAL_TIME: Final = 20
_READER: Final = 1
_NICEST: Final = 19
_WHOLE_LOG: Final = 1 << 40


class Round(NamedTuple):
    """The heartbeats of a round, with the broker's CPU seconds and the records read per second."""

    beats: Beats
    broker_cpu: float
    records: float


def main(report: Report) -> None:
    rounds = int(os.environ.get("BENCH_ROUNDS", ROUNDS))
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        broker, other = (_serve(stack) for _ in range(2))
        _settle(broker.pid, cores[:1], _REAL_TIME)
        _settle(other.pid, cores[1:2] or cores, _READER)
        os.sched_setaffinity(0, cores[1:2] or cores)  # the load and the readers inherit this
        rounds_by_name = alternate(broker, other, rounds)
    table = report.table(
        f"heartbeats while a broker is read, medians of {rounds} rounds of {SECONDS:.0f} s",
        *("broker", "p99 ms", "longest ms", "broker CPU s per s", "records read per s"),
    )
    for name, measured in rounds_by_name.items():
        p99, longest = zip(*(one_round.beats for one_round in measured), strict=True)
        cpu = statistics.median(one_round.broker_cpu for one_round in measured)
        records = statistics.median(one_round.records for one_round in measured)
        table.row(name, statistics.median(p99), statistics.median(longest), cpu, round(records))


def _serve(stack: ExitStack) -> KcoordProcess:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    broker = serve_by_kcoord(Path(folder), LOG_PARTITIONS, _fill)
    stack.callback(broker.kill)
    return broker


def _settle(process: int, cores: list[int], priority: int) -> None:
    """Keeps the threads of a process on these cores."""
    for thread in Path(f"/proc/{process}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
        _prefer(int(thread.name), priority)


def _fill(empty: Path) -> None:
    write_log(empty, RECORDS_IN_LOG)
    for path in empty.iterdir():
        path.rename(empty / f"{TOPIC}-{path.name.rpartition('-')[2]}")


class Reader:
    """A process that reads a broker between `resume` and `pause`."""

    def __init__(self, address: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._may_read, self._is_over = spawn.Event(), spawn.Event()
        self._count: Synchronized[int] = spawn.Value("q", 0)
        arguments = (address, self._may_read, self._is_over, self._count)
        self._process = spawn.Process(target=read_log, args=arguments)
        self._process.start()
        self._wait_for_more()  # the process and the broker are ready

    @property
    def records(self) -> int:
        """The number of records that were read so far."""
        return self._count.value

    def resume(self) -> None:
        self._may_read.set()
        self._wait_for_more()

    def pause(self) -> None:
        self._may_read.clear()

    def close(self) -> None:
        self._is_over.set()
        self._may_read.set()
        self._process.join()

    def _wait_for_more(self) -> None:
        before = self.records
        while self.records == before:
            time.sleep(0.01)


def alternate(broker: KcoordProcess, other: KcoordProcess, rounds: int) -> dict[str, list[Round]]:
    """Returns the rounds without a reader, with a reader of each broker, and with each quota.

    The broker has the load in all rounds.
    """
    measured: dict[str, list[Round]] = {}
    with ExitStack() as stack:
        heart = stack.enter_context(closing(Heart(broker.port)))
        for child in multiprocessing.active_children():
            assert child.pid is not None
            _prefer(child.pid)
        reader, control = (stack.enter_context(closing(Reader(read.address))) for read in (broker, other))
        readers: dict[str, tuple[Reader | None, int | None]] = {
            "is not read": (None, None),
            "is not read, another broker is": (control, None),
            "is read": (reader, None),
        }
        readers |= {f"is read with a quota of {quota} MB/s": (reader, quota * 1_000_000) for quota in QUOTAS}
        for _ in range(rounds):
            for name, (one_reader, quota) in readers.items():
                alter_quota(broker.address, {"client-id": CLIENT_ID}, consumer_byte_rate=quota)
                if one_reader is not None:
                    one_reader.resume()
                if quota is not None:
                    time.sleep(_BURST_SECONDS)
                measured.setdefault(name, []).append(_round(broker, heart, one_reader))
                if one_reader is not None:
                    one_reader.pause()
    return measured


def _prefer(thread: int, priority: int = _REAL_TIME) -> None:
    """Gives a thread real-time priority, if this process may."""
    with suppress(PermissionError):
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


def _round(broker: KcoordProcess, heart: Heart, reader: Reader | None) -> Round:
    def records() -> int:
        return reader.records if reader is not None else 0

    heart.take()
    cpu, before, began = broker_cpu_seconds(broker), records(), time.monotonic()
    time.sleep(SECONDS)
    beats, took = heart.take(), time.monotonic() - began
    return Round(beats, (broker_cpu_seconds(broker) - cpu) / took, (records() - before) / took)


def read_log(address: str, may_read: Event, is_over: Event, count: Synchronized[int]) -> None:
    """Reads the log again and again while it may, as a worker of Spark does, and drops the rows."""
    os.nice(_NICEST)
    _prefer(0, _READER)
    options = SourceOptions.parse({"kafka.bootstrap.servers": address, "topic": TOPIC})
    stream = LogStream(options, resolves=False)
    start = stream.initial()
    ranges = [log_range for log_range, _ in stream.ranges(start, stream.latest(start, _WHOLE_LOG))]
    while not is_over.is_set():
        for batch in read_ranges(Ranges(ranges), options, RECORDS.schema(), None):
            count.value += batch.num_rows
            # The first batch shows that the reader is ready.
            may_read.wait()
            if is_over.is_set():
                return
