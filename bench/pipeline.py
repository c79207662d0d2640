# SPDX-License-Identifier: Apache-2.0
"""The data pipeline: decoding alone, reading with Spark, and the time from a commit to its row in a stream's sink.

CPU time is that of this process for decoding, and that of driver, JVM and Python workers together for Spark.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import kcoord.pipeline
from bench.report import Report
from kcoord.pipeline.batch_table import Batches
from kcoord.pipeline.buffers import Bytes, Gather, content_bytes, padded_copy
from kcoord.pipeline.decode import Decoder
from kcoord.pipeline.kernels import DecoderName, kernels
from kcoord.pipeline.keys import KeyTable
from kcoord.pipeline.lake.session import ARROW_UNCHECKED
from kcoord.pipeline.range_reader import Part
from kcoord.pipeline.schemas import TABLES
from kcoord.pipeline.tables import table_batches
from kcoord.pipeline.transactions import Resolution
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.log import Log
from kcoord.storage.segment import LogConfig
from kcoord_protocol.record_batch import Compression, encode_batch_from_parts

DECODED_RECORDS = 140_160
SPARK_RECORDS = 3_600_000
GROUPS = 200
PARTITIONS = 12
SHARDS = 4
ROUNDS = 7
SPARK_ROUNDS = 5
TOPIC_ID = bytes(range(16))
NOW_MS = 1_795_000_000_000
STREAM_SECONDS = 60.0
STREAM_WARM_UP_SECONDS = 20.0
COMMITS_PER_SECOND = 500
COMMITS_PER_BATCH = 10


def main(report: Report) -> None:
    decoding(report)
    through_spark(report)
    latency(report)


def commits(count: int, first: int, now_ms: int = NOW_MS) -> list[tuple[bytes | None, bytes | None]]:
    """Makes commits of a group, about 115 bytes each on disk."""
    group = b"consumer-group-%06d" % (first // count % GROUPS)
    made: list[tuple[bytes | None, bytes | None]] = []
    for number in range(first, first + count):
        topic = b"topic-%04d-events" % (number % 7)
        key = struct.pack(">hh", 1, len(group)) + group + struct.pack(">h", len(topic)) + topic
        value = struct.pack(">hqiBq", 4, number, 3, 1, now_ms) + b"\x01\x00\x10" + TOPIC_ID
        made.append((key + struct.pack(">i", number % PARTITIONS), value))
    return made


def batches(records: int, per_batch: int, compression: Compression = Compression.NONE) -> Iterator[bytes]:
    for first in range(0, records, per_batch):
        pairs = commits(per_batch, first)
        yield encode_batch_from_parts(pairs, timestamp_ms=NOW_MS, base_offset=first, compression=compression)


def decoding(report: Report) -> None:
    rates = "M records per CPU s", "MB per CPU s"
    table = report.table("decoding", "decoder", "table", "records per batch", "codec", *rates)
    for per_batch, codec in ((3, Compression.NONE), (24, Compression.NONE), (24, Compression.ZSTD)):
        data = padded_copy(*batches(DECODED_RECORDS, per_batch, codec))
        decoders: tuple[DecoderName, ...] = ("numpy", "numba")
        for decoder in decoders:
            for name in ("records", "commits"):
                seconds, records = decode(data, decoder, name)
                megabytes = content_bytes(data) / seconds / 1e6
                table.row(decoder, name, per_batch, codec.name.lower(), records / seconds / 1e6, megabytes)


def decode(data: Bytes, decoder: DecoderName, table: str) -> tuple[float, int]:
    """Decodes all columns of the table. Returns the CPU seconds of the best round, and the number of rows."""
    loops = kernels(decoder)
    names = [column.name for column in TABLES[table].columns]
    keys = KeyTable(loops.key_index())
    best, rows = float("inf"), 0
    for _ in range(ROUNDS):
        began = time.process_time()
        positions, _ = loops.walk(data, 0, content_bytes(data))
        headers = Batches.read(Gather(data), positions)
        chunk, _ = Decoder(0, keys, loops).decode(data, headers, Resolution.without(len(headers)))
        rows = sum(batch.num_rows for batch in table_batches(table, names, Part(chunk, []), None))
        best = min(best, time.process_time() - began)
    return best, rows


def write_logs(folder: Path, records: int, per_batch: int) -> int:
    """Fills SHARDS log partitions. Returns their size in bytes."""
    for shard in range(SHARDS):
        path = folder / f"__consumer_offsets-{shard}"
        log = Log.open(RealFileSystem(), str(path), LogConfig(segment_bytes=100 << 20), NOW_MS)
        for batch in batches(records // SHARDS, per_batch):
            log.append(batch, now_ms=NOW_MS)
        log.flush()
        log.close()
    return sum(path.stat().st_size for path in folder.glob("*/*.log"))


def session(cores: int, folder: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master(f"local[{cores}]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.driver.extraJavaOptions", ARROW_UNCHECKED)
    builder = builder.config("spark.python.unix.domain.socket.enabled", "true")
    builder = builder.config("spark.local.dir", folder).config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.sql.session.timeZone", "UTC").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    kcoord.pipeline.register(spark)
    return spark


def tree_cpu_seconds() -> float:
    """Returns user and system time of this process and its descendants, including ended children."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")


