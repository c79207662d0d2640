# SPDX-License-Identifier: Apache-2.0
"""The data source in Spark, compared with Kafka's own tools on logs of Kafka and of this broker, and after kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import kcoord.pipeline
from kcoord.pipeline.schemas import TABLES
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.record_batch import encode_batch, encode_control_batch
from tests.integration.clients.test_dump_log import printed_by_kafka, write_everything
from tests.support.client_races import note_retry
from tests.support.confluent import committed
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.offsets_sample import Row, as_dumped, described_offsets, differences, dumped_records, unpack_sample
from tests.support.spark import TOO_BUSY, TOO_BUSY_RACE, start_spark, unless_too_busy
from tests.support.waiting import wait_until
from tests.unit.logtools.support import commit_record
from tests.unit.pipeline.support import NOW_MS, LogWriter

ROOT = Path(__file__).parents[3]
START_SECONDS = 180.0
STREAM_SECONDS = 120


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """All tests share one session, since starting it takes 10 s or more. A session of other tests is not stopped."""
    is_shared = SparkSession.getActiveSession() is not None
    session = start_spark(tmp_path_factory.mktemp("spark"))
    yield session
    if not is_shared:
        session.stop()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack_sample(tmp_path_factory.mktemp("sample"))


def read(spark: SparkSession, path: str, table: str = "records", **options: str) -> DataFrame:
    return spark.read.format("kcoord").option("table", table).options(**options).load(path)


def rows_of(frame: DataFrame) -> list[Row]:
    rows: list[Row] = frame.toArrow().to_pylist()
    return rows


def offsets_of(rows: list[Row]) -> dict[tuple[str, str, int], int]:
    return {(row["group"], row["topic"], row["partition"]): row["committed_offset"] for row in rows}  # type: ignore[misc]


def test_current_offsets_of_kafkas_logs_are_what_its_tool_shows(spark: SparkSession, sample: str) -> None:
    rows = rows_of(read(spark, sample, "current_offsets"))
    assert len(rows) == 68
    assert offsets_of(rows) == described_offsets()
    # `commits` has the same offsets: the newest row of each key, unless it is a tombstone.
    read(spark, sample, "commits").createOrReplaceTempView("commits")
    newest = spark.sql(
        "SELECT group, topic, partition, last.committed_offset FROM ("
        " SELECT group, topic, partition, max_by(struct(committed_offset, is_tombstone),"
        "  struct(effective_offset, log_offset)) AS last FROM commits GROUP BY group, topic, partition)"
        " WHERE NOT last.is_tombstone"
    )
    assert offsets_of(rows_of(newest)) == described_offsets()


def test_every_record_of_kafkas_logs_is_what_its_tool_dumps(spark: SparkSession, sample: str) -> None:
    rows = rows_of(read(spark, sample, splitBytes="20000"))
    assert len(rows) == 24_368
    assert differences(rows, dumped_records()) == []


@pytest.mark.parametrize("table", sorted(TABLES.keys() - {"records", "commits", "current_offsets"}))
def test_every_table_has_its_documented_columns(spark: SparkSession, sample: str, table: str) -> None:
    frame = read(spark, sample, table)
    assert frame.columns == [column.name for column in TABLES[table].columns]
    assert rows_of(frame)


def test_a_schema_chooses_columns(spark: SparkSession, sample: str) -> None:
    frame = read(spark, sample, "commits").select("group").limit(1)
    assert frame.columns == ["group"]
    narrow = spark.read.format("kcoord").schema("committed_offset bigint, group string").option("table", "commits")
    assert narrow.load(sample).where("group = 'simple-1'").count() > 0
    with pytest.raises(PySparkException, match="the column group has type string, not bigint"):
        spark.read.format("kcoord").schema("group bigint").load(sample).count()


def test_errors_name_the_bad_option_path_or_table(spark: SparkSession, sample: str, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="unknown option groop"):
        read(spark, sample, groop="x").count()
    with pytest.raises(PySparkException, match="there is no folder __consumer_offsets-N"):
        read(spark, str(tmp_path)).count()
    with pytest.raises(PySparkException, match="current_offsets cannot be streamed"):
        stream = spark.readStream.format("kcoord").option("table", "current_offsets").load(sample)
        stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "c")).start().awaitTermination()


def test_filters_are_pushed_down_if_the_session_allows_it(spark: SparkSession, sample: str) -> None:
    expected = read(spark, sample, "commits").where("group = 'etl-tx'").count()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        kcoord.pipeline.register(spark)
        frame = read(spark, sample, "commits")
        filtered = frame.where("group = 'etl-tx'")
        assert filtered.count() == expected > 0
        assert filtered.rdd.getNumPartitions() == 1
        assert frame.where("group IN ('etl-tx', 'simple-1') AND log_partition = 99").count() == 0
        assert frame.where("group LIKE 'etl%'").count() == expected
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
        kcoord.pipeline.register(spark)
    assert read(spark, sample, "commits", groups="etl-tx").count() == expected


def test_logs_that_this_broker_wrote_for_real_clients_are_read(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares the current offsets while the broker runs, and each record with kafka-dump-log after it stopped."""
    jars = KafkaJars()
    broker = KcoordProcess(tmp_path, {**FAST, "offsets.topic.num.partitions": "4"}).start()
    try:
        write_everything(broker.address, "orders")
        offsets = offsets_of(rows_of(read(spark, str(broker.data), "current_offsets")))
        for group in ("orders-848", "orders-classic", "orders-tx"):
            expected = committed(broker.address, group, [("orders", 0), ("orders", 1)])
            assert {key[1:]: value for key, value in offsets.items() if key[0] == group} == {
                key: value for key, value in expected.items() if value >= 0
            }
        assert offsets["orders-tx", "orders", 0] == 7
        assert_same_over_the_wire(spark, broker, tmp_path, capsys)
    finally:
        assert broker.stop() == 0
    files = sorted(broker.data.glob("__consumer_offsets-*/*.log"))
    theirs = printed_by_kafka(jars, "--offsets-decoder", files)
    rows = rows_of(read(spark, str(broker.data)))
    assert len(rows) == len(theirs) > 100
    by_place = {(row["log_partition"], row["log_offset"]): row for row in rows}
    for (file, offset), printed in theirs.items():
        row = by_place[int(Path(file).parent.name.rpartition("-")[2]), offset]
        shown = ({"control": str(row["control_type"]).upper()}, None) if row["control_type"] else as_dumped(row)
        assert shown[0] == printed["key"], row
        if row["control_type"] is None and row["record_type"] != 2:
            assert shown[1] == printed["value"], row
        assert [header["key"] for header in row["headers"] or []] == printed["headers"]  # type: ignore[attr-defined]
    reasons = {row["epoch_reason"] for row in rows_of(read(spark, str(broker.data), "group_epochs"))}
    assert {"join", "leave"} <= reasons


