# SPDX-License-Identifier: Apache-2.0
"""The processes of a live run: the brokers, a Spark cluster with two workers, and the driver that follows the log."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Final, Protocol

from tests.docs.terminal import blocks_of
from tests.live_lake.leaders import Leaders
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.shared import ROOT
from tests.support.spark import small_options, small_settings
from tests.support.spark_cluster import SparkCluster, spark_environment

GUIDE: Final = ROOT / "docs" / "guides" / "pipeline-on-a-cluster.md"
CLUSTER: Final = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.ui.enabled": "false",
}
_FEATURES: Final = ("metadata.version=30", "group.version=1", "transaction.version=2")
"""Those of Kafka 4.3, but for `kraft.version`: static voters do not support its newest level."""
WORKERS: Final = 2
LOG_PARTITIONS: Final = 8
_KEEP: Final = str(24 * 3600 * 1000)
"""Nothing is cleaned during the run, so that the whole log can be compared with the lake."""
_DOWN_SECONDS: Final = 2.0
_STOP_SECONDS: Final = 300.0
_COMPACTING_SECONDS: Final = (10.0, 40.0)
"""When a compaction is killed. Starting Spark takes the first seconds."""
_COMPACTION_SECONDS: Final = 900.0


class Brokers(Protocol):
    """The brokers of a run, of which any can be killed and started again."""

    @property
    def address(self) -> str: ...

    def kill(self, number: int) -> None: ...

    def start(self, number: int) -> None: ...

    def stop(self) -> None: ...


class Kcoord:
    """One broker of kcoord."""

    def __init__(self, folder: Path) -> None:
        settings = {**FAST, "log.cleaner.min.compaction.lag.ms": _KEEP}
        self._process = KcoordProcess(folder, settings).start()
        self.address = self._process.address

    def kill(self, number: int) -> None:
        self._process.kill()

    def start(self, number: int) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.kill()


def kafka(folder: Path, count: int) -> KafkaCluster:
    settings = {
        "log_cleaner_min_compaction_lag_ms": _KEEP,
        "offsets_topic_num_partitions": str(LOG_PARTITIONS),
        "group_initial_rebalance_delay_ms": "0",
    }
    jars = KafkaJars()
    cluster = KafkaCluster(jars, folder, count, **settings)
    # Without these features Kafka has no consumer protocol, to which groups could move.
    features = [argument for feature in _FEATURES for argument in ("--feature", feature)]
    try:
        jars.tool("features", "--bootstrap-server", cluster.address, "upgrade", *features)
    except BaseException:
        cluster.stop()
        raise
    return cluster


class Driver:
    """`kcoord lake ingest --follow` on a Spark cluster, whose workers get kcoord from the archive.

    The command is that of docs/guides/pipeline-on-a-cluster.md.
    """

    def __init__(self, folder: Path, master: str, archive: Path, lake: Path, address: str) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        blocks = {block.title: block.text for block in blocks_of(GUIDE.read_text())}
        command = blocks["a job whose workers get kcoord from an archive"]
        release = f"python{sys.version_info.major}.{sys.version_info.minor}"
        for shown, here in (
            ("spark://host:7077", master),
            ("dist/kcoord-spark.tar.gz", str(archive)),
            ("spark.pyspark.python=python3.11", f"spark.pyspark.python={sys.base_prefix}/bin/{release}"),
            (".venv/bin/python", sys.executable),
            ("kcoord/cli/submit/lake.py", str(ROOT / "kcoord/cli/submit/lake.py")),
            ("broker:9092", address),
            ("/shared/lake", str(lake)),
            ("--follow 10", "--follow 1 --format delta"),
        ):
            assert shown in command, shown
            command = command.replace(shown, here)
        self._command = f"export SPARK_CONF_DIR={folder}; exec {command}"
        settings = {**small_settings(), **CLUSTER}
        (folder / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self.start()

    @property
    def log(self) -> Path:
        return self._folder / "driver.log"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", self._command],
                cwd=self._folder,
                env=spark_environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kills Python and the JVM with SIGKILL."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"the driver ended; the end of its log:\n{self.log.read_text()[-5000:]}"

    def stop(self) -> None:
        """Ends the job between two steps with SIGTERM, to which the driver's Python reacts."""
        assert self._process is not None
        with suppress(ProcessLookupError):  # It ended by itself, which `check` has said.
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(_STOP_SECONDS)


class Compaction:
    """`kcoord lake compact`, which runs while the driver follows the log."""

    def __init__(self, lake: Path) -> None:
        command = [sys.executable, "-m", "kcoord", "lake", "compact", "--lake", str(lake), "--format", "delta"]
        self._command = [*command, "--grace", "0", *small_options()]

    def run(self) -> None:
        subprocess.run(self._command, check=True, timeout=_COMPACTION_SECONDS)

    def kill_after(self, seconds: float) -> None:
        """Runs it, and kills it with its JVM after that time."""
        process = subprocess.Popen(self._command, start_new_session=True, stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Stage:
    """What can be killed, and the leaders that move between the kills if they are given."""

    def __init__(
        self,
        brokers: Brokers,
        count: int,
        spark: SparkCluster,
        driver: Driver,
        compaction: Compaction,
        leaders: Leaders | None,
        seed: int,
    ) -> None:
        self._brokers = brokers
        self._count = count
        self._spark = spark
        self._driver = driver
        self._compaction = compaction
        self._leaders = leaders
        self._random = Random(seed)
        self.kills = {"broker": 0, "worker": 0, "driver": 0, "compaction": 0}

    def play(self, seconds: float, interval_s: float) -> None:
        """Kills a worker, a broker, the driver and a compaction in turn, at the interval, for the given time.

        If leaders move, each kill follows a move.
        """
        end = time.monotonic() + seconds
        kills = itertools.cycle(
            (
                ("worker", self._kill_worker),
                ("broker", self._kill_broker),
                ("driver", self._kill_driver),
                ("compaction", self._kill_compaction),
            )
        )
        while time.monotonic() + interval_s < end:
            time.sleep(interval_s)
            self._driver.check()
            if self._leaders is not None:
                self._leaders.move()
                print(f"leaders moved: {self._leaders.moved}", flush=True)
            name, kill = next(kills)
            print(f"kill -9 of the {name}", flush=True)
            kill()
            self.kills[name] += 1
        time.sleep(max(end - time.monotonic(), 0))

    def _kill_broker(self) -> None:
        number = self._random.randint(1, self._count)
        self._brokers.kill(number)
        time.sleep(_DOWN_SECONDS)
        self._brokers.start(number)

    def _kill_worker(self) -> None:
        number = self._random.randrange(WORKERS)
        self._spark.kill_worker(number)
        time.sleep(_DOWN_SECONDS)
        self._spark.start_worker(number)

    def _kill_compaction(self) -> None:
        self._compaction.kill_after(self._random.uniform(*_COMPACTING_SECONDS))

    def _kill_driver(self) -> None:
        self._driver.kill()
        self._driver.start()


@contextmanager
def brokers_of(kind: str, folder: Path) -> Iterator[tuple[Brokers, int]]:
    """Yields running brokers and their number."""
    folder.mkdir()
    count = 3 if kind == "kafka3" else 1
    brokers: Brokers = Kcoord(folder) if kind == "kcoord" else kafka(folder, count)
    try:
        yield brokers, count
    finally:
        brokers.stop()