def through_spark(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "data")
        write_logs(data, SPARK_RECORDS, 24)
        spark = session(1, folder)
        read_all(spark, data, "records", "numpy", log_partitions="0")
        head = "table, all columns", "decoder", "wall s", "CPU s", "M records per CPU s"
        table = report.table(f"{SPARK_RECORDS:,} records through Spark to nowhere, local[1]", *head)
        for name in ("records", "commits", "current_offsets"):
            for decoder in ("numpy", "numba"):
                rounds = [measured(partial(read_all, spark, data, name, decoder)) for _ in range(SPARK_ROUNDS)]
                wall, cpu = min(rounds, key=itemgetter(1))
                table.row(name, decoder, wall, cpu, SPARK_RECORDS / cpu / 1e6)
        spark.stop()


def read_all(spark: SparkSession, data: Path, table: str, decoder: str, log_partitions: str | None = None) -> None:
    reader = spark.read.format("kcoord").option("table", table).option("decoder", decoder)
    if log_partitions is not None:
        reader = reader.option("logPartitions", log_partitions)
    reader.load(str(data)).write.format("noop").mode("overwrite").save()


def measured(work: Callable[[], None]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), tree_cpu_seconds()
    work()
    return time.perf_counter() - began, tree_cpu_seconds() - cpu


def latency(report: Report) -> None:
    """Measures the time from an append to the end of the Parquet sink's micro-batch that has the row."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder, "data"), Path(folder, "out")
        ending = threading.Event()
        writer = threading.Thread(target=steady_commits, args=(data, ending), daemon=True)
        writer.start()
        spark = session(2, folder)
        stream = spark.readStream.format("kcoord").option("table", "commits").load(str(data))
        query = (
            stream.select("commit_timestamp")
            .writeStream.format("parquet")
            .option("path", str(out))
            .option("checkpointLocation", str(Path(folder, "checkpoint")))
            .start()
        )
        time.sleep(STREAM_WARM_UP_SECONDS + STREAM_SECONDS)
        ending.set()
        writer.join()
        query.processAllAvailable()
        query.stop()
        waits = np.array(waiting_seconds(out))
        spark.stop()
    if not len(waits):
        raise SystemExit(f"no row arrived in {STREAM_SECONDS} s after the warm-up: the machine is too busy")
    head = "rows", "p50 s", "p90 s", "p99 s", "worst s", "load average"
    table = report.table(f"from commit to row, {COMMITS_PER_SECOND} commits per s", *head)
    table.row(len(waits), *map(float, np.percentile(waits, (50, 90, 99, 100))), os.getloadavg()[0])


def steady_commits(data: Path, ending: threading.Event) -> None:
    logs = []
    for shard in range(SHARDS):
        path = data / f"__consumer_offsets-{shard}"
        logs.append(Log.open(RealFileSystem(), str(path), LogConfig(segment_bytes=100 << 20), NOW_MS))
    number = 0
    while not ending.wait(COMMITS_PER_BATCH / COMMITS_PER_SECOND):
        now_ms = time.time_ns() // 1_000_000
        log = logs[number % SHARDS]
        pairs = commits(COMMITS_PER_BATCH, number * COMMITS_PER_BATCH, now_ms)
        log.append(encode_batch_from_parts(pairs, timestamp_ms=now_ms, base_offset=log.end_offset), now_ms=now_ms)
        number += 1
    for log in logs:
        log.close()


def waiting_seconds(out: Path) -> list[float]:
    """Returns the latency of each row after the warm-up. A micro-batch is visible when the sink's log has its entry."""
    entries = sorted(
        (path.stat().st_mtime, path) for path in (out / "_spark_metadata").iterdir() if path.name.isdigit()
    )
    waits: list[float] = []
    for visible, path in entries:
        if visible < entries[0][0] + STREAM_WARM_UP_SECONDS:
            continue
        for line in path.read_text().splitlines()[1:]:
            name = line.partition('"path":"')[2].partition('"')[0].removeprefix("file://")
            for moment in pq.read_table(name).column("commit_timestamp").to_pylist():
                waits.append(visible - moment.timestamp())
    return waits
