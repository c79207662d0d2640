# SPDX-License-Identifier: Apache-2.0
"""Reads the same log from folders, from a broker, and with Spark's own Kafka source and a decoder in a pandas UDF.

    python -m bench.wire_source --records 10000000 --jars /path/to/spark-sql-kafka/jars

Spark's Kafka source needs its jars: spark-sql-kafka-0-10, spark-token-provider-kafka-0-10, kafka-clients and
commons-pool2. They must fit the release of pyspark. All sources read the same columns of the committed offsets, and
Spark drops the rows. The rounds alternate, so that other work on the machine disturbs all sources alike.
"""

from __future__ import annotations

import argparse
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pandas as pd
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import kcoord.pipeline
from bench.lake import LOG_PARTITIONS, write_log
from bench.pipeline import tree_cpu_seconds
from bench.report import Report
from kcoord.pipeline.lake.session import ARROW_UNCHECKED
from tests.support.kcoord_process import KcoordProcess
from tests.support.served_logs import TOPIC, serve_by_kcoord

RECORDS: Final = 1_000_000
_ROUNDS: Final = 3
_SCHEMA: Final = "`group` string, topic string, `partition` int, committed_offset bigint, log_offset bigint"


def main(report: Report) -> None:
    """Runs the measurement with `BENCH_RECORDS` records. `BENCH_JARS` has the jars of Spark's Kafka source."""
    run(report, int(os.environ.get("BENCH_RECORDS", RECORDS)), os.environ.get("BENCH_JARS"))


def run(report: Report, records: int, jars: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = 0

        def fill(empty: Path) -> None:
            nonlocal size
            size = write_log(empty, records)
            for path in empty.iterdir():
                path.rename(empty / f"{TOPIC}-{path.name.rpartition('-')[2]}")

        broker = serve_by_kcoord(Path(folder), LOG_PARTITIONS, fill)
        try:
            spark = session(folder, jars)
            compare(report, spark, broker, records, size)
            spark.stop()
        finally:
            broker.kill()


def session(folder: str, jars: str | None) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": ARROW_UNCHECKED,
        "spark.local.dir": folder,
        **({} if jars is None else {"spark.jars": ",".join(map(str, Path(jars).glob("*.jar")))}),
    }
    builder = SparkSession.builder.master("local[2]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    kcoord.pipeline.register(spark)
    return spark


def compare(report: Report, spark: SparkSession, broker: KcoordProcess, records: int, size: int) -> None:
    options = {"table": "commits", "topic": TOPIC}
    reader = spark.read.format("kcoord").schema(_SCHEMA).options(**options)
    brokers = {"kafka.bootstrap.servers": broker.address}
    sources: dict[str, Callable[[], DataFrame]] = {
        "folders": lambda: reader.load(str(broker.data)),
        "broker": lambda: spark.read.format("kcoord").schema(_SCHEMA).options(**options, **brokers).load(),
    }
    if spark.conf.get("spark.jars", ""):
        sources["Spark's Kafka source and a pandas UDF"] = lambda: with_pandas(spark, broker.address)
    for name, frame in sources.items():
        count = frame().agg(F.count("committed_offset")).collect()[0][0]
        assert count >= records, f"{name}: {count:,} rows"
    best: dict[str, tuple[float, float]] = {}
    for _ in range(_ROUNDS):
        for name, frame in sources.items():
            began, cpu, served = time.perf_counter(), tree_cpu_seconds(), broker_cpu_seconds(broker)
            frame().write.format("noop").mode("overwrite").save()
            of_broker = broker_cpu_seconds(broker) - served
            used = time.perf_counter() - began, tree_cpu_seconds() - cpu - of_broker
            best[name] = min(best.get(name, used), used, key=lambda pair: pair[1])
    head = "source", "s", "CPU s without the broker", "M records per s", "M records per CPU s", "load average"
    table = report.table(f"{records:,} records, {size / 1e6:,.0f} MB of log, pyspark {spark.version}, local[2]", *head)
    for name, (seconds, cpu) in best.items():
        table.row(name, seconds, cpu, records / seconds / 1e6, records / cpu / 1e6, os.getloadavg()[0])


def broker_cpu_seconds(broker: KcoordProcess) -> float:
    fields = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def with_pandas(spark: SparkSession, address: str) -> DataFrame:
    """Returns the committed offsets that a hand-written decoder finds in the records of Spark's Kafka source."""
    reader = spark.read.format("kafka").option("kafka.bootstrap.servers", address).option("subscribe", TOPIC)
    records = reader.option("startingOffsets", "earliest").load()
    return records.select("key", "value", "offset").mapInPandas(decoded, _SCHEMA)


def decoded(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Decodes keys of versions 0 and 1, and values of versions 0 to 4, of committed offsets."""
    names = ["group", "topic", "partition", "committed_offset"]
    for frame in frames:
        rows = [_commit(key, value) for key, value in zip(frame["key"], frame["value"], strict=True)]
        yield pd.DataFrame(rows, columns=names).assign(log_offset=frame["offset"])


def _commit(key: bytes, value: bytes | None) -> tuple[str | None, str | None, int | None, int | None]:
    version, length = struct.unpack_from(">hh", key)
    if version > 1:
        return None, None, None, None
    end = 4 + length
    group = key[4:end].decode()
    (length,) = struct.unpack_from(">h", key, end)
    topic = key[end + 2 : end + 2 + length].decode()
    (partition,) = struct.unpack_from(">i", key, end + 2 + length)
    offset = None if value is None else struct.unpack_from(">q", value, 2)[0]
    return group, topic, partition, offset


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.wire_source", description=__doc__)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--jars", metavar="FOLDER", help="the jars of Spark's Kafka source")
    arguments = parser.parse_args()
    run(Report(), arguments.records, arguments.jars)
