# SPDX-License-Identifier: Apache-2.0
"""Latency of heartbeats while the wire source reads a topic of the same broker, and while it does not, in turns.

Further rounds give the source a quota, the protection that Kafka has for a broker. A client that was idle may first
use ten seconds' worth of bytes at once. A round with a quota begins after that.

The broker runs alone on the first core. The load and the reader share the second one. All have real-time priority if
this process may give it, and the reader has the lowest. So the figures show what the reader costs the broker, and not
what it or other work costs the scheduler. The reader is one worker of Spark without Spark: it
fetches, decodes and drops the rows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
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
_IS_NOT_READ: Final = "is not read"
_WHOLE_LOG: Final = 1 << 40


class Round(NamedTuple):
    """The heartbeats of a round, with the broker's CPU seconds and the records read per second."""

    beats: Beats
    broker_cpu: float
    records: float


def main(report: Report) -> None:
    rounds = int(os.environ.get("BENCH_ROUNDS", ROUNDS))
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        broker = serve_by_kcoord(Path(folder), LOG_PARTITIONS, _fill)
        try:
            for thread in Path(f"/proc/{broker.pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores[:1])
                _prefer(int(thread.name))
            os.sched_setaffinity(0, cores[1:2] or cores)  # the load and the reader inherit this
            rounds_by_name = alternate(broker, rounds)
        finally:
            os.sched_setaffinity(0, cores)
            broker.kill()
    table = report.table(
        f"heartbeats while a broker is read, medians of {rounds} rounds of {SECONDS:.0f} s",
        *("broker", "p99 ms", "longest ms", "broker CPU s per s", "records read per s"),
    )
    for name, measured in rounds_by_name.items():
        p99, longest = zip(*(one_round.beats for one_round in measured), strict=True)
        cpu = statistics.median(one_round.broker_cpu for one_round in measured)
        records = statistics.median(one_round.records for one_round in measured)
        table.row(name, statistics.median(p99), statistics.median(longest), cpu, round(records))


def _fill(empty: Path) -> None:
    write_log(empty, RECORDS_IN_LOG)
    for path in empty.iterdir():
        path.rename(empty / f"{TOPIC}-{path.name.rpartition('-')[2]}")


def alternate(broker: KcoordProcess, rounds: int) -> dict[str, list[Round]]:
    """Returns the rounds without the reader, with it, and with each quota."""
    spawn = multiprocessing.get_context("spawn")
    may_read, is_over, count = spawn.Event(), spawn.Event(), spawn.Value("q", 0)
    heart = Heart(broker.port)
    for child in multiprocessing.active_children():
        assert child.pid is not None
        _prefer(child.pid)
    reader = spawn.Process(target=read_log, args=(broker.address, may_read, is_over, count))
    reader.start()
    measured: dict[str, list[Round]] = {_IS_NOT_READ: [], "is read": []}
    quotas = {f"is read with a quota of {quota} MB/s": quota * 1_000_000 for quota in QUOTAS}
    measured |= {name: [] for name in quotas}
    try:
        _wait_for_more(count)  # the reader and the broker are ready
        for _ in range(rounds):
            for name, rounds_of_name in measured.items():
                quota = quotas.get(name)
                alter_quota(broker.address, {"client-id": CLIENT_ID}, consumer_byte_rate=quota)
                if name != _IS_NOT_READ:
                    may_read.set()
                    _wait_for_more(count)
                if quota is not None:
                    time.sleep(_BURST_SECONDS)
                rounds_of_name.append(_round(broker, heart, count))
                may_read.clear()
    finally:
        is_over.set()
        may_read.set()
        reader.join()
        heart.close()
    return measured


def _prefer(thread: int, priority: int = _REAL_TIME) -> None:
    """Gives a thread real-time priority, if this process may."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(priority))


def _wait_for_more(count: Synchronized[int]) -> None:
    """Waits until the reader reads."""
    before = count.value
    while count.value == before:
        time.sleep(0.01)


def _round(broker: KcoordProcess, heart: Heart, count: Synchronized[int]) -> Round:
    heart.take()
    cpu, records, began = broker_cpu_seconds(broker), count.value, time.monotonic()
    time.sleep(SECONDS)
    beats, took = heart.take(), time.monotonic() - began
    return Round(beats, (broker_cpu_seconds(broker) - cpu) / took, (count.value - records) / took)


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
