# SPDX-License-Identifier: Apache-2.0
"""The commands that run continuously beside a broker, `ingest --follow` and `ends --every`, and how they stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from kcoord.cli.lake import main
from kcoord.cli.lake_output import own_error
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import NewTopic
from kcoord.client.errors import TimeoutException
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord.pipeline.errors import BrokerUnavailableError
from kcoord.pipeline.lake.storage import Lake
from tests.support.confluent import produce
from tests.support.kcoord_process import KcoordProcess
from tests.support.spark import small_options
from tests.support.waiting import wait_until

START_SECONDS = 300.0
STOP_SECONDS = 120.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    running = KcoordProcess(tmp_path_factory.mktemp("broker")).start()
    asyncio.run(_create_topic(running.address))
    yield running
    running.stop()


async def _create_topic(address: str) -> None:
    async with AdminClient(bootstrap_servers=address) as admin:
        (await admin.create_topics([NewTopic("orders", 3)])).all()


def _commit(address: str, offset: int) -> None:
    async def alter() -> None:
        async with AdminClient(bootstrap_servers=address) as admin:
            offsets = {TopicPartition("orders", 0): OffsetAndMetadata(offset)}
            (await admin.alter_consumer_group_offsets("followed", offsets)).all()

    asyncio.run(alter())


def test_ingest_follows_the_log_until_it_gets_a_signal(
    spark: SparkSession, broker: KcoordProcess, tmp_path: Path
) -> None:
    """Runs twice, once for each signal. The second run continues over the wire, while the broker is killed."""
    folder = tmp_path / "lake"
    sources = ["--log", str(broker.data)], ["--bootstrap-server", broker.address, "--timeout", "2000"]
    for run, number in enumerate((signal.SIGTERM, signal.SIGINT)):
        _commit(broker.address, 10 * run)
        with _followed(sources[run], folder, tmp_path / "err") as process:
            _wait_for_commits(process, folder, 2 * run + 1)
            if run:
                broker.kill()
                wait_until(lambda: "trying again" in (tmp_path / "err").read_text(), "the broker is missed", 60)
                broker.start()
            _commit(broker.address, 10 * run + 1)
            _wait_for_commits(process, folder, 2 * run + 2)
            process.send_signal(number)
            assert process.wait(STOP_SECONDS) == 0, (tmp_path / "err").read_text()
    output = (tmp_path / "err").read_text()
    assert output.count(" records (") >= 4
    assert "Traceback" not in output and "Exception" not in output
    assert "[Stage" not in output  # stderr is not a terminal, so there are no progress bars
    lake = Lake(spark, str(folder))
    commits = lake.read("commits").where("`group` = 'followed'").orderBy("log_offset").collect()
    assert [row["committed_offset"] for row in commits] == [0, 1, 10, 11]
    assert lake.read("ends").select("timestamp").distinct().count() >= 2
    (state,) = lake.read("descriptions").select("group", "state").distinct().collect()
    assert tuple(state) == ("followed", "Empty")


class _Followed:
    """`kcoord lake ingest --follow` in a process of its own. Its stderr goes to a file."""

    def __init__(self, command: list[str], stderr: Path, environment: dict[str, str] | None = None) -> None:
        self._stderr = stderr.open("ab")
        # A shell without job control lets its background processes ignore SIGINT. The command would inherit that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(command, stderr=self._stderr, start_new_session=True, env=environment)
        finally:
            signal.signal(signal.SIGINT, before)

    def __enter__(self) -> subprocess.Popen[bytes]:
        return self.process

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the session includes Spark's JVM and workers
        self.process.wait()
        self._stderr.close()


def _followed(source: list[str], lake: Path, stderr: Path) -> _Followed:
    command = [sys.executable, "-m", "kcoord", "lake", "ingest", *source, "--lake", str(lake), "--follow", "0.2"]
    return _Followed([*command, "--master", "local[1]", *small_options()], stderr)


def _has_ended_by_interrupt(process: subprocess.Popen[bytes]) -> bool:
    process.send_signal(signal.SIGINT)
    return process.poll() is not None


def _wait_for_commits(process: subprocess.Popen[bytes], lake: Path, batches: int) -> None:
    """Waits until the lake has that many micro-batches and their commits."""

    def are_there() -> bool:
        assert process.poll() is None, "the command ended"
        # While a table is made again, its note has no progress.
        done = [json.loads(note.read_text())["progress"].get("batch", -1) for note in _notes(lake, "commits")]
        return any(batch >= batches - 1 for batch in done)

    wait_until(are_there, f"{batches} micro-batches are in the lake", START_SECONDS)


@pytest.mark.parametrize("job", [["ingest"], ["ingest", "--follow", "0.2"], ["status"]], ids=" ".join)
def test_an_interrupt_does_not_wait_for_spark(broker: KcoordProcess, tmp_path: Path, job: list[str]) -> None:
    """A Java that does nothing stands for one that is busy: nothing interrupts the thread that waits for it."""
    _commit(broker.address, 1)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nexec sleep 600\n")
    java.chmod(0o755)
    (tmp_path / "release").write_text('JAVA_VERSION="17.0.1"\n')
    source = ["--log", str(broker.data), "--lake", str(tmp_path / "lake"), "--master", "local[1]"]
    command = [sys.executable, "-m", "kcoord", "lake", *job, *source]
    with _Followed(command, tmp_path / "err", {**os.environ, "JAVA_HOME": str(tmp_path)}) as process:
        wait_until((tmp_path / "begun").exists, "Spark is starting", START_SECONDS)
        wait_until(lambda: "batch 0" in (tmp_path / "err").read_text(), "the log is copied", START_SECONDS)
        process.send_signal(signal.SIGINT)
        if "--follow" in job:
            # The first one only sets a flag. The next one counts as soon as the handler has run.
            wait_until(lambda: _has_ended_by_interrupt(process), "the command ends", STOP_SECONDS)
        assert process.wait(STOP_SECONDS) == 130
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_ends_adds_samples_until_it_gets_a_signal(
    spark: SparkSession, broker: KcoordProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--lake", str(tmp_path), "--master", "local[2]", "--bootstrap-server", broker.address]
    produce(broker.address, "orders", 2, 3)
    assert main(["ends", *options]) == 0
    lake = Lake(spark, str(tmp_path))
    rows = lake.read("ends").orderBy("partition").collect()
    assert [(row["topic"], row["partition"], row["start_offset"], row["end_offset"]) for row in rows] == [
        ("orders", 0, 0, 3),
        ("orders", 1, 0, 3),
        ("orders", 2, 0, 0),
    ]
    assert all(row["created_timestamp"] <= row["timestamp"] for row in rows)
    assert main(["ends", *options, "--every", "0.01", "--samples", "2"]) == 0
    assert "sample 2: 3 partitions" in capsys.readouterr().err
    assert main(["ends", *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"sample": 1, "partitions": 3}

    def stop_after_the_next() -> None:
        wait_until(lambda: _samples(tmp_path) == 5, "the fifth sample is taken", STOP_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_after_the_next)
    stopper.start()
    assert main(["ends", *options, "--every", str(STOP_SECONDS)]) == 0
    stopper.join()
    assert lake.read("ends").select("timestamp").distinct().count() == 5


def _samples(lake: Path) -> int:
    return sum(json.loads(note.read_text())["version"] for note in _notes(lake, "ends"))


def _notes(lake: Path, name: str) -> list[Path]:
    return [*lake.glob(f"_kcoord/cluster=*/{name}.json")]


def test_an_error_of_a_worker_has_its_class_and_its_text(spark: SparkSession) -> None:
    """`--follow` finds out so whether it tries again."""

    def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
        raise BrokerUnavailableError("broker:9092: no connection") from TimeoutException("too late")

    with pytest.raises(PySparkException) as raised:
        spark.range(1).mapInArrow(lambda batches: map(fail, batches), "id long").collect()
    assert own_error(str(raised.value)) == ("BrokerUnavailableError", "broker:9092: no connection")


def test_ends_reports_an_unreachable_broker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--bootstrap-server", "127.0.0.1:1", "--timeout", "300"]
    assert main(["ends", "--lake", str(tmp_path / "lake"), *options]) == 1
    assert capsys.readouterr().err.startswith("kcoord lake: find the cluster at 127.0.0.1:1: timed out after 300 ms: ")
    assert not (tmp_path / "lake").exists()