def assert_same_over_the_wire(
    spark: SparkSession, broker: KcoordProcess, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares reads and a stream over the wire with the folders. The password of a client is in no text of Spark."""
    options = {"kafka.bootstrap.servers": broker.address, "kafka.sasl.jaas.config": "a secret"}
    for table in ("records", "current_offsets"):
        frame = spark.read.format("kcoord").option("table", table).options(**options).load()
        key = "log_partition", "log_offset"
        assert rows_of(frame.orderBy(*key)) == rows_of(read(spark, str(broker.data), table).orderBy(*key))
    frame.explain("extended")
    assert "a secret" not in capsys.readouterr().out
    stream = spark.readStream.format("kcoord").options(**options).load().select("log_partition", "log_offset")
    writer = stream.writeStream.format("parquet").option("path", str(folder / "out"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    assert query.awaitTermination(STREAM_SECONDS)
    assert query.lastProgress is not None and "a secret" not in query.lastProgress.json
    rows = spark.read.parquet(str(folder / "out"))
    assert rows.count() == rows.distinct().count() == read(spark, str(broker.data)).count()


def steady_traffic(writer: LogWriter, first: int, count: int) -> None:
    """Writes commits of a group. Every fourth batch is in a transaction that ends two batches later."""
    for number in range(first, first + count):
        records = [commit_record("g", "t", partition, number) for partition in range(3)]
        producer = number % 4 == 0
        writer.append(
            encode_batch(
                records,
                producer_id=number if producer else -1,
                producer_epoch=0 if producer else -1,
                is_transactional=producer,
            )
        )
        if number % 4 == 2:
            kind = ControlRecordType.COMMIT if number % 8 == 2 else ControlRecordType.ABORT
            marker = end_txn_marker(0)
            writer.append(encode_control_batch(kind, marker, timestamp_ms=NOW_MS, producer_id=number - 2))


def clean(writer: LogWriter) -> set[int]:
    """Removes the first batch of every closed segment, as a cleaner may. Returns the removed offsets."""
    gone = set()
    for path in sorted(writer.folder.glob("*.log"))[:-1]:
        data = path.read_bytes()
        size = int.from_bytes(data[8:12], "big") + 12
        base = int.from_bytes(data[:8], "big")
        gone |= set(range(base, base + int.from_bytes(data[23:27], "big") + 1))
        path.with_suffix(".log.swap").write_bytes(data[size:])
        path.with_suffix(".index").unlink(missing_ok=True)
        os.replace(path.with_suffix(".log.swap"), path)
    return gone


def batches_written(out: Path) -> int:
    return len(list(out.glob("_spark_metadata/*")))


def test_a_stream_that_is_killed_and_restarted_has_every_record_once(spark: SparkSession, tmp_path: Path) -> None:
    data, out, checkpoint = tmp_path / "data", tmp_path / "out", tmp_path / "checkpoint"
    writers = [LogWriter(data, number, segment_bytes=8192) for number in range(2)]
    for writer in writers:
        steady_traffic(writer, 0, 120)
    command = [sys.executable, "-m", "tests.integration.pipeline.stream_driver", str(data), str(out), str(checkpoint)]
    driver = start_driver([*command, str(tmp_path)], tmp_path / "driver.log", out)
    try:
        gone = [clean(writer) for writer in writers]
        for writer in writers:
            steady_traffic(writer, 120, 60)
        seen = batches_written(out)
        wait_until(lambda: batches_written(out) > seen, "a batch after the cleaning", START_SECONDS)
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    for writer in writers:
        steady_traffic(writer, 180, 31)
        writer.close()
        (tail,) = sorted(writer.folder.glob("*.log"))[-1:]
        tail.write_bytes(tail.read_bytes() + b"\x00" * 7 + b"torn")
    run_to_the_end(spark, data, out, checkpoint)
    rows = pq.read_table([str(path) for path in committed_files(spark, out)]).to_pylist()
    for number, writer in enumerate(writers):
        offsets = [row["log_offset"] for row in rows if row["log_partition"] == number]
        assert len(offsets) == len(set(offsets)), "a record came twice"
        assert set(range(writer.end_offset)) - set(offsets) <= gone[number], "a record was lost"
    assert {row["transaction"] for row in rows} == {None, "committed", "aborted", "superseded"}


def has_written(driver: subprocess.Popen[bytes], out: Path) -> bool:
    wait_until(lambda: batches_written(out) >= 3 or driver.poll() is not None, "three batches", START_SECONDS)
    return driver.poll() is None


def start_driver(command: list[str], log_file: Path, out: Path) -> subprocess.Popen[bytes]:
    """Starts the driver and waits until it has finished some batches. Tries again if the machine was too busy."""
    for is_retry in (False, True):
        with log_file.open("wb") as log:
            driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        if has_written(driver, out):
            break
        assert TOO_BUSY in log_file.read_text() and not is_retry, log_file.read_text()
        note_retry(TOO_BUSY_RACE)
    return driver


def committed_files(spark: SparkSession, out: Path) -> list[Path]:
    """Returns the files of finished batches."""
    return [Path(uri.removeprefix("file://")) for uri in spark.read.parquet(str(out)).inputFiles()]


def run_to_the_end(spark: SparkSession, data: Path, out: Path, checkpoint: Path) -> None:
    stream = spark.readStream.format("kcoord").load(str(data))
    columns = stream.select("log_partition", "log_offset", "transaction", "effective_offset")

    def run() -> None:
        writer = columns.writeStream.format("parquet").option("path", str(out))
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        assert query.awaitTermination(STREAM_SECONDS)

    unless_too_busy(run)
